"""SIGTERM to each real process of a run under load: it drains and exits with 143 within the grace period.

With a real model, tests/pipeline/test_gateway_run.py ends them.
"""

import asyncio
import json
import signal
import time
from pathlib import Path

import pytest

from settings.run_directory import RunDirectory
from tests.deploy.local.processes import processes
from tests.pipeline.local_run import EMULATED

pytestmark = [pytest.mark.kafka, pytest.mark.slow]


def _has_steps(directory: RunDirectory, steps: int) -> bool:
    lines = directory.metrics.read_text().splitlines() if directory.metrics.exists() else []
    return len(lines) >= steps and all(json.loads(line) for line in lines[:steps])


async def test_sigterm_drains_every_process_within_its_grace_period(tmp_path: Path, bootstrap_servers: str) -> None:
    endless = {"training": EMULATED["training"] | {"max_steps": 100_000}}
    async with processes(tmp_path, bootstrap_servers, **(EMULATED | endless)) as run:
        children = {name: await run.start(name) for name in run.specs}
        async with asyncio.timeout(200):
            while not _has_steps(run.directory, 2):
                dead = [name for name, child in children.items() if child.process.returncode is not None]
                assert not dead, {name: children[name].last_line() for name in dead}
                await asyncio.sleep(0.1)
        ended = {}
        for name in ("worker-0", "dispatcher", "trainer", "coordinator", "relay"):
            began = time.monotonic()
            children[name].terminate()
            code = await children[name].wait_or_kill(began + run.settings.run.shutdown_grace_s)
            ended[name] = (code, round(time.monotonic() - began, 1))
        print(ended)
        assert {name: code for name, (code, _) in ended.items()} == dict.fromkeys(ended, 128 + signal.SIGTERM), ended
