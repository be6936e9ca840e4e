"""Predicts lengths from what the prompt says and what earlier completions were; learns as the run goes on.

What the text says comes from a model: trees that are fitted here, in a thread, or a model that another process makes
and that is taken from its folder when there is a newer one. What moves faster than models do is followed here: the
level of each data set, the past of each prompt, and how far the upper estimates have to move.

Invariants:
- advice_only: nothing that goes wrong here is raised; the observed quantiles answer instead, and it is counted;
- no_peeking: a group is described as it was before any of its own completions was known, so that the model learns from
  what a prediction has;
- a_fair_sample: completions are learned from in the order in which they were asked for (``RequestOrder``);
- one_model_at_a_time: a prediction uses one whole model with the levels that belong to it; the next one replaces it
  between two predictions.

The median ranks prompts best, so whoever orders prompts goes by it; the upper quantile chooses the bucket, because a
group is whole only when its longest sample is.
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
from streamrl.producers.lengths.learned.model_updates import ModelUpdater, TextModel
from streamrl.producers.lengths.predictor import ObservedCompletion, ObservedQuantiles
from streamrl.producers.lengths.settings import LengthSettings
from streamrl.schemas.settings import LoopSettings
from streamrl.schemas.trajectories import LengthEstimate, Prompt

log = structlog.get_logger()
WINDOW = 1024
"""Residuals that a margin rests on: few enough to follow a policy that changes."""
ENOUGH = 128
"""Residuals from which on a margin is trusted: a 90 % quantile then has some 13 of them above it."""
MAX_ASKED = 8192
"""Groups that were asked for and did not end."""
FEW = 1024
"""Completions that may always wait for one that was asked for before them."""
MAX_OPEN_GROUPS = 8192
"""Groups whose description is kept for completions to come."""
LOGGED_FAILURES = 10
"""So many failures are logged one by one, then every hundredth."""
Finished = TypeVar("Finished")
"""A completion that has ended."""


@dataclass(frozen=True, slots=True)
class _GroupDescription:
    """A group when its length was predicted, or else before its first completion: its data set's level, its prompt's
    past, what the model says.

    ``level``: not a number while it is not settled. ``row``: what its text looks like, if fits are made here.
    ``quantiles``: median and upper over the level, by the text alone; none without a model.
    """

    row: Row | None
    level: float
    seen: tuple[int, float]
    quantiles: tuple[float, float] | None


class Residuals:
    """The last ``WINDOW`` residuals, in order of arrival and of size."""

    def __init__(self) -> None:
        self._arrived: deque[float] = deque()
        self._sorted: list[float] = []

    def __len__(self) -> int:
        return len(self._sorted)

    def add(self, residual: float) -> None:
        """Note one; the oldest leaves when the window is full."""
        if len(self._arrived) == WINDOW:
            del self._sorted[bisect_left(self._sorted, self._arrived.popleft())]
        self._arrived.append(residual)
        insort(self._sorted, residual)

    def quantile(self, share: float) -> float:
        """The smallest that at least this share, corrected for the size of the sample, does not exceed."""
        # n + 1 in place of n: a new residual is as likely to fall into each of the n + 1 gaps between those held.
        rank = math.ceil(share * (len(self._sorted) + 1))
        # A share above n / (n + 1) asks for more than the largest that is held; that one has to do.
        return self._sorted[min(rank, len(self._sorted)) - 1]


class Margins:
    """How far the upper estimates have to move so that they cover what they promise, in logarithms.

    Every new group is predicted before any of its completions is known, so log(length) - upper is an honest residual.
    The margin is their promised quantile (conformalised quantile regression: Romano, Patterson and Candès,
    arXiv 1905.03222), by data set where enough are known, else over all.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._by_dataset: dict[str, Residuals] = {}
        self._all = Residuals()

    def add(self, dataset: str, residual: float) -> None:
        """Note a completion's logarithm of length, less what had been predicted as upper."""
        self._by_dataset.setdefault(dataset, Residuals()).add(residual)
        self._all.add(residual)

    def of(self, dataset: str) -> float:
        """What to add to the upper prediction; zero until enough is known."""
        # The data set's own residuals where there are enough, else those of all.
        for residuals in (self._by_dataset.get(dataset), self._all):
            if residuals is not None and len(residuals) >= ENOUGH:
                return residuals.quantile(self._share)
        return 0.0


class RequestOrder(Generic[Finished]):
    """Releases completions in the order in which their lengths were asked for, not in that in which they ended.

    Short completions end first. Who learned from each as it comes would take the first ones of a batch for all of it,
    the level of the short ones for the level, and fit to data that lacks the longest; in the order of asking, what was
    learned from is at any moment a fair sample.

    Invariants, each with a test of its name:
    - what_was_not_asked_for_has_its_turn_at_once;
    - a_group_that_never_ends_holds_others_up_only_so_long.

    ``samples`` make a group whole. At most ``most`` completions wait for one that was asked for before them.
    """

    def __init__(self, samples: int, most: int) -> None:
        self._samples, self._most = samples, most
        self._asked: OrderedDict[str, list[Finished]] = OrderedDict()
        self._waiting = 0

    def __contains__(self, group_id: str) -> bool:
        return group_id in self._asked

    def ask(self, group_id: str) -> None:
        """A group's turn comes after all that were asked for before it."""
        self._asked.setdefault(group_id, [])

    def take(self, group_id: str, completion: Finished) -> list[Finished]:
        """Those whose turn has come with this one of a group, itself or others."""
        held = self._asked.get(group_id)
        # Never asked for, or released already: nothing to wait for.
        if held is None:
            return [completion]
        held.append(completion)
        self._waiting += 1
        due: list[Finished] = []
        # From the oldest on, whole groups; one that is not whole only if too many wait behind it.
        while self._asked and self._is_due(next(iter(self._asked.values()))):
            _, held = self._asked.popitem(last=False)
            self._waiting -= len(held)
            due += held
        return due

    def _is_due(self, oldest: list[Finished]) -> bool:
        return len(oldest) >= self._samples or self._waiting > self._most or len(self._asked) > MAX_ASKED


