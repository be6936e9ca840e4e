"""SIGTERM to each real process of a run under load: it drains and exits with 143 within the grace period.

With a real model, tests/pipeline/test_gateway_run.py ends them.
"""

import asyncio
import json
import os
import signal
import time
from pathlib import Path

import pytest

from streamrl.deploy.local.supervisor import Supervisor
from streamrl.settings.run_directory import RunDirectory
from tests.deploy.local.processes import processes
from tests.ended_children import handles_sigterm
from tests.fakes.waiting import until
from tests.pipeline.local_run import EMULATED
from tests.progress import patience

GRACE_S = 20.0
"""Seconds for each process to drain: twice what a worker waits for its completions."""


def _has_steps(directory: RunDirectory, steps: int) -> bool:
    lines = directory.metrics.read_text().splitlines() if directory.metrics.exists() else []
    return len(lines) >= steps and all(json.loads(line) for line in lines[:steps])


async def test_sigterm_drains_every_process_within_its_grace_period(tmp_path: Path, bootstrap_servers: str) -> None:
    endless = {"training": EMULATED["training"] | {"max_steps": 100_000}}
    async with processes(tmp_path, bootstrap_servers, **(EMULATED | endless)) as run:
        children = {name: await run.start(name) for name in run.specs}
        async with patience(200):
            while not _has_steps(run.directory, 2):
                dead = [name for name, child in children.items() if child.process.returncode is not None]
                assert not dead, {name: children[name].last_line() for name in dead}
                await asyncio.sleep(0.1)
        ended = {}
        for name in ("worker-0", "dispatcher", "trainer", "coordinator", "relay"):
            began = time.monotonic()
            children[name].terminate()
            code = await children[name].wait_or_kill(began + GRACE_S)
            ended[name] = (code, round(time.monotonic() - began, 1))
        print(ended)
        assert {name: code for name, (code, _) in ended.items()} == dict.fromkeys(ended, 128 + signal.SIGTERM), ended


async def test_a_role_that_crashes_leaves_its_stacks_in_its_log_and_is_named(
    tmp_path: Path, bootstrap_servers: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async with processes(tmp_path, bootstrap_servers, **EMULATED) as run:
        relay, stop = run.specs["relay"], asyncio.Event()
        supervisor = Supervisor([relay], max_restarts=3, grace_s=20)
        supervising = asyncio.create_task(supervisor.run(stop))
        await until(lambda: relay.log_path.exists() and bool(relay.log_path.read_text()), timeout_s=60)
        os.kill(supervisor.children["relay"].pid, signal.SIGSEGV)
        await until(lambda: supervisor.restarts == {"relay": 1}, timeout_s=60)
        stop.set()
        await supervising
        said = relay.log_path.read_text()
    assert "Fatal Python error: Segmentation fault" in said
    # "Current thread", or "Thread" where the crash met a thread that waits in C without the interpreter's lock.
    assert "hread 0x" in said
    assert "(most recent call first)" in said
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "process died" in line]
    for part in ("process=relay", "signal SIGSEGV", str(relay.log_path)):
        assert part in line


async def test_a_role_that_still_loads_its_libraries_ends_when_asked(tmp_path: Path, bootstrap_servers: str) -> None:
    async with processes(tmp_path, bootstrap_servers, **EMULATED) as run:
        for moment_s in (0.0, 0.5, 1.2):
            child = await run.start("trainer")
            await until(lambda: handles_sigterm(child.pid), timeout_s=60)  # noqa: B023 - called before the next
            await asyncio.sleep(moment_s)
            child.terminate()
            code = await child.wait_or_kill(time.monotonic() + 20)
            assert (code, child.crash(code)) == (128 + signal.SIGTERM, None), child.spec.log_path.read_text()
            assert "Traceback" not in child.spec.log_path.read_text()
