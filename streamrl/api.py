"""Runs from Python: start one, and look at one that is over or under way."""

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
from streamrl.schemas.errors import UserError
from streamrl.schemas.evaluation import EVALUATED
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
    """Train on this machine, as `streamrl run` does, and return when the run is over.

    In a notebook, where an event loop runs already, it blocks its cell; Ctrl-C (or "interrupt") ends the run in an
    orderly way, and the same call goes on from its last checkpoint.

    Args:
        source: a TOML file, a nested mapping of settings, or settings; None: what environment variables say.
        top: show the live view, on a terminal.
        adopt: take over a run of this name that the topics hold and the directory does not.
        overrides: settings as ``section__key=value``, or a whole section as ``section={"key": value}``.

    Raises:
        SettingsError: the settings are wrong; the text names the key.
        UserError: something else that the user can mend, before or during the run.
        StreamRLError: a process could not be kept alive.
    """
    from streamrl.deploy.local.run import run_locally

    # Named here, so that the directory is known when the run is over.
    settings = named(settings_of(source, overrides))
    # Signal handlers can be set in the main thread only, and a loop cannot run within another one. Where either stands
    # in the way, the run gets a thread of its own and an event to be stopped by.
    if threading.current_thread() is threading.main_thread() and not _loop_runs():
        return _ended(settings, run_locally(settings, top=top, adopt=adopt))
    stop = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run_locally, settings, top=top, stop=stop, adopt=adopt)
        try:
            code = running.result()
        except KeyboardInterrupt:  # raised here, in the main thread; the run's own thread hears nothing of it
            stop.set()
            code = running.result()
    return _ended(settings, code)


async def run_async(source: Source = None, /, **overrides: Any) -> "Run":
    """``run`` beside other work of an event loop; cancelling the task ends the run in an orderly way.

    Raises:
        StreamRLError: see ``run``.
    """
    from streamrl.deploy.local.run import run_locally

    settings, stop = named(settings_of(source, overrides)), threading.Event()
    code = await in_thread(partial(run_locally, settings, stop=stop), on_cancel=stop.set)
    return _ended(settings, code)


def _ended(settings: Settings, code: int) -> "Run":
    from streamrl.deploy.local.supervisor import CRASHED_AT_STOP

    # That a process crashed at the end, which was told, leaves open whether the last step was taken.
    return Run(settings.run.path, finished=None if code == CRASHED_AT_STOP else code == 0)


def compare(*runs: "Run | str | Path", level: float | None = None, out: str | Path | None = None) -> dict[str, Any]:
    """Several runs side by side, as `streamrl report A B --json` has them.

    ``runs`` have ``name``, ``path`` and ``figures`` by key (rewards, KL, entropy, lengths, tokens, staleness, shares of
    waiting); ``paired`` the difference of each run to the first on the prompts that both sampled, with a 95 % interval
    and the p of Wilcoxon's signed-rank test; ``settings`` those that differ.

    Args:
        runs: two or more, each by its directory, its name under ``runs/`` or as a ``Run``.
        level: the reward whose first reaching is told; None: the highest that all reached.
        out: where to write the page that shows the same; None: nowhere.

    Raises:
        UserError: a run is not there or took no step, or the page cannot be written.
    """
    from streamrl.inspection.report.command import compared

    if len(runs) < 2:
        raise UserError(f"expected two runs or more to compare, got {len(runs)}")
    paths = [one.directory if isinstance(one, Run) else Path(one) for one in runs]
    return compared(paths, level, None if out is None else Path(out))


def settings_of(source: Source, overrides: Mapping[str, Any]) -> Settings:
    """Settings from a file, a mapping or settings, with ``section__key`` overrides on top.

    Raises:
        SettingsError: an unknown key, a wrong value, or sections that contradict each other.
    """
    changes = _tree_of(overrides)
    if isinstance(source, Settings):
        # Complete as they are: neither a file nor the environment is asked again.
        return validated(merged(source.model_dump(), changes))
    # As on a command line, so that they stand above files and variables and are parsed by the same code.
    arguments = [f"--{change}" for change in _as_arguments(changes)]
    if isinstance(source, Mapping):
        return load_settings(None, arguments, dict(source))
    return load_settings(None if source is None else Path(source), arguments)