class LearnedLengths:
    """A fitted model of the text, corrected by what moves between fits: level, prompt history, and margin.

    With a data set's level l, the text's quantiles m and u over it, the prompt's effect e and the margin d, all logs:

        median = exp(l + e + m)        upper = exp(l + e + max(u + d, m))
    """

    learns_from_the_past = True

    def __init__(
        self,
        settings: LengthSettings,
        loop: LoopSettings,
        buckets: Buckets | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._loop = loop
        self.buckets = buckets or Buckets(loop.bucket_boundaries)
        self._fallback = ObservedQuantiles(settings, loop, self.buckets)
        self._levels = DatasetLevels()
        self._history = PromptHistory()
        self._margins = Margins(settings.quantile)
        self._open: FIFOCache[str, _GroupDescription] = FIFOCache(MAX_OPEN_GROUPS)
        # Groups of two windows are under way at a time; more must not wait for the slowest of them.
        self._in_order = RequestOrder[ObservedCompletion](
            loop.num_generations, max(FEW, 2 * loop.groups_per_step * loop.num_generations)
        )
        self._model: TextModel | None = None
        self._newest = 0
        self._failures = 0
        self._updater = ModelUpdater(settings, loop.max_completion_length, clock)
        # The updater has waited for the folder's newest model, so the very first prediction may use it.
        self._take_newer()

    @property
    def model(self) -> TextModel | None:
        """The model in use; none before the first."""
        return self._model

    @property
    def failures(self) -> int:
        """Predictions, observations, fits, and readings of models of others, that raised."""
        return self._failures + self._updater.failures

    def wait(self) -> None:
        """Until no fit is under way; its model is in use then."""
        self._updater.wait()
        self._take_newer()

    def hold_fits(self, held: bool) -> None:
        """Begin none while held: for whoever reads a long past first."""
        self._updater.may_fit = not held

    def predict(self, prompt: Prompt, group_id: str = "") -> LengthEstimate:
        """The model's estimate; the observed quantiles' until there is a model that knows the data set."""
        try:
            self._updater.check_folder()
            self._take_newer()
            # Whatever goes wrong in here, the dispatcher gets an estimate.
            estimate = self._predict(prompt, group_id)
        except Exception as error:
            self._failed("prediction", error)
            estimate = None
        return self._fallback.predict(prompt) if estimate is None else estimate

    def observe(self, completion: ObservedCompletion) -> None:
        """Learn a finished completion; every so often a fit begins in the background."""
        # First, and outside the try: it answers whenever something goes wrong with the model.
        self._fallback.observe(completion)
        try:
            self._take_newer()
            self._observe(completion)
        except Exception as error:
            self._failed("observation", error)

    def fit_now(self) -> None:
        """Fit to what was observed, and keep the model; only while no fit is under way.

        Raises:
            Exception: whatever stood in the way.
        """
        self._updater.fit_now(self._levels, self._newest)
        self._take_newer()

    def _predict(self, prompt: Prompt, group_id: str) -> LengthEstimate | None:
        group = self._describe(prompt)
        # Asked again before anything of the group was learned: the newer description counts.
        if group_id and (group_id not in self._open or group_id in self._in_order):
            self._keep(group_id, group)
            self._in_order.ask(group_id)
        model = self._model
        if model is None or group.quantiles is None:
            return None
        # Quantiles over a level that is not known say nothing: the observed ones answer.
        if self._levels.count(prompt.dataset) < self._settings.min_observations:
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
        # The limit first: exp of a wild prediction would overflow.
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
        # The level that the prediction rested on; where it had not settled, that of now.
        level = self._levels.of(completion.prompt.dataset) if math.isnan(group.level) else group.level
        relative = math.log(max(1, completion.length)) - level
        self._sample(completion, group)
        self._follow(completion.prompt, completion.length, relative, group)

    def _sample(self, completion: ObservedCompletion, group: _GroupDescription) -> None:
        """For the next fit, if fits are made here."""
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
        """What moves with every completion, between fits: level, margin, and the prompt's own past."""
        if group.quantiles is None:
            self._levels.add(prompt.dataset, length)
            return
        (median, upper), effect = group.quantiles, self._history.effect(group.seen)
        # Each part learns from what the parts before it leave unexplained.
        self._margins.add(prompt.dataset, relative - effect - upper)
        self._history.add(prompt.prompt_id, relative - median, group.seen)
        self._levels.add(prompt.dataset, length, median + effect)

    def _described(self, completion: ObservedCompletion) -> _GroupDescription:
        """As it was when its length was predicted, or else when its first completion came."""
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
            # A model that was fitted here comes without levels: those of now go on.
            if levels:
                self._levels.load(levels)

    def _failed(self, what: str, error: Exception) -> None:
        self._failures += 1
        if self._failures <= LOGGED_FAILURES or self._failures % 100 == 0:
            log.warning("length model failed", what=what, error=repr(error), failures=self._failures)
