"""Kills and pauses of our own processes, and second holders of a role."""

import asyncio
import os
import signal
import time
from pathlib import Path

from streamrl.schemas.errors import Superseded
from streamrl.schemas.weights import complete_versions
from tests.chaos.faults.plan import Event, Fault
from tests.chaos.runs.chaos_run import ChaosRun
from tests.chaos.runs.setting import WITHOUT_A_MODEL
from tests.chaos.runs.waiting import FleetFailed

ROLES = ("worker-0", "worker-1", "coordinator", "dispatcher", "relay")
START_S = 60.0
END_S = 120.0
RANKS = 2
OF_RANKS = {"training": {"ranks": RANKS, "threads": 1}}
RANKS_END_S = 20.0
JUDGE = "tests.chaos.runs.slow_reward:share_of_a"
OF_GRADERS = {
    **WITHOUT_A_MODEL,
    "rewards": {"functions": [JUDGE], "graded": [JUDGE], "graders": 2},
    "training": {**WITHOUT_A_MODEL["training"], "max_steps": 150},
}


async def kill(run: ChaosRun, event: Event) -> float:
    run.fleet.kill(await run.fleet.living(event.target))
    return time.time()


async def kill_trainer_of_ranks(run: ChaosRun, event: Event) -> float:
    """Its other ranks have to be gone before a restart finds their devices taken."""
    trainer = await run.fleet.living(event.target)
    ranks = await _ranks_of(run, trainer)
    run.fleet.kill(trainer)
    killed = time.time()
    await run.until(lambda: not any(alive(rank) for rank in ranks), "end of the ranks", RANKS_END_S)
    return killed


async def kill_rank(run: ChaosRun, event: Event) -> float:
    """One of the trainer's other ranks: all of them have to begin anew."""
    trainer = await run.fleet.living(event.target)
    ranks = await _ranks_of(run, trainer)
    os.kill(ranks[0], signal.SIGKILL)
    killed = time.time()
    await run.until(lambda: not alive(trainer), "end of rank 0", RANKS_END_S)
    return killed


async def _ranks_of(run: ChaosRun, trainer: int) -> list[int]:
    await run.until(lambda: len(children_of(trainer)) == RANKS - 1, "ranks of the trainer", START_S)
    return children_of(trainer)


def children_of(pid: int) -> list[int]:
    """Its living child processes."""
    found = [each for task in Path(f"/proc/{pid}/task").glob("*/children") for each in task.read_text().split()]
    return [int(each) for each in found if alive(int(each))]