class Run:
    """A run, by its directory, its name under ``runs/``, or its configuration file: what it left, or leaves so far.

    Tables and audits read the run's topics: from its broker while that runs, else from a broker that is started on a
    copy of its data, which takes seconds. Nothing is ever written. ``export``: read `streamrl export`'s files instead.

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
        """Prefix of the run's topics."""
        return self._past.name

    @property
    def directory(self) -> Path:
        """What the run leaves is in here."""
        return self._past.directory.path

    @property
    def settings(self) -> Settings:
        """As the run was last started."""
        return self._past.settings

    @property
    def finished(self) -> bool:
        """Whether it took its last step."""
        if self._finished is None:
            steps = self.summary.get("steps", 0) if self._past.directory.summary.exists() else 0
            return bool(steps >= self.settings.training.max_steps)
        return self._finished

    @property
    def summary(self) -> dict[str, Any]:
        """``summary.json``: the run in a few figures.

        Raises:
            UserError: it has none, because it was never ended in an orderly way.
        """
        try:
            found: dict[str, Any] = json.loads(self._past.directory.summary.read_text())
        except FileNotFoundError as error:
            raise UserError(
                f"expected a summary in {self.directory}, got none: the run was not ended, or not in an orderly way"
            ) from error
        return found

    @property
    def metrics(self) -> "pa.Table":
        """``metrics.jsonl``: one row an optimizer step, one column a metric.

        After a crash steps appear more than once, as they were taken; ``steps()`` has only those that count.
        """
        return self._table_of_lines(evaluated=False)

    @property
    def evaluations(self) -> "pa.Table":
        """``metrics.jsonl``: one row for each weights version that was evaluated, one column a metric."""
        return self._table_of_lines(evaluated=True)

    def _table_of_lines(self, *, evaluated: bool) -> "pa.Table":
        from streamrl.inspection.tables import table_of

        path = self._past.directory.metrics
        lines = path.read_text().splitlines() if path.exists() else []
        # A line that is being written, or that a killed trainer left, has no closing brace yet.
        rows = [json.loads(line) for line in lines if line.endswith("}")]
        return table_of([row for row in rows if (EVALUATED in row) == evaluated])

    @property
    def model(self) -> Path | None:
        """The newest checkpoint, for ``from_pretrained``; None before the first.

        One that is kept in an object store is fetched into the run's directory.

        Raises:
            StreamRLError: the checkpoints cannot be read.
        """
        from streamrl.consumers.training.checkpoints.catalogue import newest_model

        return newest_model(self._past.checkpoints, self._past.directory.path / "cache")

    def trajectories(self, *, tokens: bool = False) -> "pa.Table":
        """One row a trajectory of the topic, with the step that trained it or the reason why none did.

        Columns are those of ``inspection.tables.FACTS``; ``tokens`` adds token ids, log-probs and loss mask as lists.

        Raises:
            UserError: nothing has the run's topics.
        """
        from streamrl.inspection.tables import trajectory_table

        return self._read(lambda history: trajectory_table(history, self.name, self._algorithm, tokens=tokens))

    def steps(self) -> "pa.Table":
        """One row an optimizer step of the surviving lineage, with its metrics.

        Raises:
            UserError: nothing has the run's topics.
        """
        from streamrl.inspection.tables import step_table

        return self._read(lambda history: step_table(history, self.name, self._algorithm))

    def audit(self) -> "AuditReport":
        """Prove from topics and checkpoints that ``produced = trained + skipped(reason) + pending``.

        Raises:
            UserError: nothing has the run's topics.
        """
        from streamrl.inspection.audit.command import audit_history

        return _apart(partial(audit_history, self._past, self._export))

    def replay(self, first: int, last: int | None = None, **changes: Any) -> "list[StepReplay]":
        """Take steps ``first`` to ``last`` (both inclusive) again, from what topics and checkpoints hold, in memory.

        ``changes`` ask what would have been: settings of algorithm, training or batching, as
        ``algorithm__epsilon_high=0.3``.

        Raises:
            UserError: a step, a record or a checkpoint is not there.
        """
        from streamrl.inspection.replay.command import ReplayRequest, StepChoice, WhatIfOptions, replay_steps

        named = tuple(_as_arguments(_tree_of(changes)))
        steps = StepChoice(first, first if last is None else last)
        request = ReplayRequest(self.directory, steps, WhatIfOptions(named), export=self._export)
        return _apart(partial(replay_steps, request))

    def instances(self) -> list[dict[str, Any]]:
        """What learns from the stream, the run's own trainer first: what each was told, and how it stands.

        Raises:
            UserError: the run is not under way.
        """
        return _apart(lambda: policy_operators().instances(self.directory))

    def attach(
        self, name: str, *, algorithm: str | None = None, begin: str | None = None, **changes: Any
    ) -> "subprocess.Popen[bytes]":
        """Train another policy on the stream, in a process of its own, as `streamrl attach` does; that process.

        Args:
            name: of the instance; one that was attached before goes on from its newest checkpoint.
            algorithm: of the shelf, or ``package.module:Class``; None: as before, or as the run's.
            begin: for one without a checkpoint: ``now``, ``beginning``, an offset of every partition, offsets by
                partition (``0=120,1=95``), ``10m`` ago, or an ISO date and time.
            changes: settings as ``section__key=value``.
        """
        command = [sys.executable, "-m", "streamrl", "attach", name, "--run", str(self.directory)]
        for option, value in (("--algorithm", algorithm), ("--from", begin)):
            command += [] if value is None else [option, value]
        for change in _as_arguments(_tree_of(changes)):
            command += ["--set", change]
        return subprocess.Popen(command)

    def detach(self, name: str, reason: str = "operator") -> None:
        """Let an instance end, with a checkpoint.

        Raises:
            UserError: the run is not under way, or has no such instance.
        """
        self._tell("detach", name, reason)

    def promote(self, name: str, reason: str = "operator") -> None:
        """Let workers follow another policy's weights, live; the run's own is named ``policy``.

        The command is carried out within a second; workers adopt its weights once its trainer has exported them.

        Raises:
            UserError: the run is not under way, has no such instance, or that one is served, paused or gone.
        """
        self._tell("promote", name, reason)

    def split(self, shares: Mapping[str, float] | None, reason: str = "operator") -> None:
        """Let instances sample a share of the groups each, live; the served policy has the rest.

        Args:
            shares: by the instance's name, 1 together at most; None or empty: the served policy samples everything.
            reason: why; shown in the logs.

        Raises:
            UserError: the run is not under way, has no such instance, or not enough workers for its arms.
        """
        _apart(lambda: policy_operators().split(self.directory, shares or {}, reason))

    def pause(self, name: str, reason: str = "operator") -> None:
        """Let an instance take no trajectories for now; raises what ``detach`` does."""
        self._tell("pause_instance", name, reason)

    def resume(self, name: str, reason: str = "operator") -> None:
        """Let an instance go on after a pause; raises what ``detach`` does."""
        self._tell("resume_instance", name, reason)

    def _tell(self, action: "OperatorAction", name: str, reason: str) -> None:
        _apart(lambda: policy_operators().tell(self.directory, action, name, reason))

    @cached_property
    def _algorithm(self) -> str:
        return self.settings.algorithm.name

    def _read(self, reading: Callable[[History], Awaitable[T]]) -> T:
        async def read(history: History) -> T:
            try:
                return await reading(history)
            finally:
                await history.close()  # in the loop to which its connections belong

        with self._history() as history:
            return _apart(lambda: asyncio.run(read(history)))

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
        # A section may be given whole and by single keys in one call.
        tree = merged(tree, {section: {key: value} if key else dict(value)})
    return tree


def _as_arguments(tree: Tree) -> Iterator[str]:
    """``section.key=value`` as a command line has it."""
    import tomli_w

    for section, part in tree.items():
        for key, value in part.items():
            # TOML knows neither paths nor tuples, and has no null.
            plain = str(value) if isinstance(value, Path) else list(value) if isinstance(value, tuple) else value
            text = UNSET if value is None else tomli_w.dumps({"value": plain}).partition("=")[2].strip()
            yield f"{section}.{key}={text}"


def _loop_runs() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _apart(call: Callable[[], T]) -> T:
    """Call what starts an event loop of its own: where one runs already, as in a notebook, in another thread."""
    if not _loop_runs():
        return call()
    # A running loop is a matter of its thread: ``asyncio.run`` refuses in this one, and not in another.
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()
