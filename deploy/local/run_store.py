"""`streamrl runs`: lists the runs on this disk with their sizes, and removes them.

Invariants, each with a test of its name:
- a_living_run_is_never_removed: a run is kept while its broker is running or one of its processes sends heartbeats;
- only_runs_are_removed: a directory without a run's resolved configuration is not touched.
"""

import json
import math
import os
import shutil
import sys
import time
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from rich.console import Console
from rich.table import Table

from streamrl.bus.kafka.settings import KafkaSettings
from streamrl.deploy.local.savepoints import WIDTH, refuse_if_alive
from streamrl.inspection.source import is_over, nodes_of, open_run, own_broker
from streamrl.observability.run_state.evaluations import OVERALL
from streamrl.schemas.errors import SettingsError, UserError
from streamrl.schemas.evaluation import EVALUATED
from streamrl.schemas.plain_text import plain_text
from streamrl.schemas.starts import read_starts
from streamrl.settings.run_directory import RunDirectory, bytes_on_disk

LARGE_FILES = ("kafka", "weights", "cache", "traces", "logs")
"""Large files that a finished run no longer needs; checkpoints, figures and the report do not depend on them."""
LAST_BYTES = 1 << 16
"""Bytes at the end of metrics.jsonl that contain its last complete lines, of a step and usually of an evaluation."""


@dataclass(frozen=True)
class StoredRun:
    """A run on this disk. ``state``: running, finished, stopped, or empty before its first step.

    ``reward``: the mean of step ``step``; ``at``: Unix time of the last step, or of the start without one; ``started``:
    of the first start; None: not known. ``held_out``: pass@1 of the newest evaluated weights; None without an
    evaluation.
    """

    name: str
    directory: RunDirectory
    state: str
    step: int
    reward: float | None
    at: float
    started: float | None = None
    held_out: float | None = None

    @cached_property
    def size(self) -> int:
        """Bytes on disk. All files of the run are looked at."""
        return bytes_on_disk(self.directory.path)

    def facts(self) -> dict[str, Any]:
        """A JSON-safe form, without the size."""
        start = {"name": self.name, "path": str(self.directory.path), "state": self.state, "step": self.step}
        end = {"at": round(self.at, 1), "started": self.started, "held_out": self.held_out}
        return start | {"reward": self.reward} | end

    def to_json(self) -> dict[str, Any]:
        """A JSON-safe form."""
        return self.facts() | {"bytes": self.size}


def stored_runs(root: Path) -> list[StoredRun]:
    """The runs in a directory, the newest last."""
    found = [RunDirectory(path) for path in root.glob("*") if RunDirectory(path).config.is_file()]
    return sorted((_stored_run(each) for each in found), key=lambda run: run.at)


def run_facts(root: Path) -> list[dict[str, Any]]:
    """The runs in a directory for a page, the newest last, without their sizes, which take long."""
    return [run.facts() for run in stored_runs(root)]


def list_runs(root: Path, *, as_json: bool) -> int:
    """Print the runs in a directory; returns the exit code."""
    runs = stored_runs(root)
    if as_json:
        for run in runs:
            print(json.dumps(run.to_json()))
        return 0
    if not runs:
        print(f"no runs in {root}/")
        return 0
    table = Table(box=None, pad_edge=False)
    for name in ("run", "state", "step", "its reward", "size", "last step"):
        table.add_column(name, justify="right" if name in ("step", "its reward", "size") else "left", overflow="fold")
    for run in runs:
        reward = "-" if run.reward is None else f"{run.reward:.3f}"
        at = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.at))
        table.add_row(plain_text(run.name), run.state, str(run.step), reward, _size(run.size), at)
    Console(width=None if sys.stdout.isatty() else WIDTH).print(table)
    print(f"{len(runs)} runs, {_size(sum(run.size for run in runs))}; `streamrl runs rm NAME` removes one")
    return 0


def remove_runs(root: Path, names: Sequence[str], *, keep_results: bool, ask: bool) -> int:
    """Remove runs, or with ``keep_results`` only their large files; the exit code is 1 if the user answers no.

    Raises:
        UserError: a run does not exist or is alive, or there is no terminal to ask on.
    """
    chosen = [_chosen(root, name) for name in names]
    for run in chosen:
        _refuse_living(run)
    sizes = {run.name: sum(bytes_on_disk(path) for path in _parts(run, keep_results=keep_results)) for run in chosen}
    listed = ", ".join(f"{name} ({_size(size)})" for name, size in sizes.items())
    what = f"logs, broker data and weights of {listed}" if keep_results else listed
    if ask and not sys.stdin.isatty():
        raise UserError(f"expected a confirmation to remove {what}, got no terminal to ask on; give --yes")
    if ask and input(f"remove {what} for good? [y/N] ").strip().lower() not in ("y", "yes"):
        print("nothing was removed")
        return 1
    for run in chosen:
        for path in _parts(run, keep_results=keep_results):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        print(f"removed: {_size(sizes[run.name])} of {run.name}")
        if not keep_results and not run.owns_broker:
            print(f"its topics are still on their broker; `streamrl topics rm --run {run.name}` deletes them")
    return 0


