"""`streamrl replay`: opens the run, replays what the command line asks for, prints it, and gives the exit code.

A what-if may change ``algorithm``, ``training`` and ``batching``: the settings that a step is computed from. All others
decided what was recorded, which a replay cannot change.
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
"""Of loss and gradient norm, where several ranks added up what one adds up here."""
CHANGEABLE = ("algorithm", "training", "batching")


@dataclass(frozen=True)
class StepChoice:
    """Which steps are taken again, both included. ``first`` None: none is named."""

    first: int | None = None
    last: int | None = None
    lineage: int | None = None
    attempt: int | None = None

    @property
    def single(self) -> bool:
        """Whether one step is looked at in full."""
        return self.first == self.last


@dataclass(frozen=True)
class WhatIfOptions:
    """What is to be otherwise than it was recorded: settings, the algorithm, the trajectories."""

    changes: tuple[str, ...] = ()
    algorithm: str | None = None
    only: tuple[str, ...] = ()
    without: tuple[str, ...] = ()

    @property
    def words(self) -> tuple[str, ...]:
        """Each of them as it is shown."""
        return (
            *self.changes,
            *((f"algorithm.name={self.algorithm}",) if self.algorithm else ()),
            *(f"only {name}" for name in self.only),
            *(f"without {name}" for name in self.without),
        )


@dataclass(frozen=True)
class GradientOptions:
    """What is asked of the gradients of single trajectories: each one's norm, or which of them are outliers.

    ``above``: of which norm on; None: it follows from the steps before.
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
    keep: Path | None = None
    threads: int | None = None
    json: bool = False

    @property
    def needs_a_step(self) -> bool:
        """Whether something is asked for that only a step can answer."""
        return bool(self.what_if.words or self.steps.attempt or self.keep) or self.gradients != GradientOptions()


@dataclass(frozen=True)
class ReplaySession:
    """An open run and what is asked of it."""

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
    """The exit code: 1 if a plain replay on the CPU did not come out bit-equal, or near for several ranks, else 0.

    Raises:
        UserError: what is asked for is not there.
    """
    run = open_run(request.run)
    # Refuses a wrong one before anything starts.
    variation_of(request.what_if, run.settings, step_config_of(run, request.threads))
    return _on_history(request, run, partial(replay_with, request, run))


def replay_steps(request: ReplayRequest) -> list[StepReplay]:
    """The steps that a request names, taken again; nothing is printed but progress, to standard error.

    Raises:
        UserError: what is asked for is not there.
    """
    run = open_run(request.run)

    async def collected(history: History, scratch: Path) -> list[StepReplay]:
        async with _session(request, run, history, scratch) as session:
            log = await session.replayer.log()
            # Collected inside: at the session's end its history and its compute thread are closed.
            return [found async for found in _replays(session, log, _steps(request.steps, log))]

    return _on_history(request, run, collected)


def _on_history(request: ReplayRequest, run: PastRun, work: Callable[[History, Path], Coroutine[None, None, R]]) -> R:
    """Do this with what the run's topics hold, and a folder for it."""
    # The folder is entered first and so removed last, when a broker that was started on a copy in it has stopped.
    with (
        tempfile.TemporaryDirectory(prefix="streamrl-replay-") as scratch,
        history_of(run, request.export, Path(scratch), print_progress) as history,
    ):
        return asyncio.run(work(history, Path(scratch)))


def print_progress(line: str) -> None:
    """Progress."""
    print(line, file=sys.stderr, flush=True)


async def replay_with(request: ReplayRequest, run: PastRun, history: History, scratch: Path) -> int:
    """``replay`` of an opened run. ``scratch``: where a remote checkpoint is fetched to."""
    async with _session(request, run, history, scratch) as session:
        # Before the steps are read: dead letters that still do not decode need none of them.
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
                # ``keep_checkpoints`` is what a store prunes by when it writes; this one only reads.
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
    """The steps asked for. A number that was only ever refused means its refused attempt."""
    first, last = chosen.first, chosen.last
    assert first is not None, "steps are named"
    assert last is not None, "steps are named"
    # In any lineage: once such a step was taken, its refused attempts have to be asked for by number.
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
    """Refuse trajectories that a step does not name, before the steps before it are taken again."""
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
        keep=request.keep,
    )
    _refuse_unknown(request, steps)
    async for found in replayer.replay(log, steps, request.steps.lineage, options):
        yield found


async def _compare(session: ReplaySession, log: StepLog, steps: list[Step]) -> int:
    request = session.request
    differing, plain = 0, True
    async for found in _replays(session, log, steps):
        session.show(found, replay_lines(found, session.named) if request.steps.single else [step_line(found)])
        # Steps of several ranks are taken again on one.
        is_near = session.replayer.config.training.ranks > 1 and found.rebuilt.is_near(RANKS_TOLERANCE)
        differing += found.rebuilt.verdict == "differs" and not is_near
        plain = plain and found.what_if is None
    # A what-if is meant to differ, and on an accelerator sums may differ in the last bits from run to run.
    return 1 if differing and plain and not session.replayer.on_accelerator else 0


def step_range(step: int | None, steps: str | None) -> tuple[int | None, int | None]:
    """First and last step of ``--step N`` or ``--steps FIRST:LAST``.

    Raises:
        UserError: both are given, or the range is none.
    """
    if steps is None:
        return step, step
    first, colon, last = steps.partition(":")
    # ``int`` would take signs, blanks and underscores; ``isdecimal`` is also false of an empty side.
    if step is not None or not colon or not first.isdecimal() or not last.isdecimal() or int(first) > int(last):
        given = f"{steps!r}" + (f" and --step {step}" if step is not None else "")
        raise UserError(f"expected --step N or --steps FIRST:LAST (both included), got {given}")
    return int(first), int(last)


def step_config_of(run: PastRun, threads: int | None) -> StepConfig:
    """How the run's own trainer computes a step."""
    settings = run.settings
    chosen = settings.training.threads if threads is None else threads
    if not chosen and (run.directory.logs / "trainer.log").exists():
        chosen = 1  # `streamrl run` gives each of its processes one thread where the settings leave it open
    return StepConfig(
        settings.algorithm,
        settings.training.model_copy(update={"threads": chosen}),
        settings.loop.max_completion_length,
        settings.model.path,
        settings.run.seed,
    )


def variation_of(wanted: WhatIfOptions, settings: Settings, config: StepConfig) -> Variation | None:
    """The what-if that is asked for, if any.

    Raises:
        SettingsError: a change names no setting of algorithm, training or batching, or a wrong value.
    """
    changed = _changed(settings, wanted.changes, wanted.algorithm)
    if not wanted.words:
        return None
    training = changed.training
    # Unless threads are what changes, they stay as the step was recorded with: sums are split by thread.
    if training.threads == settings.training.threads:
        training = training.model_copy(update={"threads": config.training.threads})
    return Variation(
        config=replace(config, algorithm=changed.algorithm, training=training),
        changes=wanted.words,
        # None keeps the recorded packing: another order of rows would change the last bits besides what was asked for.
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
        # Another algorithm has defaults of its own: only what the run had set otherwise goes along.
        recorded["algorithm"] = settings.algorithm.changed()
    # Merged into the run's settings and validated as a whole: a change obeys the rules of any configuration.
    return validated(merged(recorded, tree))
