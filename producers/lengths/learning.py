"""Predicts lengths from what the prompt says and what earlier completions were; learns as the run goes on.

What the text says comes from a model: trees that are fitted here, in a thread, or a model that another process makes
and that is taken from its folder when there is a newer one. What moves faster than models do is followed here: the
level of each data set, the past of each prompt, and how far the upper estimates have to move.

Invariants:
- advice_only: nothing that goes wrong here is raised; the observed quantiles answer instead, and it is counted;
- no_peeking: a group is described as it was before any of its own completions was known, so that the model learns from
  what a prediction has;
- a_fair_sample: completions are learned from in the order in which they were asked for (``turns``);
- one_model_at_a_time: a prediction uses one whole model with the levels that belong to it; the next one replaces it
  between two predictions.

The median ranks prompts best, so whoever orders prompts goes by it; the upper quantile chooses the bucket, because a
group is whole only when its longest sample is.
"""

import math
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from producers.lengths.completion import Completion
from producers.lengths.learned.features import Row, text_features
from producers.lengths.learned.history import SETTLED, Levels, PromptHistory
from producers.lengths.learned.margin import Margins
from producers.lengths.learned.turns import Turns
from producers.lengths.measures.buckets import Buckets
from producers.lengths.observed import ObservedQuantiles
from producers.lengths.settings import LengthSettings
from producers.lengths.upkeep import TextModel, Upkeep
from schemas.messages.prompts import LengthEstimate, Prompt
from schemas.settings import LoopSettings

log = structlog.get_logger()

FEW = 1024
"""Completions that may always wait for one that was asked for before them."""
MAX_OPEN_GROUPS = 8192
"""Groups whose description is kept for completions to come."""
LOUD_FAILURES = 10
"""So many failures are logged one by one, then every hundredth."""


@dataclass(frozen=True, slots=True)
class _Described:
    """A group when its length was predicted, or else before its first completion: its data set's level, its prompt's
    past, what the model says.

    ``level``: not a number while it is not settled. ``row``: what its text looks like, if fits are made here.
    ``quantiles``: median and upper over the level, by the text alone; none without a model.
    """

    row: Row | None
    level: float
    seen: tuple[int, float]
    quantiles: tuple[float, float] | None


class LearnedLengths:
    """``failures`` counts predictions and observations that raised."""

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
        self._levels = Levels()
        self._history = PromptHistory()
        self._margins = Margins(settings.quantile)
        self._open: OrderedDict[str, _Described] = OrderedDict()
        self._turns = Turns[Completion](loop.num_generations, max(FEW, 2 * loop.groups_per_step * loop.num_generations))
        self._model: TextModel | None = None
        self._newest = 0
        self.failures = 0
        self._upkeep = Upkeep(settings, loop.max_completion_length, clock)
        self._take_newer()

    @property
    def model(self) -> TextModel | None:
        """The model in use; none before the first."""
        return self._model

    @property
    def failed_fits(self) -> int:
        """Fits, and readings of models of others, that raised."""
        return self._upkeep.failures

    def wait(self) -> None:
        """Until no fit is under way; its model is in use then."""
        self._upkeep.wait()
        self._take_newer()

    def hold_fits(self, held: bool) -> None:
        """Begin none while held: for whoever reads a long past first."""
        self._upkeep.may_fit = not held

    def predict(self, prompt: Prompt, group_id: str = "") -> LengthEstimate:
        """The model's estimate; the observed quantiles' until there is a model that knows the data set."""
        try:
            self._upkeep.look()
            self._take_newer()
            estimate = self._predict(prompt, group_id)
        except Exception as error:
            self._failed("prediction", error)
            estimate = None
        return self._fallback.predict(prompt) if estimate is None else estimate

    def observe(self, completion: Completion) -> None:
        """Learn a finished completion; every so often a fit begins in the background."""
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
        self._upkeep.fit_now(self._levels, self._newest)
        self._take_newer()

    def _predict(self, prompt: Prompt, group_id: str) -> LengthEstimate | None:
        group = self._describe(prompt)
        if group_id and (group_id not in self._open or group_id in self._turns):
            self._keep(group_id, group)
            self._turns.ask(group_id)
        model = self._model
        if model is None or group.quantiles is None:
            return None
        if self._levels.count(prompt.dataset) < self._settings.min_observations:
            return None
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
        limit = self._loop.max_completion_length
        return max(1, round(math.exp(min(logarithm, math.log(limit)))))

    def _observe(self, completion: Completion) -> None:
        due = self._turns.take(completion.group_id, completion)
        for each in due:
            self._learn(each)
        if due:
            self._upkeep.observed(len(due), self._levels, self._newest)

    def _learn(self, completion: Completion) -> None:
        self._newest = max(self._newest, completion.version)
        group = self._described(completion)
        level = self._levels.of(completion.prompt.dataset) if math.isnan(group.level) else group.level
        relative = math.log(max(1, completion.length)) - level
        self._remember(completion, group)
        self._follow(completion.prompt, completion.length, relative, group)

    def _remember(self, completion: Completion, group: _Described) -> None:
        """For the next fit, if fits are made here."""
        memory, dataset = self._upkeep.memory, completion.prompt.dataset
        if memory is None or group.row is None:
            return
        memory.add(
            group.row,
            level=group.level,
            length=completion.length,
            censored=completion.censored,
            dataset=dataset,
        )

    def _follow(self, prompt: Prompt, length: int, relative: float, group: _Described) -> None:
        """What moves with every completion, between fits: level, margin, and the prompt's own past."""
        if group.quantiles is None:
            self._levels.add(prompt.dataset, length)
            return
        (median, upper), effect = group.quantiles, self._history.effect(group.seen)
        self._margins.add(prompt.dataset, relative - effect - upper)
        self._history.add(prompt.prompt_id, relative - median, group.seen)
        self._levels.add(prompt.dataset, length, median + effect)

    def _described(self, completion: Completion) -> _Described:
        """As it was when its length was predicted, or else when its first completion came."""
        group = self._open.get(completion.group_id)
        if group is None:
            group = self._describe(completion.prompt)
            self._keep(completion.group_id, group)
        return group

    def _describe(self, prompt: Prompt) -> _Described:
        return _Described(
            row=None if self._upkeep.memory is None else text_features(prompt),
            level=self._levels.of(prompt.dataset) if self._levels.count(prompt.dataset) >= SETTLED else math.nan,
            seen=self._history.recall(prompt.prompt_id),
            quantiles=None if self._model is None else self._model.quantiles(prompt),
        )

    def _keep(self, group_id: str, group: _Described) -> None:
        self._open[group_id] = group
        if len(self._open) > MAX_OPEN_GROUPS:
            self._open.popitem(last=False)

    def _take_newer(self) -> None:
        newer = self._upkeep.taken()
        if newer is not None:
            self._model, levels = newer
            if levels:
                self._levels.load(levels)

    def _failed(self, what: str, error: Exception) -> None:
        self.failures += 1
        if self.failures <= LOUD_FAILURES or self.failures % 100 == 0:
            log.warning("length model failed", what=what, error=repr(error), failures=self.failures)
