import asyncio
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from deploy.supervisor.child import ChildSpec
from deploy.supervisor.supervisor import Supervisor
from schemas.errors import StreamRLError, UserError

SLEEP = "import time; time.sleep(60)"
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"


def spec(tmp_path: Path, name: str, code: str, *, essential: bool = False, optional: bool = False) -> ChildSpec:
    command = [sys.executable, "-c", code]
    return ChildSpec(name, command, tmp_path / f"{name}.log", essential=essential, optional=optional)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def until_started(supervisor: Supervisor, name: str, *, other_than: int = 0) -> int:
    async with asyncio.timeout(10):
        while name not in supervisor.children or supervisor.children[name].pid == other_than:
            await asyncio.sleep(0.01)
    return supervisor.children[name].pid


async def test_the_run_is_over_when_the_essential_process_ends_well(tmp_path: Path) -> None:
    specs = [spec(tmp_path, "side", SLEEP), spec(tmp_path, "main", "pass", essential=True)]
    supervisor = Supervisor(specs, max_restarts=0, grace_s=5)
    task = asyncio.create_task(supervisor.run(asyncio.Event()))
    side = await until_started(supervisor, "side")
    async with asyncio.timeout(15):
        await task
    assert supervisor.finished.is_set()
    assert not is_alive(side)


async def test_a_killed_process_is_started_again(tmp_path: Path) -> None:
    stop = asyncio.Event()
    supervisor = Supervisor([spec(tmp_path, "side", SLEEP)], max_restarts=3, grace_s=5)
    task = asyncio.create_task(supervisor.run(stop))
    first = await until_started(supervisor, "side")
    os.kill(first, signal.SIGKILL)
    second = await until_started(supervisor, "side", other_than=first)
    assert supervisor.restarts == {"side": 1}
    stop.set()
    await task
    assert not is_alive(second)


async def test_a_user_error_ends_the_run_with_its_last_line(tmp_path: Path) -> None:
    bad = spec(tmp_path, "bad", "print('noise'); print('error: no such model'); raise SystemExit(2)")
    supervisor = Supervisor([spec(tmp_path, "side", SLEEP), bad], max_restarts=3, grace_s=5)
    with pytest.raises(UserError, match="bad ended with code 2: error: no such model"):
        await supervisor.run(asyncio.Event())
    assert not supervisor.children


async def test_a_crash_loop_ends_the_run(tmp_path: Path) -> None:
    supervisor = Supervisor([spec(tmp_path, "bad", "raise SystemExit(1)")], max_restarts=1, grace_s=5)
    with pytest.raises(StreamRLError, match="ended with code 1"):
        await supervisor.run(asyncio.Event())


async def test_an_optional_process_that_cannot_be_kept_alive_does_not_end_the_run(tmp_path: Path) -> None:
    optional = spec(tmp_path, "bad", "raise SystemExit(2)", optional=True)
    main = spec(tmp_path, "main", "import time; time.sleep(1)", essential=True)
    supervisor = Supervisor([optional, main], max_restarts=0, grace_s=5)
    await supervisor.run(asyncio.Event())
    assert supervisor.finished.is_set()


async def test_a_process_that_ignores_sigterm_is_killed_when_the_grace_period_ends(tmp_path: Path) -> None:
    stop = asyncio.Event()
    stubborn = spec(tmp_path, "stubborn", STUBBORN)
    supervisor = Supervisor([stubborn], max_restarts=0, grace_s=0.5)
    task = asyncio.create_task(supervisor.run(stop))
    pid = await until_started(supervisor, "stubborn")
    async with asyncio.timeout(10):
        while "up" not in stubborn.log_path.read_text():
            await asyncio.sleep(0.01)
    began = time.monotonic()
    stop.set()
    await task
    assert 0.4 < time.monotonic() - began < 5
    assert not is_alive(pid)
