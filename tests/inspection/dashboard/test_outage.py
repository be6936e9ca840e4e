"""The page outlives the broker of its run: what is told then, and that it goes on once the broker is back."""

import asyncio
import json
import re
import signal
import sys
from pathlib import Path

import aiohttp
import pytest

from streamrl.bus.embedded.cluster import start_cluster
from streamrl.bus.kafka.connection import BUSY
from streamrl.settings.run_directory import RunDirectory
from tests.inspection.living_run import write_run
from tests.progress import patience, within

pytestmark = pytest.mark.processes
OUTAGE_S = 12.0


async def test_an_outage_and_its_end_are_each_reported_once_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    directory = RunDirectory(Path("runs/my-bad"))
    directory.create()
    directory.config.write_text('[run]\nname = "my-bad"\n[model]\npath = "runs"\n[data]\npath = "p.jsonl"\n')
    with start_cluster(directory.kafka, heap_mb=256) as cluster:
        address = cluster.bootstrap_servers
        await write_run(address, "my-bad")
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "streamrl", "ui", "--run", "my-bad", "--no-open", "--port", "0",
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            assert process.stdout is not None
            match = re.search(r"http://\S+/", (await within(process.stdout.readline(), 60)).decode())
            assert match is not None
            async with aiohttp.ClientSession(match[0]) as web, patience(150):
                while json.loads(await (await web.get("/api/snapshot")).text())["loop"]["step"] < 5:
                    await asyncio.sleep(0.1)
                cluster.kill_node(0)
                await asyncio.sleep(OUTAGE_S)
                refused = (await (await web.get("/api/trajectory?id=0@0")).json())["error"]
                await asyncio.to_thread(cluster.restart_node, 0)
                while (await web.get("/api/trajectory?id=0@0")).status != 200:
                    await asyncio.sleep(0.1)
                await asyncio.sleep(OUTAGE_S)
        finally:
            process.send_signal(signal.SIGINT)
            _, said = await within(process.communicate(), 60)
    advice = (
        "if run my-bad has ended, its broker has stopped too: `streamrl kafka up --data-dir runs/my-bad/kafka "
        f"--port {address.rpartition(':')[2]}` starts it again"
    )
    lines = [line for line in said.decode().splitlines() if line]
    assert len(lines) == 2, said.decode()
    begun, ended = lines
    # A command that gets no processor time says so instead: it cannot tell whose silence it is.
    told = (f"does not answer; {advice}", "is not heard; this machine is so busy")
    assert any(f'event="the broker at {address} {words}' in begun for words in told), begun
    assert f'event="the broker at {address} answers again"' in ended
    expected = f"expected the broker at {address} to answer again, got connection refused; "
    assert refused in (f"{expected}{advice}", f"{expected}{BUSY}")
