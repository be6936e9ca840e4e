"""Fits a ranker to recorded completions, and scores it on held-out prompts. The only files it uses are the model's.

Invariant a_prompt_is_fitted_or_held_out: all completions of a prompt are on one side, chosen by a hash of its id.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import xxhash
from numpy.typing import NDArray

from streamrl.producers.lengths.calibration import kendall_tau, recall_of_longest
from streamrl.producers.lengths.learned.model_store import Manifest, ModelStore
from streamrl.producers.lengths.learned.model_updates import FitRules
from streamrl.producers.lengths.learned.predictor import LearnedLengths
from streamrl.producers.lengths.predictor import ObservedCompletion
from streamrl.producers.lengths.settings import LengthSettings
from streamrl.schemas.errors import DataError
from streamrl.schemas.settings import LoopSettings

if TYPE_CHECKING:
    from streamrl.producers.lengths.learned.language_model import FineTuning


TAILS = (0.2, 0.1, 0.05)
"""Shares of the longest completions for which recall is computed, as in StreamRL, table 4."""
MAX_PAIRS = 4000
"""Most completions whose order tau compares; all pairs of them are held in memory."""


@dataclass(frozen=True, slots=True)
class PredictedLength:
    """The median and upper estimates of a completion, and its actual length, in tokens."""

    dataset: str
    median: float
    upper: float
    length: int


@dataclass(frozen=True, slots=True)
class RankingScores:
    """``recall``: of the longest 20, 10 and 5 %; ``coverage``: share of lengths at or below the upper estimate."""

    completions: int
    recall: tuple[float | None, ...]
    tau: float | None
    coverage: float

    def fields(self) -> dict[str, float | int | None]:
        """The scores by name, rounded."""
        recalls = {f"recall_{round(100 * share)}": value for share, value in zip(TAILS, self.recall, strict=True)}
        scores = {**recalls, "tau": self.tau, "coverage": self.coverage}
        return {
            "completions": self.completions,
            **{name: None if value is None else round(value, 4) for name, value in scores.items()},
        }


def score(predictions: Sequence[PredictedLength]) -> dict[str, RankingScores]:
    """Scores by data set, and over ``all``."""
    medians = np.array([prediction.median for prediction in predictions], np.float64)
    uppers = np.array([prediction.upper for prediction in predictions], np.float64)
    lengths = np.array([prediction.length for prediction in predictions], np.float64)
    names = np.array([prediction.dataset for prediction in predictions])
    chosen = {"all": np.ones(len(predictions), bool), **{str(name): names == name for name in np.unique(names)}}
    return {name: _scores(medians[rows], uppers[rows], lengths[rows]) for name, rows in chosen.items() if rows.any()}


def _scores(medians: NDArray[np.float64], uppers: NDArray[np.float64], lengths: NDArray[np.float64]) -> RankingScores:
    # The memory of tau grows with the square of the count, so only every step-th completion is used.
    step = math.ceil(len(lengths) / MAX_PAIRS)
    return RankingScores(
        completions=len(lengths),
        recall=tuple(recall_of_longest(medians, lengths, share) for share in TAILS),
        tau=kendall_tau(medians[::step], lengths[::step]),
        coverage=float((lengths <= uppers).mean()),
    )


def baselines(
    train: Mapping[str, Sequence[int]], test: Sequence[tuple[str, int]], upper: float
) -> dict[str, list[PredictedLength]]:
    """The baselines' predictions: the quantiles of all training lengths, and those of the data set.

    ``train``: lengths by data set; ``test``: data set and length of each completion; ``upper``: the upper quantile.
    """
    every = [length for lengths in train.values() for length in lengths]
    # A data set without training lengths gets the quantiles of all.
    constant = _quantiles(every, upper)
    own = {dataset: _quantiles(lengths, upper) for dataset, lengths in train.items()}
    return {
        "constant": [PredictedLength(dataset, *constant, length) for dataset, length in test],
        "per_dataset": [PredictedLength(dataset, *own.get(dataset, constant), length) for dataset, length in test],
    }


def _quantiles(lengths: Sequence[int], upper: float) -> tuple[float, float]:
    # inverted_cdf is the nearest rank, as in RecentLengths: the result is always one of the lengths.
    median, high = np.quantile(np.array(lengths, np.float64), [0.5, upper], method="inverted_cdf")
    return float(median), float(high)


MOST_FITTED = 262_144
"""Most completions that trees are fitted to, at 1.2 KB of memory each."""
MIN_TRAIN = 64
"""Fewest completions that a fit needs: trees have at least 24 per leaf, so with fewer they could hardly split."""


@dataclass(frozen=True, slots=True)
class FitReport:
    """``train``, ``test``: numbers of completions that were fitted to and held out.

    ``scores``: over the held-out ones, by predictor, then by data set and ``all``.
    """

    version: int
    train: int
    test: int
    scores: dict[str, dict[str, RankingScores]]


def split(
    completions: Sequence[ObservedCompletion], test_share: float
) -> tuple[list[ObservedCompletion], list[ObservedCompletion]]:
    """The completions to fit to, and those held out.

    Raises:
        DataError: there are too few to fit to.
    """
    train = [completion for completion in completions if _uniform_hash(completion) >= test_share]
    if len(train) < MIN_TRAIN:
        raise DataError(f"expected {MIN_TRAIN} completions or more to fit to, got {len(train)} of {len(completions)}")
    return train, [completion for completion in completions if _uniform_hash(completion) < test_share]


def fit_trees(completions: Sequence[ObservedCompletion], out: Path, quantile: float, test_share: float) -> FitReport:
    """Fit trees to the completions, in the order given; the next version is saved in ``out``.

    Raises:
        DataError: there are too few completions.
    """
    fitted_to, held_out = split(completions, test_share)
    settings = LengthSettings(predictor="learned", model_dir=out)
    # Room for all of them. min_observations is 1, so that the model, not its fallback, is scored on every data set.
    rules = FitRules(reservoir_size=min(MOST_FITTED, len(fitted_to)), upper=quantile, min_observations=1)
    predictor = LearnedLengths(settings, _loop(completions), rules=rules)
    # Hold fits, so that there is a single fit to all completions at the end.
    predictor.hold_fits(True)
    for completion in fitted_to:
        predictor.observe(completion)
    predictor.fit_now()
    # The predictor uses the version that was just written to the folder.
    model = predictor.model
    assert model is not None, "fit_now has made a model"
    return _fitted("learned", model.version, fitted_to, _predict(predictor, held_out), quantile)


def fit_language_model(
    completions: Sequence[ObservedCompletion],
    base: Path,
    out: Path,
    quantile: float,
    test_share: float,
    tuning: "FineTuning",
) -> FitReport:
    """Fine-tune a Hugging Face model; the next version is saved in ``out``.

    Raises:
        DataError: there are too few completions.
        ModelError: there is no such model.
    """
    from streamrl.producers.lengths.learned.language_model import make_training_set, open_regressor, save, train

    fitted_to, held_out = split(completions, test_share)
    examples = make_training_set(fitted_to)
    regressor = open_regressor(base, tuning.seed)
    train(regressor, examples, quantile, tuning)
    manifest = Manifest(
        version=ModelStore(out, "language").next_version(),
        policy_version=max(one.version for one in fitted_to),
        observations=len(fitted_to),
        levels=dict(examples.levels),
        details={"scale": examples.scale},
    )
    save(regressor, manifest, out)
    # Scored as in a run: through the predictor, which loads it from the folder.
    settings = LengthSettings(predictor="language_model", model_dir=out)
    rules = FitRules(upper=quantile, min_observations=1)
    predictor = LearnedLengths(settings, _loop(completions), rules=rules)
    return _fitted("language_model", manifest.version, fitted_to, _predict(predictor, held_out), quantile)


def _loop(completions: Sequence[ObservedCompletion]) -> LoopSettings:
    # A limit that no recorded length exceeds, so that neither lengths nor predictions are cut off.
    return LoopSettings(max_completion_length=max(1, *(completion.length for completion in completions)))


def _predict(predictor: LearnedLengths, completions: Sequence[ObservedCompletion]) -> list[PredictedLength]:
    predictions = []
    for one in completions:
        # Without a group id the predictor does not expect the group's completions.
        estimate = predictor.predict(one.prompt)
        predictions.append(PredictedLength(one.prompt.dataset, estimate.median, estimate.upper, one.length))
    return predictions


def _fitted(
    name: str,
    version: int,
    fitted_to: Sequence[ObservedCompletion],
    predictions: Sequence[PredictedLength],
    quantile: float,
) -> FitReport:
    lengths: dict[str, list[int]] = {}
    for one in fitted_to:
        lengths.setdefault(one.prompt.dataset, []).append(one.length)
    test = [(prediction.dataset, prediction.length) for prediction in predictions]
    by_predictor = {**baselines(lengths, test, quantile), name: list(predictions)}
    scores = {predictor: score(predicted) for predictor, predicted in by_predictor.items()}
    return FitReport(version, len(fitted_to), len(predictions), scores)


def _uniform_hash(completion: ObservedCompletion) -> float:
    # Uniform in 0 to 1, and the same for all completions of a prompt and in every fit.
    return xxhash.xxh3_64_intdigest(completion.prompt.prompt_id.encode()) / 2**64
