"""Where the model of a predictor comes from: fitted here in a thread, or taken from a folder that others write to.

It knows no prompts and predicts nothing. Nothing here waits: a fit and the reading of a model run in a thread, and what
comes of them is taken by whoever asks next.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Protocol

import structlog

from producers.lengths.learned.features import ROW_WIDTH
from producers.lengths.learned.history import Levels, Memory, Observations
from producers.lengths.learned.model import LengthModel, Refitter, fit, load_newest, save
from producers.lengths.settings import LengthSettings
from schemas.trajectories import Prompt

log = structlog.get_logger()

LOOK_EVERY_S = 2.0
"""Between two looks at the folder for a newer model of another process."""


class TextModel(Protocol):
    """What a prompt's text says of its length."""

    @property
    def name(self) -> str:
        """With its version; estimates carry it."""
        ...

    @property
    def version(self) -> int:
        """A higher one is newer."""
        ...

    @property
    def policy_version(self) -> int:
        """The newest policy whose completions it was fitted to."""
        ...

    @property
    def observations(self) -> int:
        """Completions that it was fitted to."""
        ...

    def quantiles(self, prompt: Prompt) -> tuple[float, float]:
        """Median and upper of the logarithm of length over its data set's level."""
        ...


Loaded = tuple[TextModel, Mapping[str, tuple[float, int]]]
"""A model, and by data set the level it was fitted over and how many completions that rests on; none: as they are."""


class Upkeep:
    """``memory`` is there if fits are made here. ``may_fit`` holds them back while it is false."""

    def __init__(self, settings: LengthSettings, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._limit = limit
        self._clock = clock
        self._refitter = Refitter()
        self._newer: deque[Loaded] = deque(maxlen=1)
        self._version = 0
        self._since_fit = 0
        self._inherited = 0
        self._looked_at = -math.inf
        self._folder_changed_at: float = -math.inf
        self.memory = Memory(settings.memory, ROW_WIDTH) if settings.fits_in_thread else None
        self.may_fit = True
        if settings.model_dir is not None:
            self._refitter.start(self._load)
            self._refitter.wait()

    @property
    def failures(self) -> int:
        """Fits, and readings of models, that raised."""
        return self._refitter.failures

    def wait(self) -> None:
        """Until nothing is under way."""
        self._refitter.wait()

    def taken(self) -> Loaded | None:
        """The model that has come since the last call; none if there is none."""
        if not self._newer:
            return None
        newer = self._newer.pop()
        self._version = max(self._version, newer[0].version)
        return newer

    def look(self) -> None:
        """Every few seconds, see whether the folder has changed. Whoever fits here has the newest model already."""
        folder, now = self._settings.model_dir, self._clock()
        if folder is None or self._settings.fits_in_thread or now - self._looked_at < LOOK_EVERY_S:
            return
        self._looked_at = now
        if not self._refitter.is_busy and folder.exists() and folder.stat().st_mtime_ns != self._folder_changed_at:
            self._refitter.start(self._load)

    def observed(self, count: int, levels: Levels, newest: int) -> None:
        """Completions were added to the memory; every so often a fit begins. ``newest``: the newest policy seen."""
        self._since_fit += count
        if self.may_fit and self._since_fit >= self._patience() and not self._refitter.is_busy:
            self._since_fit = 0
            snapshot = self._snapshot(levels)
            self._refitter.start(lambda: self._fit(*snapshot, newest))

    def fit_now(self, levels: Levels, newest: int) -> None:
        """Fit to what was observed, and keep the model; only while nothing is under way.

        Raises:
            Exception: whatever stood in the way.
        """
        self._fit(*self._snapshot(levels), newest)

    def _patience(self) -> float:
        """Observations until the next fit: few at first, since each then says much, but never so few that a model that
        was found at the start knew twice as many.
        """
        if self.memory is None or 2 * len(self.memory) < min(self._inherited, self._settings.memory):
            return math.inf
        return min(self._settings.refit_every, max(self._settings.learn_after, len(self.memory) // 2))

    def _snapshot(self, levels: Levels) -> tuple[Observations, dict[str, tuple[float, int]]]:
        assert self.memory is not None, "only who fits has a memory"
        return self.memory.snapshot(levels), levels.dump()

    def _fit(self, observed: Observations, levels: dict[str, tuple[float, int]], newest: int) -> None:
        forest = fit(observed, (0.5, self._settings.quantile), self._limit)
        forest.check(ROW_WIDTH, quantiles=2)
        model = LengthModel(forest, self._version + 1, newest, len(observed))
        self._newer.append((model, {}))
        log.info("length model fitted", model=model.name, observations=len(observed), policy_version=newest)
        if self._settings.model_dir is not None:
            save(model, levels, self._settings.model_dir)

    def _load(self) -> None:
        folder = self._settings.model_dir
        if folder is None or not folder.exists():
            return
        changed_at = folder.stat().st_mtime_ns
        if self._settings.predictor == "language_model":
            from producers.lengths.model_store import load_newest as load_language_model

            loaded: Loaded | None = load_language_model(folder, newer_than=self._version)
        else:
            loaded = load_newest(folder, newer_than=self._version)
        self._folder_changed_at = changed_at
        if loaded is not None:
            self._newer.append(loaded)
            self._inherited = loaded[0].observations
            log.info("length model loaded", model=loaded[0].name)
