"""Fits a ranker to recorded completions, and judges it on prompts that were held out. Knows no files but the model's.

Invariant a_prompt_is_taught_or_asked: all completions of a prompt are on one side, chosen by a hash of its id.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from producers.lengths.completion import Completion
from producers.lengths.language_model.examples import Example, lesson_of
from producers.lengths.language_model.store import Manifest, next_version, save
from producers.lengths.learning import LearnedLengths
from producers.lengths.ranker.judging import Guess, Judgement, baselines, judge
from producers.lengths.settings import LengthSettings
from schemas.errors import DataError
from schemas.settings import LoopSettings

if TYPE_CHECKING:
    from producers.lengths.language_model.network import Effort

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
    from producers.lengths.language_model.network import open_regressor, train

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
