"""New models for a predictor: fitted here in a thread, or read from a folder that another process writes to.

After the first model nothing here blocks: models are fitted and read in a thread, and the next call of ``take_newer``
returns the result.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import structlog

from streamrl.producers.lengths.calibration import UPPER_SHARE
from streamrl.producers.lengths.learned.features import ROW_WIDTH
from streamrl.producers.lengths.learned.history import DatasetLevels, Observations, Reservoir
from streamrl.producers.lengths.learned.model import KIND, LengthModel, fit, load_newest, save
from streamrl.producers.lengths.learned.model_store import ModelStore
from streamrl.producers.lengths.predictor import MIN_OBSERVATIONS
from streamrl.producers.lengths.settings import LengthSettings
from streamrl.schemas.trajectories import Prompt

log = structlog.get_logger()

CHECK_INTERVAL_S = 2.0
"""Seconds between two checks of the folder for a newer model. Another process needs seconds to minutes for a fit."""


@dataclass(frozen=True, slots=True)
class FitRules:
    """When a model is fitted, and to what.

    ``min_samples``: completions before the first fit; ``refit_every``: most completions between two fits;
    ``reservoir_size``: completions that are kept for fits, 1.2 KB each; ``refit_s``: seconds for which a language model
    is fine-tuned for each version; ``upper``: share of completions that the upper estimate should cover;
    ``min_observations``: completions of a data set from which the model is asked about it.
    """

    min_samples: int = 256
    refit_every: int = 4096
    reservoir_size: int = 8192
    refit_s: float = 20.0
    upper: float = UPPER_SHARE
    min_observations: int = MIN_OBSERVATIONS

    def interval(self, known: int) -> int:
        """Completions from one fit to the next, of ``known`` ones: few at first, because each then adds much."""
        return min(self.refit_every, max(self.min_samples, known // 2))


FIT_RULES = FitRules()
"""The rules of every run: the first fit as soon as trees can split, and later ones about a core second apiece."""


class TextModel(Protocol):
    """Predicts a completion's length from the prompt's text."""

    @property
    def name(self) -> str:
        """Name with the version; estimates carry it."""
        ...

    @property
    def version(self) -> int:
        """Version of the model; a higher one is newer."""
        ...

    @property
    def policy_version(self) -> int:
        """The newest policy version in the model's training data."""
        ...

    @property
    def observations(self) -> int:
        """Completions that the model was fitted to."""
        ...

    def quantiles(self, prompt: Prompt) -> tuple[float, float]:
        """Median and upper quantile of log(length) minus the level of the data set."""
        ...


Loaded = tuple[TextModel, Mapping[str, tuple[float, int]]]
"""A model; and by data set, the level that it was fitted with and the level's number of completions. Without levels the
present ones stay."""


class BackgroundFit:
    """Runs one fit at a time in a thread, while the caller continues.

    A fit that raises is logged and counted in ``failures``; it changes nothing else.
    """

    def __init__(self) -> None:
        self.failures = 0
        self._thread: threading.Thread | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a fit is running."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, fit: Callable[[], None]) -> None:
        """Start a fit; only while none is running. Its thread must end within seconds."""
        assert not self.is_busy, "expected no running fit"
        self._thread = threading.Thread(target=self._run, args=(fit,), name="length-refit")
        self._thread.start()

    def _run(self, fit: Callable[[], None]) -> None:
        try:
            fit()
        except Exception as error:
            self.failures += 1
            log.warning("length model not fitted", error=repr(error), failures=self.failures)

    def wait(self) -> None:
        """Wait until no fit is running."""
        if self._thread is not None:
            self._thread.join()


