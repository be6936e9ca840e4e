"""Predicts lengths from the prompt's text and from earlier completions; learns during the run.

A model predicts from the text: trees that are fitted here in a thread, or a model of another process, which is loaded
from its folder when a newer one appears. This module follows what changes faster than models: the level of each data
set, the history of each prompt, and the margin of the upper estimates.

Invariants:
- estimates_are_advice_only: no failure is raised. It is counted, and the observed quantiles answer instead;
- a_group_is_described_before_its_completions: a group's description is taken before any of its completions is known, so
  the model learns from the same inputs that a prediction has;
- completions_are_learned_in_request_order: the order is that in which their lengths were asked for (``RequestOrder``);
- a_prediction_uses_one_model: it uses one model with the levels that belong to it. A newer model replaces it between
  two predictions.

Callers rank prompts by the median, which ranks best. The upper quantile determines the bucket, because a group is
complete only when its longest sample is.
"""

import math
import time
from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import structlog
from cachetools import FIFOCache

from streamrl.producers.lengths.buckets import Buckets
from streamrl.producers.lengths.learned.features import Row, text_features
from streamrl.producers.lengths.learned.history import SETTLED, DatasetLevels, PromptHistory
from streamrl.producers.lengths.learned.model_updates import FIT_RULES, FitRules, ModelUpdater, TextModel
from streamrl.producers.lengths.predictor import ObservedCompletion, ObservedQuantiles
from streamrl.producers.lengths.settings import LengthSettings
from streamrl.schemas.settings import LoopSettings
from streamrl.schemas.trajectories import LengthEstimate, Prompt

log = structlog.get_logger()
WINDOW = 1024
"""Newest residuals from which a margin is computed: few enough to follow a changing policy."""
ENOUGH = 128
"""Residuals from which a margin is used: about 13 of them are then above the 90 % quantile."""
MAX_REQUESTED_GROUPS = 8192
"""Most groups that were asked for and are not complete."""
MIN_WAITING = 1024
"""Completions that may always wait for an earlier request."""
MAX_OPEN_GROUPS = 8192
"""Groups whose description is kept for later completions."""
LOGGED_FAILURES = 10
"""Failures that are logged one by one; after these every hundredth is."""
Finished = TypeVar("Finished")
"""A finished completion."""


@dataclass(frozen=True, slots=True)
class _GroupDescription:
    """The inputs of a group's prediction, taken when its length was predicted, else before its first completion.

    ``row``: features of the text, if models are fitted here. ``level``: of its data set; NaN while it is not settled.
    ``seen``: the prompt's past. ``quantiles``: the model's median and upper quantile, relative to the level, by the
    text alone; None without a model.
    """

    row: Row | None
    level: float
    seen: tuple[int, float]
    quantiles: tuple[float, float] | None


class Residuals:
    """The newest ``WINDOW`` residuals, in order of arrival and in order of size."""

    def __init__(self) -> None:
        self._arrived: deque[float] = deque()
        self._sorted: list[float] = []

    def __len__(self) -> int:
        return len(self._sorted)

    def add(self, residual: float) -> None:
        """Add a residual; if the window is full, the oldest is removed."""
        if len(self._arrived) == WINDOW:
            del self._sorted[bisect_left(self._sorted, self._arrived.popleft())]
        self._arrived.append(residual)
        insort(self._sorted, residual)

    def quantile(self, share: float) -> float:
        """The smallest residual that at least this share, corrected for the sample's size, does not exceed."""
        # n + 1 instead of n: a new residual falls into each of the n + 1 gaps between the n known ones equally likely.
        rank = math.ceil(share * (len(self._sorted) + 1))
        # For a share above n / (n + 1) the rank is beyond the largest residual, which is used then.
        return self._sorted[min(rank, len(self._sorted)) - 1]


class Margins:
    """Margins on the upper estimates, as logarithms, with which they cover the promised share of lengths.

    Each group is predicted before any of its completions is known, so log(length) - upper is an unbiased residual. The
    margin is the promised quantile of the residuals (conformalised quantile regression: Romano, Patterson and Candès,
    arXiv 1905.03222), by data set if enough are known, else over all.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._by_dataset: dict[str, Residuals] = {}
        self._all = Residuals()

    def add(self, dataset: str, residual: float) -> None:
        """Add a residual: a completion's log(length) minus the predicted upper."""
        self._by_dataset.setdefault(dataset, Residuals()).add(residual)
        self._all.add(residual)

    def of(self, dataset: str) -> float:
        """The margin to add to the upper prediction; 0 until enough residuals are known."""
        # The data set's own residuals if there are enough, else those of all.
        for residuals in (self._by_dataset.get(dataset), self._all):
            if residuals is not None and len(residuals) >= ENOUGH:
                return residuals.quantile(self._share)
        return 0.0


