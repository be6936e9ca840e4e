"""`streamrl replay`: opens the run, replays the requested steps, prints the results, and returns the exit code.

A what-if may change ``algorithm``, ``training`` and ``batching``, the settings that a step is computed with. The other
settings determined the recorded data, which a replay cannot change.
"""

import asyncio
import sys
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from streamrl.bus.history import History
from streamrl.consumers.training.checkpoints.storage import open_storage
from streamrl.consumers.training.checkpoints.store import CheckpointStore
from streamrl.consumers.training.policy import ComputeThread
from streamrl.inspection.opening import index_of
from streamrl.inspection.replay.attribution import find_gradient_outliers
from streamrl.inspection.replay.dead_letters import replay_dead_letters
from streamrl.inspection.replay.replayer import Replayer, ReplayOptions
from streamrl.inspection.replay.results import StepReplay
from streamrl.inspection.replay.scratch_policy import StepConfig, StoredRestorePoints, Variation, ids_among
from streamrl.inspection.replay.steps import Step, StepLog, refs_of, refused_step, steps_between
from streamrl.inspection.replay.view import (
    as_json,
    bisection_lines,
    dead_letter_lines,
    overview,
    replay_lines,
    step_line,
)
from streamrl.inspection.source import PastRun, history_of, open_run
from streamrl.observability.record_index.store import RecordIndex
from streamrl.schemas.errors import SettingsError, UserError
from streamrl.schemas.plain_text import plain_lines
from streamrl.settings.layers import from_arguments, merged
from streamrl.settings.loading import validated
from streamrl.settings.tree import Settings

R = TypeVar("R")

RANKS_TOLERANCE = 1e-4
"""Relative tolerance of loss and gradient norm if the trainer had several ranks, whose sums have another order."""
CHANGEABLE = ("algorithm", "training", "batching")


@dataclass(frozen=True)
class StepChoice:
    """The steps ``first`` to ``last`` (both included) to take again. ``first`` None: no step was named."""

    first: int | None = None
    last: int | None = None
    lineage: int | None = None
    attempt: int | None = None

    @property
    def single(self) -> bool:
        """Whether there is one step, which is shown in full."""
        return self.first == self.last


@dataclass(frozen=True)
class WhatIfOptions:
    """The differences of a what-if from the recorded step: settings, the algorithm, the trajectories."""

    changes: tuple[str, ...] = ()
    algorithm: str | None = None
    only: tuple[str, ...] = ()
    without: tuple[str, ...] = ()

    @property
    def words(self) -> tuple[str, ...]:
        """The differences as they are shown."""
        return (
            *self.changes,
            *((f"algorithm.name={self.algorithm}",) if self.algorithm else ()),
            *(f"only {name}" for name in self.only),
            *(f"without {name}" for name in self.without),
        )


@dataclass(frozen=True)
class GradientOptions:
    """Options about single trajectories' gradients: ``per_trajectory`` norms, or outliers by ``bisect``.

    ``above``: the norm above which a gradient is an outlier; None: derived from the norms of the steps before.
    """

    per_trajectory: bool = False
    bisect: bool = False
    above: float | None = None


@dataclass(frozen=True)
class ReplayRequest:
    """The options of the command line."""

    run: Path
    steps: StepChoice = StepChoice()
    what_if: WhatIfOptions = WhatIfOptions()
    gradients: GradientOptions = GradientOptions()
    from_dlq: bool = False
    export: Path | None = None
    out: Path | None = None
    threads: int | None = None
    json: bool = False

    @property
    def needs_a_step(self) -> bool:
        """Whether an option was given that needs a step."""
        return bool(self.what_if.words or self.steps.attempt or self.out) or self.gradients != GradientOptions()


@dataclass(frozen=True)
class ReplaySession:
    """An open run and the request."""

    request: ReplayRequest
    run: PastRun
    replayer: Replayer

    @property
    def named(self) -> str:
        """The run as the user wrote it, for commands to copy."""
        return str(self.request.run)

    def show(self, value: object, lines: list[str]) -> None:
        """Print a result."""
        print(as_json(value) if self.request.json else plain_lines(lines))


def replay(request: ReplayRequest) -> int:
    """Replay and print, and return the exit code.

    It is 1 if a plain replay on the CPU is not bit-equal (with several ranks: not within the tolerance), else 0.

    Raises:
        UserError: the requested run, step or trajectory does not exist.
    """
    run = open_run(request.run)
    # Raises for a wrong what-if before anything starts.
    variation_of(request.what_if, run.settings, step_config_of(run, request.threads))
    return _on_history(request, run, partial(replay_with, request, run))


