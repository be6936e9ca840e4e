"""Runs from Python: start one, and inspect one that is running or finished."""

import asyncio
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from streamrl.bus.history import History
from streamrl.bus.waiting import in_thread
from streamrl.inspection.source import PastRun, history_of, open_run
from streamrl.schemas.errors import SettingsError, UserError
from streamrl.schemas.evaluation import EVALUATED
from streamrl.schemas.extras import require_extra
from streamrl.schemas.settings import UNSET
from streamrl.settings.features import policy_operators
from streamrl.settings.layers import Tree, merged
from streamrl.settings.loading import load_settings, validated
from streamrl.settings.run_directory import named
from streamrl.settings.tree import Settings

if TYPE_CHECKING:
    import pyarrow as pa

    from streamrl.inspection.audit.report import AuditReport
    from streamrl.inspection.replay.results import StepReplay
    from streamrl.schemas.control import OperatorAction

Source = Settings | Mapping[str, Any] | str | Path | None
T = TypeVar("T")


def run(source: Source = None, /, *, top: bool = False, adopt: bool = False, **overrides: Any) -> "Run":
    """Train on this machine, as `streamrl run` does, and return when the run is finished.

    In a notebook, which already runs an event loop, the call blocks its cell. Ctrl-C (or "interrupt") stops the run
    cleanly, and the same call continues it from its last checkpoint.

    Args:
        source: a TOML file, a nested mapping of settings, or settings; None: environment variables only.
        top: show the live view, on a terminal.
        adopt: take over a run of this name whose topics exist but do not belong to this directory.
        overrides: settings as ``section__key=value``, or a whole section as ``section={"key": value}``.

    Raises:
        SettingsError: the settings are wrong; the text names the key.
        UserError: another error that the user can correct, before or during the run.
        StreamRLError: a process could not be kept alive.
    """
    from streamrl.deploy.local.run import run_locally

    # The run is named here, so that its directory is known afterwards.
    settings = named(settings_of(source, overrides))
    # Signal handlers can be set only in the main thread, and an event loop cannot run within another one. If either is
    # impossible here, the run gets its own thread, and an event that stops it.
    if threading.current_thread() is threading.main_thread() and not _is_in_event_loop():
        return _finished_run(settings, run_locally(settings, top=top, adopt=adopt))
    stop = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run_locally, settings, top=top, stop=stop, adopt=adopt)
        try:
            code = running.result()
        except KeyboardInterrupt:  # raised only here, in the main thread, so the run's thread must be stopped
            stop.set()
            code = running.result()
    return _finished_run(settings, code)


async def run_async(source: Source = None, /, **overrides: Any) -> "Run":
    """``run`` without blocking the event loop; cancelling the task stops the run cleanly.

    Raises:
        StreamRLError: see ``run``.
    """
    from streamrl.deploy.local.run import run_locally

    settings, stop = named(settings_of(source, overrides)), threading.Event()
    code = await in_thread(partial(run_locally, settings, stop=stop), on_cancel=stop.set)
    return _finished_run(settings, code)


def _finished_run(settings: Settings, code: int) -> "Run":
    from streamrl.deploy.local.supervisor import CRASHED_AT_STOP

    # If a process crashed while the run stopped, the last step may have been taken or not.
    return Run(settings.run.path, finished=None if code == CRASHED_AT_STOP else code == 0)


def compare(*runs: "Run | str | Path", level: float | None = None, out: str | Path | None = None) -> dict[str, Any]:
    """Several runs side by side, as `streamrl report --run A --run B --json` prints them.

    ``runs`` lists ``name``, ``path`` and ``figures`` by key (rewards, KL, entropy, lengths, tokens, staleness, shares
    of waiting). ``paired`` has each run's difference to the first one on the prompts that both sampled, with a 95 %
    interval and the p of Wilcoxon's signed-rank test. ``settings`` lists the settings that differ.

    Args:
        runs: two or more, each as directory, name under ``runs/`` or ``Run``.
        level: the reward for which the time until it was first reached is given; None: the highest that all reached.
        out: file for a page with the same content; None: no page.

    Raises:
        UserError: a run does not exist or took no step, or the page cannot be written.
    """
    from streamrl.inspection.report.command import compared

    if len(runs) < 2:
        raise UserError(f"expected two runs or more to compare, got {len(runs)}")
    paths = [one.directory if isinstance(one, Run) else Path(one) for one in runs]
    return compared(paths, level, None if out is None else Path(out))