class RequestOrder(Generic[Finished]):
    """Releases completions in the order in which their lengths were requested, not in the order in which they ended.

    Short completions end first. A predictor that learns each completion on arrival would see mostly short ones: its
    level would be too low, and its fits would lack the longest. In the order of the requests, the completions learned
    so far are always a fair sample.

    Invariants, each with a test of its name:
    - unrequested_completions_are_released_at_once;
    - a_stuck_group_delays_only_a_limited_number_of_others.

    ``samples``: completions of a group. ``most``: completions that may wait for an earlier request.
    """

    def __init__(self, samples: int, most: int) -> None:
        self._samples, self._most = samples, most
        self._asked: OrderedDict[str, list[Finished]] = OrderedDict()
        self._waiting = 0

    def __contains__(self, group_id: str) -> bool:
        return group_id in self._asked

    def ask(self, group_id: str) -> None:
        """Note a request: the group's completions are released after those of all earlier requests."""
        self._asked.setdefault(group_id, [])

    def take(self, group_id: str, completion: Finished) -> list[Finished]:
        """Add a completion; returns the completions, itself or others, that are released now."""
        held = self._asked.get(group_id)
        # Never requested, or already released.
        if held is None:
            return [completion]
        held.append(completion)
        self._waiting += 1
        due: list[Finished] = []
        # Complete groups from the oldest request on; an incomplete one only if too many wait for it.
        while self._asked and self._is_due(next(iter(self._asked.values()))):
            _, held = self._asked.popitem(last=False)
            self._waiting -= len(held)
            due += held
        return due

    def _is_due(self, oldest: list[Finished]) -> bool:
        return len(oldest) >= self._samples or self._waiting > self._most or len(self._asked) > MAX_REQUESTED_GROUPS


