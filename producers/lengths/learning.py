"""Predicts lengths from what the prompt says and what earlier completions were; learns as the run goes on.

Invariants:
- advice_only: nothing that goes wrong here is raised; the observed quantiles answer instead, and it is counted;
- no_peeking: a group is described as it was before any of its own completions was known, so that the model learns from
  what a prediction has;
- one_model_at_a_time: a prediction uses one whole model; the next one replaces it in one assignment.

The median ranks prompts best, so whoever orders prompts goes by it; the upper quantile chooses the bucket, because a
group is whole only when its longest sample is.
"""

import math
from collections import OrderedDict
from dataclasses import dataclass

import structlog

from producers.lengths.completion import Completion
from producers.lengths.learned.features import ROW_WIDTH, Row, text_features
from producers.lengths.learned.fitting import fit
from producers.lengths.learned.history import SETTLED, Levels, PromptHistory
from producers.lengths.learned.margin import Margins
from producers.lengths.learned.memory import Memory, Observations
from producers.lengths.learned.model import LengthModel, load_newest, save
from producers.lengths.learned.refit import Refitter
from producers.lengths.observed import ObservedQuantiles
from producers.lengths.settings import LengthSettings
from schemas.messages.prompts import LengthEstimate, Prompt
from schemas.settings import LoopSettings

log = structlog.get_logger()

MAX_OPEN_GROUPS = 8192
"""Groups whose description is kept for completions to come."""
LOUD_FAILURES = 10
"""So many failures are logged one by one, then every hundredth."""


@dataclass(frozen=True, slots=True)
class _Described:
    """A group before its first completion: features, its data set's level, its prompt's past, what the model says.

    ``quantiles``: median and upper over the level, by the text alone; none without a model.
    """

    row: Row
    level: float
    seen: tuple[int, float]
    quantiles: tuple[float, float] | None


class LearnedLengths:
    """``failures`` counts predictions and observations that raised; ``wait`` is for those that want the fit's end."""

    def __init__(self, settings: LengthSettings, loop: LoopSettings) -> None:
        self._settings = settings
        self._loop = loop
        self._fallback = ObservedQuantiles(settings, loop)
        self._levels = Levels()
        self._history = PromptHistory()
        self._margins = Margins(settings.quantile)
        self._memory = Memory(settings.memory, ROW_WIDTH)
        self._open: OrderedDict[str, _Described] = OrderedDict()
        self._refitter = Refitter()
        self._model: LengthModel | None = None
        self._newest = 0
        self._since_fit = 0
        self.failures = 0
        self._load()

    @property
    def model(self) -> LengthModel | None:
        """The model in use; none before the first fit."""
        return self._model

    @property
    def failed_fits(self) -> int:
        """Fits that raised."""
        return self._refitter.failures

    def wait(self) -> None:
        """Until no fit is under way."""
        self._refitter.wait()

    def predict(self, prompt: Prompt) -> LengthEstimate:
        """The model's estimate; the observed quantiles' until there is a model that knows the data set."""
        try:
            estimate = self._predict(prompt)
        except Exception as error:
            self._failed("prediction", error)
            estimate = None
        return self._fallback.predict(prompt) if estimate is None else estimate

    def observe(self, completion: Completion) -> None:
        """Learn a finished completion; every so often a fit begins in the background."""
        self._fallback.observe(completion)
        try:
            self._observe(completion)
        except Exception as error:
            self._failed("observation", error)

    def _predict(self, prompt: Prompt) -> LengthEstimate | None:
        model = self._model
        if model is None or self._levels.count(prompt.dataset) < self._settings.min_observations:
            return None
        known = self._levels.of(prompt.dataset) + self._history.effect(self._history.recall(prompt.prompt_id))
        median, upper = model.forest.predict(text_features(prompt)) + known
        upper = max(upper + self._margins.of(prompt.dataset), median)
        tokens = self._tokens(upper)
        return LengthEstimate(
            median=self._tokens(median),
            upper=tokens,
            bucket=self._loop.bucket_of(tokens),
            predictor=f"learned/v{model.version}",
        )

    def _tokens(self, logarithm: float) -> int:
        limit = self._loop.max_completion_length
        return max(1, round(math.exp(min(logarithm, math.log(limit)))))

    def _observe(self, completion: Completion) -> None:
        self._newest = max(self._newest, completion.version)
        prompt = completion.prompt
        group = self._described(completion)
        seen = self._levels.count(prompt.dataset)
        relative = math.log(max(1, completion.length)) - group.level
        self._memory.add(
            group.row,
            level=group.level if seen >= SETTLED else math.nan,
            length=completion.length,
            censored=completion.censored,
            dataset=prompt.dataset,
        )
        self._follow(prompt, completion.length, relative, group)
        self._since_fit += 1
        if self._since_fit >= self._patience() and not self._refitter.is_busy:
            self._since_fit = 0
            self._begin_fit()

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
        group = self._open.get(completion.group_id)
        if group is None:
            prompt, model = completion.prompt, self._model
            row = text_features(prompt)
            quantiles = None
            if model is not None:
                median, upper = map(float, model.forest.predict(row))
                quantiles = (median, upper)
            seen = self._history.recall(prompt.prompt_id)
            group = _Described(row, self._levels.of(prompt.dataset), seen, quantiles)
            self._open[completion.group_id] = group
            if len(self._open) > MAX_OPEN_GROUPS:
                self._open.popitem(last=False)
        return group

    def _patience(self) -> int:
        """Observations until the next fit: few at first, since each then says much."""
        return min(self._settings.refit_every, max(self._settings.learn_after, len(self._memory) // 2))

    def _begin_fit(self) -> None:
        observed, levels, newest = self._memory.snapshot(self._levels), self._levels.dump(), self._newest
        self._refitter.start(lambda: self._fit(observed, levels, newest))

    def _fit(self, observed: Observations, levels: dict[str, tuple[float, int]], newest: int) -> None:
        """In the thread. Nobody else assigns the model."""
        forest = fit(observed, (0.5, self._settings.quantile), self._loop.max_completion_length)
        forest.check(ROW_WIDTH, quantiles=2)
        version = 1 if self._model is None else self._model.version + 1
        model = LengthModel(forest, version, newest, len(observed))
        self._model = model
        log.info("length model fitted", version=version, observations=len(observed), policy_version=newest)
        if self._settings.model_dir is not None:
            save(model, levels, self._settings.model_dir)

    def _load(self) -> None:
        if self._settings.model_dir is None:
            return
        try:
            loaded = load_newest(self._settings.model_dir)
        except Exception as error:
            self._failed("loading", error)
            return
        if loaded is not None:
            self._model, levels = loaded
            self._levels.load(levels)
            log.info("length model loaded", version=self._model.version, observations=self._model.observations)

    def _failed(self, what: str, error: Exception) -> None:
        self.failures += 1
        if self.failures <= LOUD_FAILURES or self.failures % 100 == 0:
            log.warning("length model failed", what=what, error=repr(error), failures=self.failures)