@dataclass(frozen=True)
class _Chosen:
    name: str
    directory: RunDirectory
    owns_broker: bool


def _chosen(root: Path, name: str) -> _Chosen:
    directory = RunDirectory(root / name)
    if Path(name).name != name or not directory.config.is_file():
        existing = ", ".join(run.name for run in stored_runs(root)) or "none"
        raise UserError(f"expected the name of a run in {root}/, got {name!r}; existing runs: {existing}")
    return _Chosen(name, directory, bool(nodes_of(directory)))


def _refuse_living(run: _Chosen) -> None:
    if (address := own_broker(run.directory)) is not None:
        raise UserError(f"expected run {run.name} to be stopped, got its broker running at {address}; stop it first")
    if run.owns_broker:
        return
    try:
        past = open_run(run.directory.path)
        name, kafka = past.name, past.settings.kafka
    except SettingsError as error:
        # Another release may have written these settings, with keys that are unknown here. The run may still be alive.
        configured = _kafka_section(run.directory.config)
        if configured is None:
            print(f"could not check whether run {run.name} is alive ({error}); continuing", file=sys.stderr)
            return
        name, kafka = run.name, configured
    refuse_if_alive(name, run.directory, kafka)


def _kafka_section(config: Path) -> KafkaSettings | None:
    from streamrl.settings.layers import from_toml

    try:
        found = KafkaSettings.model_validate(from_toml(config).get("kafka", {}))
    except (SettingsError, ValidationError):
        return None
    return found if found.bootstrap_servers else None


def _parts(run: _Chosen, *, keep_results: bool) -> list[Path]:
    root = run.directory.path
    return [path for name in LARGE_FILES if (path := root / name).exists()] if keep_results else [root]


def _stored_run(directory: RunDirectory) -> StoredRun:
    summary, rows = _object(directory.summary), _newest_rows(directory.metrics)
    newest = next((row for row in rows if EVALUATED not in row), {})
    step, wanted = int(newest.get("step", 0)), _planned_steps(directory, newest)
    # The summary of an earlier start does not cover the steps since, and a start with more steps has other settings.
    if is_over(summary, step, wanted):
        state = "finished"  # also if a broker was started again, to look at the topics
    elif own_broker(directory) is not None:
        state = "running"
    else:
        state = "stopped" if newest else "empty"
    with suppress(OSError):
        # The time in the file: a copied or restored file has another time than its last step.
        written_at = directory.metrics.stat().st_mtime if newest else directory.config.stat().st_mtime
        at = _number(newest.get("time")) or written_at
        reward = _number(newest.get("reward"))
        # An evaluation of a later step is of weights that a resumed trainer has undone.
        evaluated = next((row for row in rows if EVALUATED in row and row["step"] <= step), {})
        starts = read_starts(directory.starts)
        started, held_out = starts[0].at if starts else None, _number(evaluated.get(OVERALL))
        return StoredRun(directory.path.name, directory, state, step, reward, at, started, held_out)
    return StoredRun(directory.path.name, directory, state, step, None, 0.0)


def _planned_steps(directory: RunDirectory, newest: Mapping[str, Any]) -> float | None:
    """The steps that the last start wanted to reach; without its settings, those that the last step names."""
    try:
        wanted = _number(tomllib.loads(directory.config.read_text())["training"]["max_steps"])
    except (OSError, ValueError, LookupError, TypeError):
        wanted = None
    return _number(newest.get("progress/max_steps")) if wanted is None else wanted


def _object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _newest_rows(path: Path) -> list[dict[str, Any]]:
    """The last complete lines, the newest first; a killed trainer may have left an incomplete one after them."""
    found: list[dict[str, Any]] = []
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LAST_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return found
    for line in reversed(lines):
        with suppress(ValueError):
            row = json.loads(line)
            if isinstance(row, dict) and _number(row.get("step")) is not None:
                found.append(row)
    return found


def _number(value: object) -> float | None:
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def _size(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
