"""Carries out `streamrl replay`: opens the run, asks the replayer, prints what it found, and says how to exit."""

import asyncio
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import structlog

from consumers.replay.dead_letters import judged_letters
from consumers.replay.rebuilding.starting import StoredStarts
from consumers.replay.replayer import Replayer, Wanted
from consumers.replay.steps.chain import StepLog
from consumers.replay.steps.choosing import Step, refused_step, steps_between
from consumers.replay.steps.reading import refs_of
from consumers.replay.suspects import bisect
from consumers.replay.variation import ids_among
from consumers.training.compute import ComputeThread
from consumers.training.persistence.checkpoint import CheckpointStore
from consumers.training.persistence.locations import open_location
from deploy.inspection.replays.request import Request, recipe_of, variation_of
from deploy.inspection.replays.values import as_json
from deploy.inspection.replays.view import bisected_lines, letter_lines, overview, replay_lines, step_line
from deploy.inspection.source import PastRun, history_of, open_run
from schemas.errors import UserError
from schemas.ports.history import History


@dataclass(frozen=True)
class Session:
    """An open run and what is asked of it."""

    request: Request
    run: PastRun
    replayer: Replayer

    @property
    def named(self) -> str:
        """The run as the user wrote it, for commands to copy."""
        return str(self.request.run)

    def show(self, value: object, lines: list[str]) -> None:
        """Print a result."""
        print(as_json(value) if self.request.json else "\n".join(lines))


def replay(request: Request) -> int:
    """The exit code: 1 if a plain replay on the CPU did not come out bit-equal, else 0.

    Raises:
        UserError: what is asked for is not there.
    """
    run = open_run(request.run)
    variation_of(request, run.settings, recipe_of(run, request.threads))  # refuses a wrong one before anything starts
    with (
        tempfile.TemporaryDirectory(prefix="streamrl-replay-") as scratch,
        history_of(run, request.export, Path(scratch), tell) as history,
    ):
        return asyncio.run(replay_with(request, run, history, Path(scratch)))


def tell(line: str) -> None:
    """Progress."""
    print(line, file=sys.stderr, flush=True)


def log_to_stderr() -> None:
    """Keep standard output for results."""
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))


async def replay_with(request: Request, run: PastRun, history: History, scratch: Path) -> int:
    """``replay`` of an opened run. ``scratch``: where a remote checkpoint is fetched to."""
    async with _session(request, run, history, scratch) as session:
        if request.from_dlq:
            version, letters = await judged_letters(session.replayer)
            session.show({"weights": version, "letters": letters}, letter_lines(version, letters))
            return 0
        log = await session.replayer.log()
        if request.first is None or request.last is None:
            if request.needs_a_step:
                raise UserError("expected --step N or --steps FIRST:LAST with these options, got none")
            versions = [str(version) for version in session.replayer.starts.versions()]
            chain = {"chain": log.chain(), "refused": log.refused, "checkpoints": versions}
            session.show(chain, overview(log, versions))
            return 0
        steps = _steps(request, log, request.first, request.last)
        return await (_bisect(session, log, steps) if request.bisect else _compare(session, log, steps))


@asynccontextmanager
async def _session(request: Request, run: PastRun, history: History, scratch: Path) -> AsyncIterator[Session]:
    settings, recipe = run.settings, recipe_of(run, request.threads)
    location = open_location(settings.training.checkpoint_location or run.directory.checkpoints, scratch)
    compute = ComputeThread(recipe.training.threads)
    try:
        yield Session(
            request,
            run,
            Replayer(
                history=history,
                run=run.name,
                recipe=recipe,
                batching=settings.batching,
                reward_weights=settings.rewards.weight_by_name,
                starts=StoredStarts(CheckpointStore(location, settings.training.keep_checkpoints), run.weights),
                compute=compute,
                progress=tell,
            ),
        )
    finally:
        compute.close()
        await history.close()


def _steps(request: Request, log: StepLog, first: int, last: int) -> list[Step]:
    """The steps asked for; a step that was only ever refused stands for its attempt."""
    refused_only = (
        request.single
        and not any(v.number == first for v in log.reports)
        and any(refused.step == first for refused in log.refused)
    )
    if request.attempt is not None or refused_only:
        return [refused_step(log, first, request.attempt, request.lineage)]
    return list(steps_between(log, first, last, request.lineage))


async def _bisect(session: Session, log: StepLog, steps: list[Step]) -> int:
    request = session.request
    if not request.single:
        raise UserError("expected --bisect with one --step N, got a range")
    found = await bisect(session.replayer, log, steps[0], request.lineage, request.above)
    session.show(found, bisected_lines(found, session.named))
    return 0


def _refuse_unknown(request: Request, steps: list[Step]) -> None:
    """Refuse trajectories that a step does not name, before the steps before it are taken again."""
    for step in steps:
        ids_among(refs_of(step), (*request.only, *request.without), run=str(request.run), step=step.step)


async def _compare(session: Session, log: StepLog, steps: list[Step]) -> int:
    request, replayer = session.request, session.replayer
    wanted = Wanted(
        variation=variation_of(request, session.run.settings, replayer.recipe),
        rows=request.single or request.json,
        row_gradients=request.row_gradients,
        keep=request.keep,
    )
    _refuse_unknown(request, steps)
    differing = 0
    async for found in replayer.replay(log, steps, request.lineage, wanted):
        session.show(found, replay_lines(found, session.named) if request.single else [step_line(found)])
        differing += found.rebuilt.verdict == "differs"
    plain = wanted.variation is None
    return 1 if differing and plain and not replayer.on_accelerator else 0
