"""The live view before a run: it has the terminal to itself, and gives it back when it or the run ends."""

import asyncio
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from streamrl.deploy.local.watching import LOG, watch
from streamrl.inspection.diagnostics.connect import RunConnection
from streamrl.settings.loading import as_toml, load_settings
from streamrl.settings.run_directory import RunDirectory
from tests.inspection.living_run import RUN
from tests.progress import within

WATCHING = """
import asyncio, signal, sys
from pathlib import Path
from streamrl.settings.run_directory import RunDirectory
from streamrl.deploy.local.watching import watch

async def progress(stop):
    await asyncio.sleep(0.2)
    print("progress, stopped:", stop.is_set())

async def main():
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, stop.set)
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, print, "printed meanwhile")
    await watch(RunDirectory(Path(sys.argv[1])), sys.argv[2], {}, progress, stop)

asyncio.run(main())
"""


async def on_a_terminal(directory: Path, address: str, keys: bytes | None = None) -> bytes:
    """What is shown. Once there is a view, ``keys`` are pressed; where there are none, the run prints and ends."""
    ours, theirs = pty.openpty()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", WATCHING, str(directory), address,
        stdin=theirs, stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "xterm-256color"},
        start_new_session=True,
    )  # fmt: skip
    os.close(theirs)
    seen, loop = bytearray(), asyncio.get_running_loop()
    is_shown, over = asyncio.Event(), asyncio.Event()

    def read() -> None:
        try:
            seen.extend(os.read(ours, 1 << 16))
            if b"Loop" in seen and not is_shown.is_set():
                is_shown.set()
                if keys is not None:
                    os.write(ours, keys)
                else:
                    process.send_signal(signal.SIGUSR1)
                    loop.call_later(0.5, process.send_signal, signal.SIGINT)
        except OSError:
            loop.remove_reader(ours)
            over.set()

    loop.add_reader(ours, read)
    try:
        assert await within(process.wait(), 60) == 0
        await within(over.wait(), 5)
    finally:
        loop.remove_reader(ours)
        os.close(ours)
    return bytes(seen)


def _directory_of_the_run(folder: Path) -> RunDirectory:
    directory = RunDirectory(folder / "run")
    directory.create()
    given = [
        f"--run.name={RUN}",
        "--data.dataset=gcd",
        "--training.backend=emulated",
        "--generation.engine=emulated",
    ]
    directory.config.write_text(as_toml(load_settings(None, given)))
    return directory


async def test_the_view_has_the_terminal_until_the_run_ends(living_run: RunConnection, tmp_path: Path) -> None:
    directory = _directory_of_the_run(tmp_path)
    seen = await on_a_terminal(directory.path, living_run.address)
    opened, closed = seen.find(b"\x1b[?1049h"), seen.find(b"\x1b[?1049l")
    assert 0 <= opened < closed < seen.find(b"progress, stopped: True"), seen[-2000:]
    assert b"printed meanwhile" not in seen
    assert "printed meanwhile" in (directory.logs / LOG).read_text()


@pytest.mark.parametrize(("key", "stopped"), [(b"q", False), (b"\x03", True)])
async def test_q_leaves_the_view_and_ctrl_c_stops_the_run(
    living_run: RunConnection, tmp_path: Path, key: bytes, stopped: bool
) -> None:
    seen = await on_a_terminal(_directory_of_the_run(tmp_path).path, living_run.address, key)
    assert f"progress, stopped: {stopped}".encode() in seen, seen[-2000:]


@pytest.mark.processes
async def test_a_view_that_cannot_be_shown_leaves_the_run_its_progress(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    directory.create()
    seen = await on_a_terminal(tmp_path, "127.0.0.1:1")
    assert b"progress, stopped: False" in seen


async def test_without_a_terminal_there_is_the_run_s_progress_alone(tmp_path: Path) -> None:
    shown = []

    async def progress(stop: asyncio.Event) -> None:
        shown.append(stop)

    stop = asyncio.Event()
    await watch(RunDirectory(tmp_path), "127.0.0.1:1", {}, progress, stop)
    assert shown == [stop]


@pytest.mark.processes
def test_output_goes_to_the_file_inside_the_block_only(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from streamrl.deploy.local.watching import output_to_file\n"
        "print('before')\n"
        "with output_to_file(Path(sys.argv[1])): print('within')\n"
        "print('after')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "log")], capture_output=True, text=True, check=True
    )
    assert done.stdout == "before\nafter\n"
    assert (tmp_path / "log").read_text() == "within\n"