class LearnedLengths:
    """Predicts by a fitted model of the text, corrected by level, prompt history and margin, which follow each length.

    With the data set's level l, the model's quantiles m and u relative to it, the prompt's effect e and the margin d,
    all of them logarithms:

        median = exp(l + e + m)        upper = exp(l + e + max(u + d, m))
    """

    learns_from_the_past = True

    def __init__(
        self,
        settings: LengthSettings,
        loop: LoopSettings,
        buckets: Buckets | None = None,
        clock: Callable[[], float] = time.monotonic,
        rules: FitRules = FIT_RULES,
    ) -> None:
        self._rules = rules
        self._loop = loop
        self.buckets = buckets or Buckets(loop.bucket_boundaries)
        self._fallback = ObservedQuantiles(loop, self.buckets, rules.min_observations, rules.upper)
        self._levels = DatasetLevels()
        self._history = PromptHistory()
        self._margins = Margins(rules.upper)
        self._open: FIFOCache[str, _GroupDescription] = FIFOCache(MAX_OPEN_GROUPS)
        # Groups of two windows are in flight at a time; more must not wait for the slowest of them.
        self._in_order = RequestOrder[ObservedCompletion](
            loop.num_generations, max(MIN_WAITING, 2 * loop.groups_per_step * loop.num_generations)
        )
        self._model: TextModel | None = None
        self._newest = 0
        self._failures = 0
        self._updater = ModelUpdater(settings, loop.max_completion_length, clock, rules)
        # The updater has waited for the folder's newest model, so the first prediction can use it.
        self._take_newer()

    @property
    def model(self) -> TextModel | None:
        """The model in use; None before the first."""
        return self._model

    @property
    def failures(self) -> int:
        """Predictions, observations, fits and loads that raised."""
        return self._failures + self._updater.failures

    def wait(self) -> None:
        """Wait until no fit is running; its model is in use then."""
        self._updater.wait()
        self._take_newer()

    def hold_fits(self, held: bool) -> None:
        """Start no fits while ``held``; for callers that first feed many earlier completions."""
        self._updater.may_fit = not held

    def predict(self, prompt: Prompt, group_id: str = "") -> LengthEstimate:
        """The model's estimate; that of the observed quantiles until there is a model that knows the data set."""
        try:
            self._updater.check_folder()
            self._take_newer()
            estimate = self._predict(prompt, group_id)
        except Exception as error:
            self._failed("prediction", error)
            estimate = None
        return self._fallback.predict(prompt) if estimate is None else estimate

    def observe(self, completion: ObservedCompletion) -> None:
        """Learn a finished completion; when a fit is due, it starts in the background."""
        # First, and outside the try, because the fallback answers if the model fails.
        self._fallback.observe(completion)
        try:
            self._take_newer()
            self._observe(completion)
        except Exception as error:
            self._failed("observation", error)

    def fit_now(self) -> None:
        """Fit to the observed completions now, and save the model; only while no fit is running.

        Raises:
            Exception: the fit or the save failed.
        """
        self._updater.fit_now(self._levels, self._newest)
        self._take_newer()

    def _predict(self, prompt: Prompt, group_id: str) -> LengthEstimate | None:
        group = self._describe(prompt)
        # A repeated request before any of the group's completions is learned replaces the description.
        if group_id and (group_id not in self._open or group_id in self._in_order):
            self._keep(group_id, group)
            self._in_order.ask(group_id)
        model = self._model
        if model is None or group.quantiles is None:
            return None
        # The model's quantiles are relative to a level. If that is unknown, the observed quantiles answer.
        if self._levels.count(prompt.dataset) < self._rules.min_observations:
            return None
        # known = l + e: with it, median = m + known and upper = max(u + known + d, m + known).
        known = self._levels.of(prompt.dataset) + self._history.effect(group.seen)
        median, upper = (quantile + known for quantile in group.quantiles)
        tokens = self._tokens(max(upper + self._margins.of(prompt.dataset), median))
        return LengthEstimate(
            median=self._tokens(median),
            upper=tokens,
            bucket=self.buckets.of(tokens),
            predictor=model.name,
            boundaries_version=self.buckets.version,
        )

    def _tokens(self, logarithm: float) -> int:
        # The limit is applied first, because exp of a very large prediction would overflow.
        limit = self._loop.max_completion_length
        return max(1, round(math.exp(min(logarithm, math.log(limit)))))

    def _observe(self, completion: ObservedCompletion) -> None:
        due = self._in_order.take(completion.group_id, completion)
        for each in due:
            self._learn(each)
        if due:
            self._updater.observed(len(due), self._levels, self._newest)

    def _learn(self, completion: ObservedCompletion) -> None:
        self._newest = max(self._newest, completion.version)
        group = self._described(completion)
        # The level at the prediction; if that had not settled, the present one.
        level = self._levels.of(completion.prompt.dataset) if math.isnan(group.level) else group.level
        relative = math.log(max(1, completion.length)) - level
        self._sample(completion, group)
        self._follow(completion.prompt, completion.length, relative, group)

    def _sample(self, completion: ObservedCompletion, group: _GroupDescription) -> None:
        """Add the completion to the reservoir for the next fit, if models are fitted here."""
        reservoir, dataset = self._updater.reservoir, completion.prompt.dataset
        if reservoir is None or group.row is None:
            return
        reservoir.add(
            group.row,
            level=group.level,
            length=completion.length,
            censored=completion.censored,
            dataset=dataset,
        )

    def _follow(self, prompt: Prompt, length: int, relative: float, group: _GroupDescription) -> None:
        """Update level, margin and the prompt's history, which follow every completion."""
        if group.quantiles is None:
            self._levels.add(prompt.dataset, length)
            return
        (median, upper), effect = group.quantiles, self._history.effect(group.seen)
        # Each part learns the rest that the other parts leave unexplained.
        self._margins.add(prompt.dataset, relative - effect - upper)
        self._history.add(prompt.prompt_id, relative - median, group.seen)
        self._levels.add(prompt.dataset, length, median + effect)

    def _described(self, completion: ObservedCompletion) -> _GroupDescription:
        """The group's description at its prediction, else at its first completion."""
        group = self._open.get(completion.group_id)
        if group is None:
            group = self._describe(completion.prompt)
            self._keep(completion.group_id, group)
        return group

    def _describe(self, prompt: Prompt) -> _GroupDescription:
        return _GroupDescription(
            row=None if self._updater.reservoir is None else text_features(prompt),
            level=self._levels.of(prompt.dataset) if self._levels.count(prompt.dataset) >= SETTLED else math.nan,
            seen=self._history.recall(prompt.prompt_id),
            quantiles=None if self._model is None else self._model.quantiles(prompt),
        )

    def _keep(self, group_id: str, group: _GroupDescription) -> None:
        self._open[group_id] = group

    def _take_newer(self) -> None:
        # Model and levels change together, between two predictions.
        newer = self._updater.take_newer()
        if newer is not None:
            self._model, levels = newer
            # A model that was fitted here has no levels: the present ones stay.
            if levels:
                self._levels.load(levels)

    def _failed(self, what: str, error: Exception) -> None:
        self._failures += 1
        if self._failures <= LOGGED_FAILURES or self._failures % 100 == 0:
            log.warning("length model failed", what=what, error=repr(error), failures=self._failures)
