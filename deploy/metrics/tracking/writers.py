"""One writer for each tracker, with its library imported when it is made. Writes files only; reads no topic."""

import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from schemas.errors import SettingsError

STEP = "progress/step"


class Writer(Protocol):
    """Takes the metrics of one step after another; steps ascend, also over restarts."""

    def write(self, step: int, at: float, metrics: Mapping[str, float]) -> None:
        """The metrics of a step that was reported at a time (seconds since the epoch)."""
        ...

    def close(self) -> None:
        """Bring everything onto the disk."""
        ...


def open_writer(name: str, project: str, run: str, folder: Path, config: Mapping[str, Any]) -> Writer:
    """A writer into the folder; ``config``: the run's settings, for trackers that show them.

    Raises:
        SettingsError: there is no such writer, or its package is not installed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    match name:
        case "tensorboard":
            return TensorBoardWriter(folder)
        case "wandb":
            return WandbWriter(project, run, folder, config)
        case "trackio":
            return TrackioWriter(project, run, folder, config)
        case _:
            raise SettingsError(f"expected tensorboard, wandb or trackio in tracking.to, got {name!r}")


def _library(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise SettingsError(
            f'expected the package {package} for tracking.to = ["{package}"], got {error}; '
            f"install it with `pip install {package}`, or leave it out"
        ) from error


class TensorBoardWriter:
    """Scalars in an event file; ``tensorboard --logdir`` the folder."""

    def __init__(self, folder: Path) -> None:
        summary = _library("tensorboard.summary", "tensorboard")
        self._writer = summary.Writer(str(folder))

    def write(self, step: int, at: float, metrics: Mapping[str, float]) -> None:
        """See ``Writer``."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step, wall_time=at)

    def close(self) -> None:
        """See ``Writer``."""
        self._writer.close()


class WandbWriter:
    """An offline run; ``wandb sync`` sends it later."""

    def __init__(self, project: str, run: str, folder: Path, config: Mapping[str, Any]) -> None:
        self._library = wandb = _library("wandb", "wandb")
        mode = os.environ.get("WANDB_MODE", "offline")
        settings = wandb.Settings(console="off", silent=True, x_disable_stats=True, x_disable_meta=True)
        self._run = wandb.init(
            project=project, name=run, id=run, dir=str(folder), config=dict(config), mode=mode, settings=settings
        )
        self._run.define_metric("*", step_metric=STEP)

    def write(self, step: int, at: float, metrics: Mapping[str, float]) -> None:
        """See ``Writer``."""
        self._run.log({**metrics, STEP: step, "_timestamp": at})

    def close(self) -> None:
        """See ``Writer``."""
        self._run.finish()
        self._library.teardown()  # its service writes what is left and ends, instead of staying as long as we do


class TrackioWriter:
    """A local trackio project; ``trackio show`` with ``TRACKIO_DIR`` set to the folder."""

    def __init__(self, project: str, run: str, folder: Path, config: Mapping[str, Any]) -> None:
        os.environ.setdefault("TRACKIO_DIR", str(folder))
        self._trackio = _library("trackio", "trackio")
        self._trackio.init(project=project, name=run, config=dict(config), resume="allow", embed=False)

    def write(self, step: int, _at: float, metrics: Mapping[str, float]) -> None:
        """See ``Writer``."""
        self._trackio.log(dict(metrics), step=step)

    def close(self) -> None:
        """See ``Writer``."""
        self._trackio.finish()
