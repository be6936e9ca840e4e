"""Real processes that stand still (SIGSTOP) while another takes their place, and go on (SIGCONT)."""

import asyncio
import os
import signal
import time
from pathlib import Path

from streamrl.bus.port import Outgoing
from streamrl.schemas.control import WeightsReady, WorkerClaimed
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.topics import CONTROL, HEARTBEATS, STEPS
from tests.deploy.local.processes import Processes, processes
from tests.fakes.messages import step_report
from tests.pipeline.local_run import EMULATED
from tests.progress import patience


async def report(run: Processes, number: int) -> None:
    step = step_report(1, number, manifest_sha256="0" * 64)
    publisher = await run.bus.publisher("test")
    await publisher.publish(Outgoing.of(STEPS.full_name(run.settings.run.name), step, key="grpo"))
    await publisher.close()


async def claims(run: Processes) -> list[str]:
    return [message.incarnation for message in await run.read(CONTROL) if isinstance(message, WorkerClaimed)]


async def until_claimed(run: Processes, count: int) -> list[str]:
    async with patience(60):
        while len(found := await claims(run)) < count:
            await asyncio.sleep(0.1)
    return found


async def test_a_worker_that_stood_still_while_another_took_its_id_ends_superseded(
    tmp_path: Path, bootstrap_servers: str
) -> None:
    fencing = {"loop": EMULATED["loop"] | {"heartbeat_timeout_s": 1.6}}  # fences after a second
    async with processes(tmp_path, bootstrap_servers, **(EMULATED | fencing)) as run:
        await run.start("coordinator")
        zombie = await run.start("worker-0")
        (former,) = await until_claimed(run, 1)
        await run.until_log(zombie, "worker ready for weights")
        os.kill(zombie.pid, signal.SIGSTOP)
        stopped_at = time.time()
        successor = await run.start("worker-0")
        _, newest = await until_claimed(run, 2)
        await asyncio.sleep(1.0)
        os.kill(zombie.pid, signal.SIGCONT)
        async with patience(20):
            assert await zombie.process.wait() == 3
        assert "superseded by incarnation" in zombie.last_line()
        after = [beat for beat in await run.read(HEARTBEATS) if beat.incarnation == former]  # type: ignore[attr-defined]
        # It may have waited in the client's queue meanwhile.
        assert all(beat.sent_at <= stopped_at for beat in after), "only what was made before it stood still"  # type: ignore[attr-defined]
        assert successor.process.returncode is None
        assert (await claims(run))[-1] == newest


async def test_a_coordinator_that_stood_still_announces_nothing_over_its_successor(
    tmp_path: Path, bootstrap_servers: str
) -> None:
    async with processes(tmp_path, bootstrap_servers, **EMULATED) as run:
        zombie = await run.start("coordinator")
        await run.until_log(zombie, "coordinator ready")
        await report(run, 1)
        await run.until_log(zombie, "weights announced")
        os.kill(zombie.pid, signal.SIGSTOP)
        successor = await run.start("coordinator")
        await run.until_log(successor, "coordinator ready")
        for number in (2, 3):
            await report(run, number)
        await run.until_log(successor, "version=1-3")
        os.kill(zombie.pid, signal.SIGCONT)
        async with patience(20):
            assert await zombie.process.wait() == 3
        announced = [message.version for message in await run.read(CONTROL) if isinstance(message, WeightsReady)]
        assert announced == sorted(set(announced))
        assert announced[-1] == PolicyVersion(1, 3)
        assert successor.process.returncode is None