def replay_steps(request: ReplayRequest) -> list[StepReplay]:
    """Take the steps of a request again. Only progress is printed, to standard error.

    Raises:
        UserError: the requested run, step or trajectory does not exist.
    """
    run = open_run(request.run)

    async def collected(history: History, scratch: Path) -> list[StepReplay]:
        async with _session(request, run, history, scratch) as session:
            log = await session.replayer.log()
            # Collected within the session, which closes its history and its compute thread at the end.
            return [found async for found in _replays(session, log, _steps(request.steps, log))]

    return _on_history(request, run, collected)


def _on_history(request: ReplayRequest, run: PastRun, work: Callable[[History, Path], Coroutine[None, None, R]]) -> R:
    """Call ``work`` with the run's history and a temporary folder."""
    # The folder is entered first and so removed last, after a broker on a copy of the run's data in it has stopped.
    with (
        tempfile.TemporaryDirectory(prefix="streamrl-replay-") as scratch,
        history_of(run, request.export, Path(scratch), print_progress) as history,
    ):
        return asyncio.run(work(history, Path(scratch)))


def print_progress(line: str) -> None:
    """Print a line of progress to standard error."""
    print(line, file=sys.stderr, flush=True)


async def replay_with(request: ReplayRequest, run: PastRun, history: History, scratch: Path) -> int:
    """Replay an opened run, see ``replay``. ``scratch``: the folder for a remote checkpoint."""
    async with _session(request, run, history, scratch) as session:
        # Before the steps are read, because dead letters that do not decode need no steps.
        if request.from_dlq:
            with index_of(run) if request.export is None else RecordIndex(None) as index:
                version, dead_letters = await replay_dead_letters(session.replayer, index)
            session.show({"weights": version, "dead_letters": dead_letters}, dead_letter_lines(version, dead_letters))
            return 0
        log = await session.replayer.log()
        if request.steps.first is None:
            if request.needs_a_step:
                raise UserError("expected --step N or --steps FIRST:LAST with these options, got none")
            versions = [str(version) for version in session.replayer.restore_points.versions()]
            chain = {"chain": log.chain(), "refused": log.refused, "checkpoints": versions}
            session.show(chain, overview(log, versions))
            return 0
        steps = _steps(request.steps, log)
        return await (_bisect(session, log, steps) if request.gradients.bisect else _compare(session, log, steps))


@asynccontextmanager
async def _session(
    request: ReplayRequest, run: PastRun, history: History, scratch: Path
) -> AsyncIterator[ReplaySession]:
    settings, config = run.settings, step_config_of(run, request.threads)
    location = open_storage(run.checkpoints, scratch)
    # One thread for the whole session: OpenMP keeps its number of threads per calling thread.
    compute = ComputeThread(config.training.threads)
    try:
        yield ReplaySession(
            request,
            run,
            Replayer(
                history=history,
                run=run.name,
                config=config,
                batching=settings.batching,
                reward_weights=settings.rewards.weight_by_name,
                # A store uses ``keep_checkpoints`` when it writes; this one only reads.
                restore_points=StoredRestorePoints(
                    CheckpointStore(location, settings.training.keep_checkpoints), run.weights
                ),
                compute=compute,
                progress=print_progress,
            ),
        )
    finally:
        compute.close()
        await history.close()


def _steps(chosen: StepChoice, log: StepLog) -> list[Step]:
    """The chosen steps. The number of a step that was only refused means its refused attempt."""
    first, last = chosen.first, chosen.last
    assert first is not None, "steps are named"
    assert last is not None, "steps are named"
    # In any lineage: once a step was taken, its refused attempts can only be chosen with --attempt.
    refused_only = (
        chosen.single
        and not any(v.number == first for v in log.reports)
        and any(refused.step == first for refused in log.refused)
    )
    if chosen.attempt is not None or refused_only:
        return [refused_step(log, first, chosen.attempt, chosen.lineage)]
    return list(steps_between(log, first, last, chosen.lineage))


async def _bisect(session: ReplaySession, log: StepLog, steps: list[Step]) -> int:
    request = session.request
    if not request.steps.single:
        raise UserError("expected --bisect with one --step N, got a range")
    found = await find_gradient_outliers(
        session.replayer, log, steps[0], request.steps.lineage, request.gradients.above
    )
    session.show(found, bisection_lines(found, session.named))
    return 0


