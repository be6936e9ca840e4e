"""Where the model of a predictor comes from: fitted here in a thread, or taken from a folder that others write to.

It knows no prompts and predicts nothing. Nothing here waits: a fit and the reading of a model run in a thread, and what
comes of them is taken by whoever asks next.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Protocol

import structlog

from streamrl.producers.lengths.learned.features import ROW_WIDTH
from streamrl.producers.lengths.learned.history import DatasetLevels, Observations, Reservoir
from streamrl.producers.lengths.learned.model import KIND, LengthModel, fit, load_newest, save
from streamrl.producers.lengths.learned.model_store import ModelStore
from streamrl.producers.lengths.settings import LengthSettings
from streamrl.schemas.trajectories import Prompt

log = structlog.get_logger()

CHECK_INTERVAL_S = 2.0
"""Between two checks of the folder for a newer model of another process: a fit takes seconds to minutes."""


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


class BackgroundFit:
    """A thread of its own for one fit at a time: the caller goes on, and takes the result when it is there.

    It does not know what is fitted. A fit that raises leaves what was there; it is counted in ``failures``.
    """

    def __init__(self) -> None:
        self.failures = 0
        self._thread: threading.Thread | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a fit is under way."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, fit: Callable[[], None]) -> None:
        """Begin a fit; only while none is under way. The thread ends by itself, within seconds."""
        assert not self.is_busy, "one fit at a time"
        self._thread = threading.Thread(target=self._run, args=(fit,), name="length-refit")
        self._thread.start()

    def _run(self, fit: Callable[[], None]) -> None:
        try:
            fit()
        except Exception as error:
            self.failures += 1
            log.warning("length model not fitted", error=repr(error), failures=self.failures)

    def wait(self) -> None:
        """Until no fit is under way."""
        if self._thread is not None:
            self._thread.join()


class ModelUpdater:
    """Fits or loads newer models in the background. ``reservoir`` is there if fits are made here.

    ``may_fit`` holds fits back while it is false.
    """

    def __init__(self, settings: LengthSettings, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._limit = limit
        self._clock = clock
        self._fitting = BackgroundFit()
        # The thread appends and the caller pops, both atomic, so that no lock is needed; only the newest counts.
        self._newer: deque[Loaded] = deque(maxlen=1)
        self._version = 0
        self._since_fit = 0
        self._inherited = 0
        self._checked_at = -math.inf
        self._folder_changed_at: float = -math.inf
        self.reservoir = Reservoir(settings.reservoir_size, ROW_WIDTH) if settings.fits_in_thread else None
        self.may_fit = True
        # The first model is waited for: a run that has one begins with it.
        if settings.model_dir is not None:
            self._fitting.start(self._load)
            self._fitting.wait()

    @property
    def failures(self) -> int:
        """Fits, and readings of models, that raised."""
        return self._fitting.failures

    def wait(self) -> None:
        """Until nothing is under way."""
        self._fitting.wait()

    def take_newer(self) -> Loaded | None:
        """The model that has come since the last call; none if there is none."""
        if not self._newer:
            return None
        newer = self._newer.pop()
        self._version = max(self._version, newer[0].version)
        return newer

    def check_folder(self) -> None:
        """Every few seconds, see whether the folder has changed. Whoever fits here has the newest model already."""
        folder, now = self._settings.model_dir, self._clock()
        if folder is None or self._settings.fits_in_thread or now - self._checked_at < CHECK_INTERVAL_S:
            return
        self._checked_at = now
        # A version that is renamed into the folder changes its time stamp; without that, nothing is opened.
        if not self._fitting.is_busy and folder.exists() and folder.stat().st_mtime_ns != self._folder_changed_at:
            self._fitting.start(self._load)

    def observed(self, count: int, levels: DatasetLevels, newest: int) -> None:
        """Completions were added to the reservoir; every so often a fit begins. ``newest``: the newest policy seen."""
        self._since_fit += count
        if self.may_fit and self._since_fit >= self._fit_interval() and not self._fitting.is_busy:
            self._since_fit = 0
            # The thread gets copies, so that completions can be learned meanwhile.
            snapshot = self._snapshot(levels)
            self._fitting.start(lambda: self._fit(*snapshot, newest))

    def fit_now(self, levels: DatasetLevels, newest: int) -> None:
        """Fit to what was observed, and keep the model; only while nothing is under way.

        Raises:
            Exception: whatever stood in the way.
        """
        self._fit(*self._snapshot(levels), newest)

    def _fit_interval(self) -> float:
        """Completions from one fit to the next, n of them in the reservoir: min(refit_every, max(min_samples, n / 2)).

        Few at first, since each then says much. There is no fit while a model that was found at the start knew twice
        as many completions as the reservoir holds.
        """
        if self.reservoir is None or 2 * len(self.reservoir) < min(self._inherited, self._settings.reservoir_size):
            return math.inf
        return min(self._settings.refit_every, max(self._settings.min_samples, len(self.reservoir) // 2))

    def _snapshot(self, levels: DatasetLevels) -> tuple[Observations, dict[str, tuple[float, int]]]:
        assert self.reservoir is not None, "only who fits has a reservoir"
        return self.reservoir.snapshot(levels), levels.dump()

    def _fit(self, observed: Observations, levels: dict[str, tuple[float, int]], newest: int) -> None:
        forest = fit(observed, (0.5, self._settings.quantile), self._limit)
        # Trees that cannot be walked would fail at every prediction.
        forest.check(ROW_WIDTH, quantiles=2)
        folder = self._settings.model_dir
        kept = 1 if folder is None else ModelStore(folder, KIND).next_version()
        # Above the version in use and above all in the folder, so that no two models ever share a name.
        model = LengthModel(forest, max(self._version + 1, kept), newest, len(observed))
        # In use from now on, with the levels of now; that it is kept comes second, and may fail.
        self._newer.append((model, {}))
        log.info("length model fitted", model=model.name, observations=len(observed), policy_version=newest)
        if folder is not None:
            save(model, levels, folder)

    def _load(self) -> None:
        folder = self._settings.model_dir
        if folder is None or not folder.exists():
            return
        # Before the models are read: what is added meanwhile is seen at the next check.
        changed_at = folder.stat().st_mtime_ns
        if self._settings.predictor == "language_model":
            from streamrl.producers.lengths.learned.language_model import (
                load_newest as load_language_model,  # needs torch
            )

            loaded: Loaded | None = load_language_model(folder, newer_than=self._version)
        else:
            loaded = load_newest(folder, newer_than=self._version)
        # Only now: after a load that raised, the next check still finds the folder changed, and tries again.
        self._folder_changed_at = changed_at
        if loaded is not None:
            self._newer.append(loaded)
            self._inherited = loaded[0].observations
            log.info("length model loaded", model=loaded[0].name)
