"""Writes step reports to experiment trackers, in order and each step once, also over restarts.

A tracker's library is imported when its writer is opened. All of them write only files.

Invariants:
- a_step_is_written_once: a file holds the last step written, and steps up to it are not written again. So steps that
  a trainer repeats after a crash keep their first values in the trackers;
- a_named_tracker_opens_or_the_run_ends: a tracker that was never open in this run and cannot be opened is an error;
- tracking_never_ends_a_run: a writer that fails later, or that a restarted process cannot open again, is logged and
  dropped; the run goes on.
"""

import asyncio
import contextlib
import importlib
import importlib.util
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import structlog

from streamrl.bus.port import Bus, Record
from streamrl.bus.waiting import in_thread
from streamrl.observability.metrics.settings import TrackingSettings
from streamrl.schemas.errors import BusError, SettingsError, WireError
from streamrl.schemas.evaluation import EvaluationReport
from streamrl.schemas.import_path import retry_import
from streamrl.schemas.reports import StepReport
from streamrl.schemas.topics import EVALUATIONS, STEPS

log = structlog.get_logger()

POLL_S = 0.5
"""Seconds after which a stop is noticed at the latest, while no step comes."""
RETRY_S = 5.0
"""Seconds between two attempts while the broker is down; tracking is not urgent."""
EVALUATED_FILE = "last_evaluated_step"
_EVALUATED = "evaluated in "
_MODULES = {"tensorboard": "tensorboard.summary"}
"""The module to import for a tracker; by default its package."""
_WANDB_MODE = "offline"
"""The mode if WANDB_MODE is not set."""
_WANDB_ALONE = ("offline", "dryrun", "disabled")
"""The modes in which wandb needs no account."""
_LOG_IN = "log in with `wandb login`, set WANDB_API_KEY, or set WANDB_MODE=offline for files only"
WANDB_FINISH_S = 5.0
"""Seconds that wandb may take to send the rest at the end, unless WANDB_FINISH_TIMEOUT is set. By default it would wait
for its server without limit. It takes two seconds more, which is still within a background task's time to end."""
STEP = "progress/step"
"""Metric with the step's number, which is right after restarts too: wandb's own counter counts calls."""


