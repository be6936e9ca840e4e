"""A run whose trainer others keep alive: its end is what the coordinator says, and then its workers' leaving."""

import asyncio

from streamrl.deploy.local.fleet import WORKERS_LEAVE_S, RemoteTrainerWatch
from streamrl.deploy.local.supervisor import Supervisor
from streamrl.observability.run_state.parts import RunPart
from streamrl.observability.run_state.state import RunProgress, RunState
from streamrl.schemas.reports import WorkerState
from tests.fakes.messages import heartbeat

LAST = 240


async def is_over(state: RunState, *moments: float) -> bool:
    """Whether the run is over after looks at these moments."""
    supervisor, stop, now = Supervisor([], max_restarts=0, grace_s=1), asyncio.Event(), [0.0]
    elsewhere = RemoteTrainerWatch(state, LAST, supervisor, clock=lambda: now[0], look_every_s=0.001)
    looking = asyncio.create_task(elsewhere.run(stop))
    for now[0] in moments:
        await asyncio.sleep(0.02)
    stop.set()
    await looking
    return supervisor.finished.is_set()


async def test_a_run_is_over_when_the_coordinator_has_said_so_and_its_workers_have_left() -> None:
    state = RunState("r", progress=RunProgress(finished_step=LAST - 1))
    assert not await is_over(state, 1.0), "the end of a run that is continued"
    state.progress.finished_step = LAST
    state.processes.workers["w"] = heartbeat("w")
    assert not await is_over(state, 1.0), "a worker is still there"
    state.processes.workers["w"] = heartbeat("w", state=WorkerState.STOPPED)
    assert await is_over(state, 1.0)


class LedByAnother(RunPart):
    own_trainer_leads = False


async def test_how_many_steps_a_promoted_instance_takes_is_its_own_affair() -> None:
    state = RunState("r", parts=(LedByAnother(),), progress=RunProgress(finished_step=LAST - 1))
    assert not await is_over(state, 1.0)
    state.progress.finished = True
    assert await is_over(state, 1.0)


async def test_a_worker_that_hangs_does_not_hold_it_up() -> None:
    state = RunState("r", progress=RunProgress(finished_step=LAST))
    state.processes.workers["w"] = heartbeat("w", sent_at=WORKERS_LEAVE_S)
    assert not await is_over(state, 1.0, WORKERS_LEAVE_S)
    assert await is_over(state, 1.0, WORKERS_LEAVE_S + 1.1)
