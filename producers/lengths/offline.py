"""Fits a ranker to recorded completions, and judges it on prompts that were held out. Knows no files but the model's.

Invariant a_prompt_is_taught_or_asked: all completions of a prompt are on one side, chosen by a hash of its id.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import xxhash
from numpy.typing import NDArray

from producers.lengths.calibration import kendall_tau, recall_of_longest
from producers.lengths.estimators import Completion
from producers.lengths.language_model import Example, lesson_of
from producers.lengths.learned.predictor import LearnedLengths
from producers.lengths.model_store import Manifest, next_version, save
from producers.lengths.settings import LengthSettings
from schemas.errors import DataError
from schemas.settings import LoopSettings

if TYPE_CHECKING:
    from producers.lengths.language_model import Effort


# How good estimates are on prompts that nothing was fitted to, by data set and over all. Pure.

TAILS = (0.2, 0.1, 0.05)
"""Shares of the longest whose recall the paper gives (StreamRL, table 4)."""
MAX_PAIRS = 4000
"""Completions, at most, whose order tau compares; all pairs of them are held in memory."""


@dataclass(frozen=True, slots=True)
class Guess:
    """A median, an upper estimate and the length that came of it, in tokens."""

    dataset: str
    median: float
    upper: float
    length: int


@dataclass(frozen=True, slots=True)
class Judgement:
    """``recall``: of the longest 20, 10 and 5 %; ``coverage``: share of lengths at or below the upper estimate."""

    completions: int
    recall: tuple[float | None, ...]
    tau: float | None
    coverage: float

    def fields(self) -> dict[str, float | int | None]:
        """By name, rounded."""
        recalls = {f"recall_{round(100 * share)}": value for share, value in zip(TAILS, self.recall, strict=True)}
        scores = {**recalls, "tau": self.tau, "coverage": self.coverage}
        return {
            "completions": self.completions,
            **{name: None if value is None else round(value, 4) for name, value in scores.items()},
        }


def judge(guesses: Sequence[Guess]) -> dict[str, Judgement]:
    """By data set, and over ``all``."""
    medians = np.array([guess.median for guess in guesses], np.float64)
    uppers = np.array([guess.upper for guess in guesses], np.float64)
    lengths = np.array([guess.length for guess in guesses], np.float64)
    names = np.array([guess.dataset for guess in guesses])
    chosen = {"all": np.ones(len(guesses), bool), **{str(name): names == name for name in np.unique(names)}}
    return {name: _judged(medians[rows], uppers[rows], lengths[rows]) for name, rows in chosen.items() if rows.any()}


def _judged(medians: NDArray[np.float64], uppers: NDArray[np.float64], lengths: NDArray[np.float64]) -> Judgement:
    step = math.ceil(len(lengths) / MAX_PAIRS)
    return Judgement(
        completions=len(lengths),
        recall=tuple(recall_of_longest(medians, lengths, share) for share in TAILS),
        tau=kendall_tau(medians[::step], lengths[::step]),
        coverage=float((lengths <= uppers).mean()),
    )


def baselines(
    taught: Mapping[str, Sequence[int]], asked: Sequence[tuple[str, int]], upper: float
) -> dict[str, list[Guess]]:
    """Of what was taught, lengths by data set: the same quantiles for all, and those of the data set."""
    every = [length for lengths in taught.values() for length in lengths]
    constant = _quantiles(every, upper)
    own = {dataset: _quantiles(lengths, upper) for dataset, lengths in taught.items()}
    return {
        "constant": [Guess(dataset, *constant, length) for dataset, length in asked],
        "per_dataset": [Guess(dataset, *own.get(dataset, constant), length) for dataset, length in asked],
    }


def _quantiles(lengths: Sequence[int], upper: float) -> tuple[float, float]:
    median, high = np.quantile(np.array(lengths, np.float64), [0.5, upper], method="inverted_cdf")
    return float(median), float(high)


FEWEST = 64


@dataclass(frozen=True, slots=True)
class Fitted:
    """``judgements``: by predictor, then by data set and ``all``; over the completions that were held out."""

    version: int
    taught: int
    asked: int
    judgements: dict[str, dict[str, Judgement]]


def split(completions: Sequence[Completion], test_share: float) -> tuple[list[Completion], list[Completion]]:
    """To teach, and to ask about.

    Raises:
        DataError: too few are left to teach.
    """
    taught = [completion for completion in completions if _place(completion) >= test_share]
    if len(taught) < FEWEST:
        raise DataError(f"expected {FEWEST} completions or more to fit to, got {len(taught)} of {len(completions)}")
    return taught, [completion for completion in completions if _place(completion) < test_share]


def fit_trees(completions: Sequence[Completion], out: Path, quantile: float, test_share: float) -> Fitted:
    """Fit the light ranker, in the order given; its next version goes to ``out``.

    Raises:
        DataError: there are too few completions.
    """
    taught, asked = split(completions, test_share)
    memory = min(262_144, max(64, len(taught)))
    settings = LengthSettings(
        predictor="learned", quantile=quantile, memory=memory, learn_after=64, min_observations=1, model_dir=out
    )
    predictor = LearnedLengths(settings, _loop(completions))
    predictor.hold_fits(True)
    for completion in taught:
        predictor.observe(completion)
    predictor.fit_now()
    model = predictor.model
    assert model is not None, "just fitted"
    return _fitted("learned", model.version, taught, _asked(predictor, asked), quantile)


def fit_language_model(
    completions: Sequence[Completion], base: Path, out: Path, quantile: float, test_share: float, effort: "Effort"
) -> Fitted:
    """Fine-tune a Hugging Face model; its next version goes to ``out``.

    Raises:
        DataError: there are too few completions.
        ModelError: there is no such model.
    """
    from producers.lengths.language_model import open_regressor, train

    taught, asked = split(completions, test_share)
    lesson = lesson_of([Example(one.prompt.text, one.prompt.dataset, one.length) for one in taught])
    regressor = open_regressor(base, effort.seed)
    train(regressor, lesson, quantile, effort)
    about = Manifest(
        version=next_version(out),
        policy_version=max(one.version for one in taught),
        observations=len(taught),
        scale=lesson.scale,
        levels=dict(lesson.levels),
    )
    out.mkdir(parents=True, exist_ok=True)
    save(regressor, about, out)
    settings = LengthSettings(predictor="language_model", quantile=quantile, min_observations=1, model_dir=out)
    predictor = LearnedLengths(settings, _loop(completions))
    return _fitted("language_model", about.version, taught, _asked(predictor, asked), quantile)


def _loop(completions: Sequence[Completion]) -> LoopSettings:
    return LoopSettings(max_completion_length=max(1, *(completion.length for completion in completions)))


def _asked(predictor: LearnedLengths, completions: Sequence[Completion]) -> list[Guess]:
    guesses = []
    for one in completions:
        estimate = predictor.predict(one.prompt)
        guesses.append(Guess(one.prompt.dataset, estimate.median, estimate.upper, one.length))
    return guesses


def _fitted(name: str, version: int, taught: Sequence[Completion], guesses: Sequence[Guess], quantile: float) -> Fitted:
    lengths: dict[str, list[int]] = {}
    for one in taught:
        lengths.setdefault(one.prompt.dataset, []).append(one.length)
    asked = [(guess.dataset, guess.length) for guess in guesses]
    everyone = {**baselines(lengths, asked, quantile), name: list(guesses)}
    return Fitted(version, len(taught), len(guesses), {who: judge(said) for who, said in everyone.items()})


def _place(completion: Completion) -> float:
    return xxhash.xxh3_64_intdigest(completion.prompt.prompt_id.encode()) / 2**64
