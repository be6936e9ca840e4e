"""Processes of a run that kill themselves: each life at the next of some points, until all were reached."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tests.chaos.crashing.points import CrashPoint, arm
from tests.chaos.runs.inside import is_role, with_code

if TYPE_CHECKING:  # what a process imports before all else is to be little
    from streamrl.deploy.local.supervisor import ChildSpec

VARIABLE = "TESTED_POINTS"
NAMES = "points.json"


def with_points(spec: "ChildSpec", folder: Path, points: Sequence[CrashPoint]) -> "ChildSpec":
    """The process, which dies at these points one after the other; those that share a ``folder`` share them."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / NAMES).write_text(json.dumps([asdict(point) for point in points]))
    return with_code(spec, folder, __name__, **{VARIABLE: str(folder)})


def install() -> None:
    """In the process itself: arm them."""
    if is_role():
        folder = Path(os.environ[VARIABLE])
        for number, point in enumerate(_points(folder)):
            arm(point, partial(_claim, folder, number))


def missing(folder: Path) -> list[str]:
    """Names of the points at which no process has died yet."""
    return [point.name for point in _points(folder)[_reached(folder) :]]


def _claim(folder: Path, number: int) -> bool:
    """Whether it is the next one, and nobody else dies at it in this moment."""
    if _reached(folder) != number:
        return False
    try:
        (folder / f"{number}.reached").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _points(folder: Path) -> list[CrashPoint]:
    return [CrashPoint(**each) for each in json.loads((folder / NAMES).read_text())]


def _reached(folder: Path) -> int:
    return len(list(folder.glob("*.reached")))