def _refuse_unknown(request: ReplayRequest, steps: list[Step]) -> None:
    """Raise for unknown trajectories before any earlier step is taken again."""
    for step in steps:
        ids_among(
            refs_of(step), (*request.what_if.only, *request.what_if.without), run=str(request.run), step=step.step
        )


async def _replays(session: ReplaySession, log: StepLog, steps: list[Step]) -> AsyncGenerator[StepReplay, None]:
    request, replayer = session.request, session.replayer
    options = ReplayOptions(
        variation=variation_of(request.what_if, session.run.settings, replayer.config),
        rows=request.steps.single or request.json,
        row_gradients=request.gradients.per_trajectory,
        keep=request.out,
    )
    _refuse_unknown(request, steps)
    async for found in replayer.replay(log, steps, request.steps.lineage, options):
        yield found


async def _compare(session: ReplaySession, log: StepLog, steps: list[Step]) -> int:
    request = session.request
    differing, plain = 0, True
    async for found in _replays(session, log, steps):
        session.show(found, replay_lines(found, session.named) if request.steps.single else [step_line(found)])
        # Steps of several ranks are replayed on one.
        is_near = session.replayer.config.training.ranks > 1 and found.rebuilt.is_near(RANKS_TOLERANCE)
        differing += found.rebuilt.verdict == "differs" and not is_near
        plain = plain and found.what_if is None
    # A what-if is expected to differ, and on an accelerator the last bits of sums may differ from run to run.
    return 1 if differing and plain and not session.replayer.on_accelerator else 0


def step_range(step: int | None, steps: str | None) -> tuple[int | None, int | None]:
    """First and last step of ``--step N`` or ``--steps FIRST:LAST``.

    Raises:
        UserError: both are given, or the range is not valid.
    """
    if steps is None:
        return step, step
    first, colon, last = steps.partition(":")
    # ``int`` would accept signs, blanks and underscores; ``isdecimal`` is also false for an empty side.
    if step is not None or not colon or not first.isdecimal() or not last.isdecimal() or int(first) > int(last):
        given = f"{steps!r}" + (f" and --step {step}" if step is not None else "")
        raise UserError(f"expected --step N or --steps FIRST:LAST (both included), got {given}")
    return int(first), int(last)


def step_config_of(run: PastRun, threads: int | None) -> StepConfig:
    """The settings that the run's own trainer computes a step with."""
    settings = run.settings
    chosen = settings.training.threads if threads is None else threads
    if not chosen and (run.directory.logs / "trainer.log").exists():
        chosen = 1  # `streamrl run` gives each process one thread unless a setting says otherwise
    return StepConfig(
        settings.algorithm,
        settings.training.model_copy(update={"threads": chosen}),
        settings.loop.max_completion_length,
        settings.model.path,
        settings.run.seed,
    )


def variation_of(wanted: WhatIfOptions, settings: Settings, config: StepConfig) -> Variation | None:
    """The requested what-if; None if there is none.

    Raises:
        SettingsError: a change is not a setting of algorithm, training or batching, or has a wrong value.
    """
    changed = _changed(settings, wanted.changes, wanted.algorithm)
    if not wanted.words:
        return None
    training = changed.training
    # Unless the what-if changes the threads, they stay as recorded, because sums are split by thread.
    if training.threads == settings.training.threads:
        training = training.model_copy(update={"threads": config.training.threads})
    return Variation(
        config=replace(config, algorithm=changed.algorithm, training=training),
        changes=wanted.words,
        # None keeps the recorded packing: another order of rows would change the last bits, which was not requested.
        batching=changed.batching if changed.batching != settings.batching else None,
        only=frozenset(wanted.only),
        without=frozenset(wanted.without),
    )


def _changed(settings: Settings, changes: Sequence[str], algorithm: str | None) -> Settings:
    for change in changes:
        if "=" not in change or change.partition(".")[0] not in CHANGEABLE:
            raise SettingsError(f"expected --set SECTION.KEY=VALUE of {', '.join(CHANGEABLE)}, got {change!r}")
    tree = from_arguments(f"--{change}" for change in changes)
    if algorithm is not None:
        tree = merged(tree, {"algorithm": {"name": algorithm}})
    recorded = settings.model_dump()
    if tree.get("algorithm", {}).get("name", settings.algorithm.name) != settings.algorithm.name:
        # Another algorithm has its own defaults: only values that the run changed from the defaults are kept.
        recorded["algorithm"] = settings.algorithm.changed()
    # Merged into the run's settings and validated as a whole, so a change obeys the rules of any configuration.
    return validated(merged(recorded, tree))
