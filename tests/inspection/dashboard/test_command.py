import asyncio
import json
import re
import signal
import socket
import sys

import aiohttp
import pytest

from streamrl.bus.kafka.cluster import committed_offsets
from streamrl.inspection.diagnostics.connect import RunConnection
from streamrl.schemas.topics import TRAJECTORIES
from tests.command import ended
from tests.progress import patience, within

UI = (sys.executable, "-m", "streamrl", "ui")


async def test_a_running_broker_is_shown_and_left_as_it_is(living_run: RunConnection) -> None:
    topic = living_run.name_of(TRAJECTORIES)
    before = await committed_offsets(living_run.kafka, {topic})
    process = await asyncio.create_subprocess_exec(
        *UI, "--no-open", "--port", "0", "--bootstrap-servers", living_run.address, "--run", living_run.run,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        line = (await within(process.stdout.readline(), 30)).decode()
        match = re.search(r"http://127\.0\.0\.1:\d+/", line)
        assert match, line
        async with aiohttp.ClientSession(match[0]) as web, patience(30):
            while True:
                found = json.loads(await (await web.get("/api/snapshot")).text())
                if found["loop"]["step"] == 5 and sum(found["lag"]["lag"]) == 25:  # as committed, not as reported
                    break
                await asyncio.sleep(0.1)
            life = await (await web.get("/api/trajectory?id=0@0")).json()
        assert found["loop"]["announced"] == "2-5"
        assert [each["id"] for each in found["workers"]] == ["worker-0", "worker-1"]
        assert life["id"].startswith("gsm8k/7/0/")
    finally:
        process.send_signal(signal.SIGINT)
        assert await within(process.wait(), 15) == 0
    assert await committed_offsets(living_run.kafka, {topic}) == before


async def test_a_port_that_is_taken_is_one_line(living_run: RunConnection) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        process = await asyncio.create_subprocess_exec(
            *UI, "--no-open", "--port", port, "--bootstrap-servers", living_run.address, "--run", living_run.run,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        _, told = await within(process.communicate(), 100)
    assert process.returncode == 2
    assert re.match(r"error: expected to listen at 127\.0\.0\.1:\d+.*--port", told.decode().strip().splitlines()[-1])


@pytest.mark.parametrize("arguments", [["--port", "70000"], ["--run", "no/where"]])
def test_mistakes_are_printed_without_a_traceback(arguments: list[str]) -> None:
    done = ended("ui", "--no-open", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"error: .*\n", done.stderr)