def settings_of(source: Source, overrides: Mapping[str, Any]) -> Settings:
    """Settings from a file, a mapping or settings, changed by ``section__key`` overrides.

    Raises:
        SettingsError: an unknown key, a wrong value, or sections that contradict each other.
    """
    changes = _importable(_tree_of(overrides))
    if isinstance(source, Settings):
        # These settings are complete, so neither a file nor the environment is read again.
        return validated(merged(source.model_dump(), changes))
    # Passed as on a command line, so that they override files and variables and are parsed by the same code.
    arguments = [f"--{change}" for change in _as_arguments(changes)]
    if isinstance(source, Mapping):
        return load_settings(None, arguments, _importable(source))
    return load_settings(None if source is None else Path(source), arguments)


class Run:
    """A running or finished run, given its directory, its name under ``runs/``, or its configuration file.

    Tables and audits read the run's topics from its broker. If that is not running, they start one on a copy of its
    data, which takes seconds. The run's files are never changed. ``export``: read `streamrl export`'s files instead.

    Raises:
        UserError: there is no such run.
    """

    def __init__(self, path: str | Path, *, export: str | Path | None = None, finished: bool | None = None) -> None:
        self._past: PastRun = open_run(Path(path))
        self._export = None if export is None else Path(export)
        self._finished = finished

    def __repr__(self) -> str:
        return f"Run({str(self.directory)!r})"

    @property
    def name(self) -> str:
        """The run's name, which is the prefix of its topics."""
        return self._past.name

    @property
    def directory(self) -> Path:
        """The run's directory."""
        return self._past.directory.path

    @property
    def settings(self) -> Settings:
        """The settings with which the run was last started."""
        return self._past.settings

    @property
    def finished(self) -> bool:
        """Whether the run took its last step."""
        if self._finished is None:
            return self._past.is_finished
        return self._finished

    @property
    def summary(self) -> dict[str, Any]:
        """``summary.json``: the run in a few figures.

        Raises:
            UserError: there is none, because the run never ended cleanly.
        """
        try:
            found: dict[str, Any] = json.loads(self._past.directory.summary.read_text())
        except FileNotFoundError as error:
            raise UserError(
                f"expected a summary in {self.directory}, got none: the run has not ended, or did not end cleanly"
            ) from error
        return found

    @property
    def metrics(self) -> "pa.Table":
        """``metrics.jsonl``: one row per optimizer step, one column per metric.

        If a crash undid a step, the step appears once for each time it was taken. ``steps()`` has only the valid ones.
        """
        return self._table_of_lines(evaluated=False)

    @property
    def evaluations(self) -> "pa.Table":
        """``metrics.jsonl``: one row per evaluated weights version, one column per metric."""
        return self._table_of_lines(evaluated=True)

    def _table_of_lines(self, *, evaluated: bool) -> "pa.Table":
        require_extra("inspect", "a run's tables", "pyarrow")
        from streamrl.inspection.tables import table_of

        path = self._past.directory.metrics
        lines = path.read_text().splitlines() if path.exists() else []
        # A line that is being written, or was cut off when the trainer was killed, has no closing brace.
        rows = [json.loads(line) for line in lines if line.endswith("}")]
        return table_of([row for row in rows if (EVALUATED in row) == evaluated])

    @property
    def model(self) -> Path | None:
        """The directory of the newest checkpoint, for ``from_pretrained``; None before the first.

        A checkpoint in an object store is downloaded into the run's directory.

        Raises:
            StreamRLError: the checkpoints cannot be read.
        """
        from streamrl.consumers.training.checkpoints.catalogue import newest_model

        return newest_model(self._past.checkpoints, self._past.directory.path / "cache")

    def trajectories(self, *, tokens: bool = False) -> "pa.Table":
        """One row per trajectory of the topic, with the step that trained it or the reason why none did.

        Columns are those of ``inspection.trajectory_columns.FACTS``; ``tokens`` adds token ids, log-probs and loss mask
        as lists.

        Raises:
            UserError: the run's topics are neither on a broker nor on disk.
        """
        require_extra("inspect", "a run's tables", "pyarrow")
        from streamrl.inspection.tables import trajectory_table

        return self._read(lambda history: trajectory_table(history, self.name, self._algorithm, tokens=tokens))

    def steps(self) -> "pa.Table":
        """One row per optimizer step that is still valid (no crash undid it), with its metrics.

        Raises:
            UserError: the run's topics are neither on a broker nor on disk.
        """
        require_extra("inspect", "a run's tables", "pyarrow")
        from streamrl.inspection.tables import step_table

        return self._read(lambda history: step_table(history, self.name, self._algorithm))

    def audit(self) -> "AuditReport":
        """Prove from topics and checkpoints that ``produced = trained + skipped(reason) + pending``.

        Raises:
            UserError: the run's topics are neither on a broker nor on disk.
        """
        from streamrl.inspection.audit.command import audit_history

        return _outside_event_loop(partial(audit_history, self._past, self._export))

    def replay(self, first: int, last: int | None = None, **changes: Any) -> "list[StepReplay]":
        """Repeat steps ``first`` to ``last`` (both inclusive) in memory, from topics and checkpoints.

        ``changes`` repeat them with other settings of algorithm, training or batching, such as
        ``algorithm__epsilon_high=0.3``.

        Raises:
            UserError: a step, a record or a checkpoint is missing.
        """
        from streamrl.inspection.replay.command import ReplayRequest, StepChoice, WhatIfOptions, replay_steps

        arguments = tuple(_as_arguments(_tree_of(changes)))
        steps = StepChoice(first, first if last is None else last)
        request = ReplayRequest(self.directory, steps, WhatIfOptions(arguments), export=self._export)
        return _outside_event_loop(partial(replay_steps, request))

    def instances(self) -> list[dict[str, Any]]:
        """The policies that learn from the stream, the run's own first, each with its last command and state.

        Raises:
            UserError: the run is not running.
        """
        return _outside_event_loop(lambda: policy_operators().instances(self.directory))

    def attach(
        self, name: str, *, algorithm: str | None = None, begin: str | None = None, **changes: Any
    ) -> "subprocess.Popen[bytes]":
        """Train another policy on the stream, as `streamrl attach` does, and return its new process.

        Args:
            name: the instance's name; an instance that was attached before continues from its newest checkpoint.
            algorithm: a built-in algorithm, or ``package.module:Class``; None: the instance's last one, or the run's.
            begin: where an instance without a checkpoint starts reading: ``now``, ``beginning``, an offset of every
                partition, offsets by partition (``0=120,1=95``), ``10m`` ago, or an ISO date and time.
            changes: settings as ``section__key=value``.
        """
        command = [sys.executable, "-m", "streamrl", "attach", name, "--run", str(self.directory)]
        for option, value in (("--algorithm", algorithm), ("--from", begin)):
            command += [] if value is None else [option, value]
        for change in _as_arguments(_tree_of(changes)):
            command += ["--set", change]
        return subprocess.Popen(command)

    def detach(self, name: str, reason: str = "operator") -> None:
        """Stop an instance, which writes a checkpoint first.

        Raises:
            UserError: the run is not running, or has no instance of this name.
        """
        self._send("detach", name, reason)

    def promote(self, name: str, reason: str = "operator") -> None:
        """Let workers follow another policy's weights, during the run; the run's own policy is named ``policy``.

        The command takes effect within a second. Workers adopt the weights once the policy's trainer has exported them.

        Raises:
            UserError: the run is not running, has no instance of this name, or that one is served, paused or gone.
        """
        self._send("promote", name, reason)

    def split(self, shares: Mapping[str, float] | None, reason: str = "operator") -> None:
        """Set the share of the groups that each instance samples, during the run; the served policy samples the rest.

        Args:
            shares: by instance name, at most 1 in total; None or empty: the served policy samples everything.
            reason: why; shown in the logs.

        Raises:
            UserError: the run is not running, has no instance of a name, or not enough workers for its arms.
        """
        _outside_event_loop(lambda: policy_operators().split(self.directory, shares or {}, reason))

    def pause(self, name: str, reason: str = "operator") -> None:
        """Let an instance stop taking trajectories until ``resume``; raises the errors of ``detach``."""
        self._send("pause_instance", name, reason)

    def resume(self, name: str, reason: str = "operator") -> None:
        """Let an instance continue after a pause; raises the errors of ``detach``."""
        self._send("resume_instance", name, reason)

    def _send(self, action: "OperatorAction", name: str, reason: str) -> None:
        _outside_event_loop(lambda: policy_operators().tell(self.directory, action, name, reason))

    @cached_property
    def _algorithm(self) -> str:
        return self.settings.algorithm.name

    def _read(self, reading: Callable[[History], Awaitable[T]]) -> T:
        async def read(history: History) -> T:
            try:
                return await reading(history)
            finally:
                await history.close()  # in the event loop that owns its connections

        with self._history() as history:
            return _outside_event_loop(lambda: asyncio.run(read(history)))

    @contextmanager
    def _history(self) -> Iterator[History]:
        with (
            tempfile.TemporaryDirectory(prefix="streamrl-read-") as scratch,
            history_of(self._past, self._export, Path(scratch), lambda _line: None) as history,
        ):
            yield history