class TrackerWriter(Protocol):
    """Writes one tracker's files, step by step; steps ascend, also over restarts."""

    def write(self, step: int, at: float, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a step. ``at``: when it was reported, in seconds since the epoch."""
        ...

    def close(self) -> None:
        """Write all that is buffered to the disk, and close the files."""
        ...


@dataclass
class Tracker:
    """Writes a run's step reports to the trackers of the settings.

    ``folder`` gets a sub-folder per tracker, with a file ``last_step``. ``config``: the run's settings, which trackers
    show. ``evaluated``: the run has evaluations during training, whose metrics are written under the step of their
    weights.
    """

    bus: Bus
    run_name: str
    settings: TrackingSettings
    folder: Path
    config: Mapping[str, Any]
    evaluated: bool = False
    _writers: dict[str, TrackerWriter] = field(default_factory=dict)
    _last: dict[str, int] = field(default_factory=dict)

    async def run(self, stop: asyncio.Event) -> None:
        """Track until stopped, with the writers that ``open`` opened.

        Consumes: steps, from the beginning. Produces: the trackers' files. Waits for: the trainer.
        On failure: drops a tracker that cannot write; tries again while the broker is down.
        On stop: writes the rest of the topic, closes the files, returns.
        """
        try:
            while self._writers:
                try:
                    await self._follow(stop)
                    return
                except BusError as error:
                    log.warning("tracking waits for the broker", error=str(error))
                    await asyncio.sleep(RETRY_S)
        finally:
            await in_thread(self.close)

    async def _follow(self, stop: asyncio.Event) -> None:
        # from the first record each time: a file, not an offset, tells which steps are written already
        subscription = await self.bus.subscribe(self._topics(), client_id="tracking")
        try:
            while self._writers:
                ending = stop.is_set()  # read before the poll, so that one more poll follows the stop
                records = await subscription.poll(timeout_s=POLL_S)
                # in a thread: a tracker's library may wait for its disk while the role goes on
                await in_thread(self.write, records)
                if ending and not records:
                    return
        finally:
            await subscription.close()

    def _topics(self) -> list[str]:
        topics = (STEPS, EVALUATIONS) if self.evaluated else (STEPS,)
        return [topic.full_name(self.run_name) for topic in topics]

    def open(self) -> None:
        """Open the writers. Call it before the event loop runs, while no other thread can import anything.

        Raises:
            SettingsError: a writer cannot be opened, and never was in this run. The others are closed again.
        """
        for name in self.settings.to:
            last_step = self._last_step_file(name)
            try:
                self._writers[name] = open_writer(
                    name, self.settings.project, self.run_name, self.folder / name, self.config
                )
                self._last[name] = _read_last_step(last_step)
                self._last[_EVALUATED + name] = _read_last_step(self._last_step_file(name, EVALUATED_FILE))
                if not self._was_open(name):
                    # The file shows a later process that this tracker was open.
                    last_step.write_text(f"{self._last[name]}\n")
            except (SettingsError, OSError) as error:
                if not self._was_open(name):
                    self.close()
                    if isinstance(error, SettingsError):
                        raise
                    raise _cannot_open(name, self.folder / name, error) from error
                log.error("a tracker cannot be opened again and is dropped", tracker=name, error=str(error))
                self._writers.pop(name, None)

    def write(self, records: Sequence[Record]) -> None:
        """Write the steps among the records that were not written before."""
        for record in records:
            try:
                report = record.message()
            except WireError:
                continue
            if isinstance(report, EvaluationReport) or (isinstance(report, StepReport) and report.micro_batches):
                for name in tuple(self._writers):  # a copy, since a failed writer is removed
                    self._write(name, report)

    def _write(self, name: str, report: StepReport | EvaluationReport) -> None:
        evaluated = isinstance(report, EvaluationReport)
        last = _EVALUATED + name if evaluated else name
        if report.step <= self._last[last]:
            return  # written by an earlier process, or repeated by a resumed trainer
        try:
            # after a crash between these two the step is written twice; in the other order it would be missing
            self._writers[name].write(report.step, report.sent_at, report.metrics)
            file = self._last_step_file(name, EVALUATED_FILE) if evaluated else self._last_step_file(name)
            file.write_text(f"{report.step}\n")
        except Exception as error:
            log.error("a tracker failed and is dropped", tracker=name, error=str(error))
            del self._writers[name]
        else:
            self._last[last] = report.step

    def close(self) -> None:
        """Close the writers; further calls do nothing."""
        while self._writers:
            name, writer = self._writers.popitem()
            try:
                writer.close()
            except Exception as error:
                log.error("a tracker was not closed", tracker=name, error=str(error))

    def _was_open(self, name: str) -> bool:
        try:
            return self._last_step_file(name).exists()
        except OSError:
            return False  # the folder cannot be read

    def _last_step_file(self, name: str, file: str = "last_step") -> Path:
        return self.folder / name / file


def _read_last_step(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return -1  # below step 0: there is no file yet, or a crash left it empty


def open_writer(name: str, project: str, run: str, folder: Path, config: Mapping[str, Any]) -> TrackerWriter:
    """A writer into the folder. ``config``: the run's settings, for trackers that show them.

    Raises:
        SettingsError: there is no such writer, its package is not installed, or it cannot be opened.
    """
    match name:
        case "tensorboard":
            make: Callable[[], TrackerWriter] = partial(TensorBoardWriter, folder)
        case "wandb":
            make = partial(WandbWriter, project, run, folder, config)
        case "trackio":
            make = partial(TrackioWriter, project, run, folder, config)
        case _:
            raise SettingsError(f"expected tensorboard, wandb or trackio in tracking.to, got {name!r}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # A test write: some libraries do not report that they cannot write, and keep everything in memory.
        with tempfile.TemporaryFile(dir=folder):
            pass
        return retry_import(make, name)
    except SettingsError:
        raise
    except Exception as error:
        raise _cannot_open(name, folder, error) from error


def _cannot_open(name: str, folder: Path, error: Exception) -> SettingsError:
    if isinstance(error, ConnectionError):
        what = "try again"
    elif isinstance(error, OSError):
        what = f"make {folder} writable"
    elif name == "wandb":
        what = _LOG_IN
    else:
        what = f"try {name} by itself"
    got = " ".join(f"{type(error).__name__}: {error}".split())
    return SettingsError(
        f"expected to open {name} of tracking.to in {folder}, got {got}; {what}, or remove it from tracking.to"
    )


def check_installed(settings: TrackingSettings) -> None:
    """Check that the trackers' packages are installed, before any process starts.

    Raises:
        SettingsError: a package is not installed.
    """
    for name in settings.to:
        if importlib.util.find_spec(name) is None:
            raise _not_installed(name, f"no module named {name!r}")


def try_trackers(settings: TrackingSettings) -> None:
    """Import the trackers, and check the login if one is needed; opens none. Takes seconds.

    Raises:
        SettingsError: a package is not installed or cannot be imported, or the user is not logged in.
    """
    check_installed(settings)
    for name in settings.to:
        library = _library(_MODULES.get(name, name), name)
        mode = os.environ.get("WANDB_MODE", _WANDB_MODE)
        if name == "wandb" and mode not in _WANDB_ALONE and not _is_logged_in(library):
            raise SettingsError(
                f"expected a valid W&B login for tracking.to with WANDB_MODE={mode}, got none; {_LOG_IN}, "
                "or remove it from tracking.to"
            )


def _is_logged_in(wandb: Any) -> bool:
    try:
        return bool(wandb.login(prompt=False))
    except TypeError:
        return True  # an older wandb, which can check the login only at a terminal
    except Exception as error:
        log.warning("W&B refuses its login", error=" ".join(str(error).split()))
        return False


def _not_installed(package: str, got: str) -> SettingsError:
    return SettingsError(
        f'expected the package {package} for tracking.to = ["{package}"], got {got}; '
        f"install it with `pip install {package}`, or remove it from tracking.to"
    )


def _library(module: str, package: str) -> Any:
    try:
        return retry_import(partial(importlib.import_module, module), package)
    except ImportError as error:
        raise _not_installed(package, str(error)) from error


class TensorBoardWriter:
    """Writes scalars to an event file; show it with ``tensorboard --logdir`` and the folder."""

    def __init__(self, folder: Path) -> None:
        summary = _library(_MODULES["tensorboard"], "tensorboard")
        self._writer = summary.Writer(str(folder))

    def write(self, step: int, at: float, metrics: Mapping[str, float]) -> None:
        """See ``TrackerWriter``."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step, wall_time=at)

    def close(self) -> None:
        """See ``TrackerWriter``."""
        self._writer.close()


class WandbWriter:
    """Writes an offline run, which ``wandb sync`` can send later."""

    def __init__(self, project: str, run: str, folder: Path, config: Mapping[str, Any]) -> None:
        self._library = wandb = _library("wandb", "wandb")
        mode = os.environ.get("WANDB_MODE", _WANDB_MODE)
        settings = wandb.Settings(console="off", silent=True, x_disable_stats=True, x_disable_meta=True)
        if hasattr(settings, "finish_timeout"):  # an older wandb has no time limit
            settings.finish_timeout_raises = True
            if "WANDB_FINISH_TIMEOUT" not in os.environ:
                settings.finish_timeout = WANDB_FINISH_S

        def start() -> Any:
            started = wandb.init(
                project=project, name=run, id=run, dir=str(folder), config=dict(config), mode=mode, settings=settings
            )
            started.define_metric("*", step_metric=STEP)  # the horizontal axis of every metric
            return started

        try:
            self._run = start()
        except ConnectionError as error:
            # The connection to wandb's service, a local process that has died. Errors of its server have other classes.
            log.warning("W&B's service died, starting it again", error=str(error))
            with contextlib.suppress(Exception):
                wandb.teardown()
            self._run = start()

    def write(self, step: int, at: float, metrics: Mapping[str, float]) -> None:
        """See ``TrackerWriter``."""
        self._run.log({**metrics, STEP: step, "_timestamp": at})

    def close(self) -> None:
        """See ``TrackerWriter``."""
        folder = Path(self._run.dir).parent  # the folder that `wandb sync` takes
        try:
            self._run.finish()
        except TimeoutError:
            log.warning(f"not everything was sent to W&B in time; all is kept, send it with `wandb sync {folder}`")
        finally:
            # wandb's service writes the rest and ends now, instead of running as long as this process.
            self._library.teardown()


class TrackioWriter:
    """Writes a local trackio project; show it with ``trackio show`` and ``TRACKIO_DIR`` set to the folder."""

    def __init__(self, project: str, run: str, folder: Path, config: Mapping[str, Any]) -> None:
        os.environ.setdefault("TRACKIO_DIR", str(folder))  # before the import, since the library may read it then
        self._trackio = _library("trackio", "trackio")
        self._trackio.init(project=project, name=run, config=dict(config), resume="allow", embed=False)

    def write(self, step: int, _at: float, metrics: Mapping[str, float]) -> None:
        """See ``TrackerWriter``."""
        self._trackio.log(dict(metrics), step=step)

    def close(self) -> None:
        """See ``TrackerWriter``."""
        self._trackio.finish()