class ModelUpdater:
    """Fits or loads newer models in the background.

    ``reservoir``: completions to fit to; None if another process fits. ``may_fit``: no fit is started while false.
    """

    def __init__(
        self,
        settings: LengthSettings,
        limit: int,
        clock: Callable[[], float] = time.monotonic,
        rules: FitRules = FIT_RULES,
    ) -> None:
        self._settings = settings
        self._rules = rules
        self._limit = limit
        self._clock = clock
        self._fitting = BackgroundFit()
        # The thread appends and the caller pops. Both are atomic, so no lock is needed; only the newest model counts.
        self._newer: deque[Loaded] = deque(maxlen=1)
        self._version = 0
        self._since_fit = 0
        self._inherited = 0
        self._checked_at = -math.inf
        self._folder_changed_at: float = -math.inf
        self.reservoir = Reservoir(rules.reservoir_size, ROW_WIDTH) if settings.fits_in_thread else None
        self.may_fit = True
        # Wait for the first model, so that a run that has one starts with it.
        if settings.model_dir is not None:
            self._fitting.start(self._load)
            self._fitting.wait()

    @property
    def failures(self) -> int:
        """Fits and loads that raised."""
        return self._fitting.failures

    def wait(self) -> None:
        """Wait until no fit or load is running."""
        self._fitting.wait()

    def take_newer(self) -> Loaded | None:
        """The newest model since the last call; None if there is none."""
        if not self._newer:
            return None
        newer = self._newer.pop()
        self._version = max(self._version, newer[0].version)
        return newer

    def check_folder(self) -> None:
        """Load the newest model in the background if the folder has changed; it is checked every few seconds.

        Does nothing if models are fitted here.
        """
        folder, now = self._settings.model_dir, self._clock()
        if folder is None or self._settings.fits_in_thread or now - self._checked_at < CHECK_INTERVAL_S:
            return
        self._checked_at = now
        # Renaming a version into the folder changes the folder's time stamp. Otherwise no file is opened.
        if not self._fitting.is_busy and folder.exists() and folder.stat().st_mtime_ns != self._folder_changed_at:
            self._fitting.start(self._load)

    def observed(self, count: int, levels: DatasetLevels, newest: int) -> None:
        """Count completions that were added to the reservoir, and start a fit when one is due.

        ``newest``: the newest policy version seen.
        """
        self._since_fit += count
        if self.may_fit and self._since_fit >= self._fit_interval() and not self._fitting.is_busy:
            self._since_fit = 0
            # The thread gets copies, so that completions can be learned in the meantime.
            snapshot = self._snapshot(levels)
            self._fitting.start(lambda: self._fit(*snapshot, newest))

    def fit_now(self, levels: DatasetLevels, newest: int) -> None:
        """Fit to the observed completions now, and save the model; only while no fit is running.

        Raises:
            Exception: the fit or the save failed.
        """
        self._fit(*self._snapshot(levels), newest)

    def _fit_interval(self) -> float:
        """Completions from one fit to the next.

        There is no fit while a model loaded at the start was fitted to twice as many as the reservoir holds.
        """
        if self.reservoir is None or 2 * len(self.reservoir) < min(self._inherited, self._rules.reservoir_size):
            return math.inf
        return self._rules.interval(len(self.reservoir))

    def _snapshot(self, levels: DatasetLevels) -> tuple[Observations, dict[str, tuple[float, int]]]:
        assert self.reservoir is not None, "expected a reservoir, since models are fitted here"
        return self.reservoir.snapshot(levels), levels.dump()

    def _fit(self, observed: Observations, levels: dict[str, tuple[float, int]], newest: int) -> None:
        forest = fit(observed, (0.5, self._rules.upper), self._limit)
        # Invalid trees would fail at every prediction.
        forest.check(ROW_WIDTH, quantiles=2)
        folder = self._settings.model_dir
        next_saved = 1 if folder is None else ModelStore(folder, KIND).next_version()
        # Above the version in use and above all in the folder, so that no two models share a name.
        model = LengthModel(forest, max(self._version + 1, next_saved), newest, len(observed))
        # Use it from now on, with the present levels. It is saved afterwards, because that may fail.
        self._newer.append((model, {}))
        log.info("length model fitted", model=model.name, observations=len(observed), policy_version=newest)
        if folder is not None:
            save(model, levels, folder)

    def _load(self) -> None:
        folder = self._settings.model_dir
        if folder is None or not folder.exists():
            return
        # Read the time stamp before the models, so that the next check notices versions added in the meantime.
        changed_at = folder.stat().st_mtime_ns
        if self._settings.predictor == "language_model":
            from streamrl.producers.lengths.learned.language_model import (
                load_newest as load_language_model,  # needs torch
            )

            loaded: Loaded | None = load_language_model(folder, newer_than=self._version)
        else:
            loaded = load_newest(folder, newer_than=self._version)
        # Set only now: after a load that raised, the next check sees a changed folder and tries again.
        self._folder_changed_at = changed_at
        if loaded is not None:
            self._newer.append(loaded)
            self._inherited = loaded[0].observations
            log.info("length model loaded", model=loaded[0].name)
