"""`streamrl top` as a process on a real broker: lines, JSON, a real terminal, and what a user can do wrong."""

import asyncio
import fcntl
import json
import os
import pty
import re
import signal
import struct
import sys
import termios

import pytest

from streamrl.bus.kafka.cluster import committed_offsets
from streamrl.inspection.diagnostics.connect import RunConnection
from streamrl.inspection.terminal.command import read_trajectory
from streamrl.schemas.errors import UserError
from streamrl.schemas.topics import TRAJECTORIES
from tests.command import ended
from tests.progress import patience, within

TOP = (sys.executable, "-m", "streamrl", "top")


def named(connection: RunConnection) -> tuple[str, ...]:
    return "--bootstrap-servers", connection.address, "--run", connection.run


def test_one_line_and_nothing_is_committed(living_run: RunConnection) -> None:
    topic = living_run.name_of(TRAJECTORIES)
    before = asyncio.run(committed_offsets(living_run.kafka, {topic}))
    done = ended("top", "--once", *named(living_run))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    line = r"step 5  reward 0\.500 .*lag b0:\d+ b1:\d+ b2:\d+ b3:\d+  workers worker-0@\S+ worker-1@"
    assert re.search(line, done.stdout), done.stdout
    assert asyncio.run(committed_offsets(living_run.kafka, {topic})) == before


async def test_several_may_look_at_once_and_each_interval_is_an_object(living_run: RunConnection) -> None:
    process = [
        await asyncio.create_subprocess_exec(
            *TOP, "--json", "--interval", "0.3", *named(living_run),
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )
        for _ in range(2)
    ]  # fmt: skip
    for each in process:
        assert each.stdout is not None
        found = [json.loads(await within(each.stdout.readline(), 40)) for _ in range(2)]
        assert [one["loop"]["announced"] for one in found] == ["2-5", "2-5"]
        assert found[0]["lag"]["buckets"] == [0, 1, 2, 3]
        assert sum(found[1]["lag"]["lag"]) > 0
        each.terminate()
        assert await within(each.wait(), 15) == 128 + signal.SIGTERM


async def test_a_closed_pipe_ends_the_command_quietly(living_run: RunConnection) -> None:
    command = " ".join((*TOP, "--interval", "0.2", *named(living_run)))
    process = await asyncio.create_subprocess_shell(f"{command} | head -n 1", stderr=asyncio.subprocess.PIPE)
    _, err = await within(process.communicate(), 40)
    assert err == b""


async def test_a_terminal_gets_the_screen_and_q_gives_it_back(living_run: RunConnection) -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 120, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor"}
    process = await asyncio.create_subprocess_exec(
        *TOP, *named(living_run), stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True
    )
    os.close(theirs)
    seen = bytearray()
    loop = asyncio.get_running_loop()

    def read() -> None:
        try:
            seen.extend(os.read(ours, 1 << 16))
        except OSError:
            loop.remove_reader(ours)

    loop.add_reader(ours, read)
    try:
        async with patience(40):
            while not (b"step 5" in seen and b"weights 2-5" in seen and b"bucket 3" in seen):
                await asyncio.sleep(0.05)
            os.write(ours, b"q")
            assert await process.wait() == 0
            while b"\x1b[?1049l" not in seen:
                await asyncio.sleep(0.05)
    finally:
        loop.remove_reader(ours)
        os.close(ours)
        if process.returncode is None:
            process.kill()
    assert b"\x1b[?1049h" in seen
    assert b"Traceback" not in seen


async def test_a_record_is_read_by_its_place(living_run: RunConnection) -> None:
    assert (await read_trajectory(living_run, "0@0")).trajectory_id.startswith("gsm8k/7/0/")
    with pytest.raises(UserError, match="expected a trajectory at 0@99999"):
        await read_trajectory(living_run, "0@99999")


def test_an_unknown_run_is_one_line(living_run: RunConnection) -> None:
    done = ended("top", "--once", "--bootstrap-servers", living_run.address, "--run", "nobody")
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"error: expected the topics of run nobody at \S+, found those of: .*\n", done.stderr)


@pytest.mark.parametrize("arguments", [["--bootstrap-servers", "127.0.0.1:1", "--run", "r"], ["--run", "no/where"],
                                       ["--interval", "0"]])  # fmt: skip
def test_mistakes_are_printed_without_a_traceback(arguments: list[str]) -> None:
    done = ended("top", "--once", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"error: .*\n", done.stderr)