def _tree_of(overrides: Mapping[str, Any]) -> Tree:
    tree: Tree = {}
    for name, value in overrides.items():
        section, _, key = name.partition("__")
        if not key and not isinstance(value, Mapping):
            raise UserError(f"expected section__key=value or section={{...}}, got {name}={value!r}")
        # One call may give a section both as a whole and by single keys.
        tree = merged(tree, {section: {key: value} if key else dict(value)})
    return tree


def _as_arguments(tree: Tree) -> Iterator[str]:
    """The settings as ``section.key=value``, for a command line."""
    import tomli_w

    for section, part in tree.items():
        for key, value in part.items():
            # TOML has no paths, no tuples and no null.
            plain = str(value) if isinstance(value, Path) else list(value) if isinstance(value, tuple) else value
            text = UNSET if value is None else tomli_w.dumps({"value": plain}).partition("=")[2].strip()
            yield f"{section}.{key}={text}"


def _importable(value: Any, key: str = "") -> Any:
    """The same value with import paths instead of functions.

    Raises:
        SettingsError: a function that processes of the run cannot import.
    """
    if isinstance(value, Mapping):
        return {name: _importable(each, f"{key}.{name}" if key else str(name)) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_importable(each, key) for each in value]
    if not callable(value):
        return value
    name, module = getattr(value, "__qualname__", ""), getattr(value, "__module__", "")
    if module in ("__main__", "", None) or not all(part.isidentifier() for part in name.split(".")):
        raise SettingsError(
            f"expected a function that the run's processes can import for {key}, got {name or value!r} of "
            f"{module or 'no module'}; move it to a module, and pass it or its import path, such as my_rewards:exact"
        )
    return f"{module}:{name}"


def _is_in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _outside_event_loop(call: Callable[[], T]) -> T:
    """Call a function that starts its own event loop; in another thread if this one runs a loop, as in a notebook."""
    if not _is_in_event_loop():
        return call()
    # A thread can run only one event loop: ``asyncio.run`` would refuse here, but not in another thread.
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()