def alive(pid: int) -> bool:
    """Whether it runs; one that only waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def kill_all(run: ChaosRun, _event: Event) -> float:
    """Power failure of everything but the broker."""
    for pid in [await run.fleet.living(name) for name in run.fleet.roles]:
        run.fleet.kill(pid)
    return time.time()


async def pause(run: ChaosRun, event: Event) -> float:
    pid = await run.fleet.living(event.target)
    run.fleet.pause(pid)
    await asyncio.sleep(event.lasts_s)
    run.fleet.go_on(pid)
    return time.time()


async def kill_coordinator_around_announcement(run: ChaosRun, _event: Event) -> float:
    """As soon as the trainer has exported a version, that is while its report is on the way to the coordinator."""
    store = run.setting.settings.run.weights_store
    pid = await run.fleet.living("coordinator")
    newest = complete_versions(store)[-1:]
    while complete_versions(store)[-1:] == newest:
        await asyncio.sleep(0.002)
    run.fleet.kill(pid)
    return time.time()


async def zombie_trainer(run: ChaosRun, _event: Event) -> float:
    """The trainer stands still, a replacement starts, the old one wakes up: it must end and say why."""
    zombie = await run.fleet.living("trainer")
    run.fleet.pause(zombie)
    replacement = await run.fleet.start_extra("trainer")
    await run.until(lambda: "trainer ready" in replacement.spec.log_path.read_text(), "replacement", START_S)
    began = run.step()
    await asyncio.sleep(1.0)
    run.fleet.go_on(zombie)
    woken = time.time()
    reason = await asyncio.wait_for(run.fleet.trainer_ended(), END_S)
    run.expected_end = f"ended with code {Superseded.exit_code}"
    if "superseded" not in run.fleet.log_of("trainer").read_text().lower():
        raise FleetFailed(f"the zombie did not say that it was superseded: {reason}; the other was at step {began}")
    ended = await run.fleet.end_of(replacement, END_S)
    if ended.code != 0:
        raise FleetFailed(f"the replacement ended with {ended}")
    return woken


async def kill_grader_beside_instance(run: ChaosRun, event: Event) -> float:
    """While an instance learns from what graders judge."""
    await attach(run)
    return await kill(run, event)


async def kill_instance(run: ChaosRun, _event: Event) -> float:
    """Its trainer: the command starts it again, and it goes on from its newest checkpoint."""
    await attach(run)
    assert run.attached is not None
    (trainer,) = children_of(run.attached.pid)
    run.fleet.pids.add(trainer)
    run.fleet.kill(trainer)
    killed = time.time()
    await run.until(lambda: run.instance_at()[0] > 1, "step of the instance's next lineage", run.patience_s)
    return killed


async def attach(run: ChaosRun) -> None:
    """An instance, which takes a few steps."""
    await run.attach()
    await run.until(lambda: run.instance_at()[1] >= 5, "steps of the instance", run.patience_s)


async def twin_workers(run: ChaosRun, _event: Event) -> float:
    """Two workers under one id: one holds it, the other must end and say why."""
    twins = [await run.fleet.start_extra("worker-0", "--id", "twin") for _ in range(2)]
    ends = {asyncio.create_task(run.fleet.end_of(twin, START_S)): twin for twin in twins}
    done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    loser = next(iter(done))
    if loser.result().code != Superseded.exit_code:
        raise FleetFailed(f"the first to end of two workers of one id ended with {loser.result()}")
    for ending, twin in ends.items():
        if ending is not loser:
            twin.terminate()
    await asyncio.gather(*ends)
    return time.time()


FAULTS = (
    Fault("trainer-kill", kill, ("C1",), ("trainer",)),
    Fault("worker-kill", kill, ("B1",), ("worker-0", "worker-1")),
    Fault("coordinator-kill", kill, (), ("coordinator",)),
    Fault("dispatcher-kill", kill, (), ("dispatcher",)),
    Fault("relay-kill", kill, ("D2",), ("relay",)),
    Fault("all-kill", kill_all),
    Fault("announcement-kill", kill_coordinator_around_announcement, (), ("coordinator",)),
    Fault("trainer-pause", pause, ("C7",), ("trainer",), (1.0, 6.0)),
    Fault("worker-pause", pause, ("B2", "B4"), ("worker-0", "worker-1"), (1.0, 6.0)),
    Fault("coordinator-pause", pause, (), ("coordinator",), (1.0, 5.0)),
    Fault("dispatcher-pause", pause, (), ("dispatcher",), (1.0, 5.0)),
    Fault("relay-pause", pause, (), ("relay",), (1.0, 5.0)),
    Fault("trainer-zombie", zombie_trainer, ("C3",), ("trainer",), mixes=False),
    Fault("trainer-kill-ranks", kill_trainer_of_ranks, ("C1",), ("trainer",), settings=OF_RANKS),
    Fault("rank-kill", kill_rank, ("C1",), ("trainer",), settings=OF_RANKS),
    Fault("grader-kill", kill_grader_beside_instance, ("C10b",), ("grader-0", "grader-1"), settings=OF_GRADERS),
    Fault("instance-kill", kill_instance, ("C11",), ("second",), settings=OF_GRADERS),
    Fault("twin-workers", twin_workers, ("B6",), ("twin",), mixes=False, settings={"training": {"max_steps": 250}}),
)
SECONDARY = tuple(fault for fault in FAULTS if fault.inject is kill)
