"""Processes that are forks of one with libraries: they are like processes with a new interpreter, and end with it."""

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from streamrl.deploy.local.forking import MODELS, ForkServer
from streamrl.deploy.local.supervisor import Child, ChildSpec
from streamrl.schemas.import_path import module_command
from tests.progress import within

pytestmark = pytest.mark.processes

CHILD = """
import json, os, signal, sys, threading, time
def told():
    shown = open("/proc/self/cmdline").read().rstrip("\\0").split("\\0")
    usual = {number.name: str(signal.getsignal(number)) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)}
    return {
        "arguments": sys.argv[1:], "name": __name__, "shown": shown, "environment": dict(os.environ), "signals": usual,
        "session": os.getsid(0) == os.getpid(), "files": sorted(map(int, os.listdir("/proc/self/fd")))[:-1],
        "input": sys.stdin.read(), "path": sys.path, "loaded": "xml.dom.minidom" in sys.modules,
    }
match sys.argv[1]:
    case "tell": print(json.dumps(told()))
    case "exit": sys.exit(int(sys.argv[2]))
    case "raise": raise KeyError("no such row")
    case "die": os.kill(os.getpid(), signal.SIGSEGV)
    case "wait": threading.Event().wait()
"""


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module that only new processes find."""
    (tmp_path / "some_child.py").write_text(CHILD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "some_child"


@pytest.fixture
def server(child: str) -> Iterator[ForkServer]:
    with ForkServer(["xml.dom.minidom", "a_module_that_does_not_exist"]) as server:
        yield server


def told(server: ForkServer, child: str, **environment: str) -> dict[str, Any]:
    """What a fork sees of itself."""
    with tempfile.TemporaryFile("w+b") as output:
        command = module_command(child, "tell", "--kafka.acks=all", "two words")
        assert server.run(command, {**os.environ, **environment}, (None, output, output), 60) == 0
        output.seek(0)
        return dict(json.load(output))


def test_a_forked_process_is_like_a_new_one(server: ForkServer, child: str) -> None:
    found = told(server, child, ONLY_HERE="yes")
    assert found["arguments"] == ["tell", "--kafka.acks=all", "two words"]
    assert found["name"] == "__main__"
    assert found["shown"] == module_command(child, *found["arguments"])
    assert found["environment"] == {**os.environ, "ONLY_HERE": "yes"}
    assert found["signals"]["SIGTERM"] == found["signals"]["SIGCHLD"] == str(signal.SIG_DFL)
    # A command that a shell started in the background ignores SIGINT, and so does what it starts.
    told_new = [sys.executable, "-c", "import signal; print(signal.getsignal(signal.SIGINT))"]
    of_new = subprocess.run(told_new, capture_output=True, text=True, check=True).stdout.strip()
    assert found["signals"]["SIGINT"].partition(" at ")[0] == of_new.partition(" at ")[0]
    assert found["session"]
    assert found["files"] == [0, 1, 2]
    assert found["input"] == ""
    assert str(Path.cwd()) not in found["path"]
    assert found["loaded"]


def test_a_fork_of_a_fork_server_is_one_too(server: ForkServer, child: str) -> None:
    with ForkServer(["wave"], server) as second:
        found = told(second, child)
        assert found["shown"] == module_command(child, *found["arguments"])
        assert found["files"] == [0, 1, 2]
        assert found["loaded"]


@pytest.mark.parametrize(
    ("arguments", "code", "line"),
    [
        (["exit", "0"], 0, ""),
        (["exit", "7"], 7, ""),
        (["raise"], 1, "KeyError: 'no such row'"),
        (["die"], -signal.SIGSEGV, ""),
    ],
)
def test_exit_codes_and_tracebacks_are_those_of_an_interpreter(
    server: ForkServer, child: str, arguments: list[str], code: int, line: str
) -> None:
    with tempfile.TemporaryFile("w+b") as output:
        assert server.run(module_command(child, *arguments), os.environ, (None, output, output), 60) == code
        output.seek(0)
        assert (output.read().decode().splitlines() or [""])[-1] == line


def test_a_process_that_runs_too_long_ends_with_its_server(server: ForkServer, child: str) -> None:
    told(server, child)
    with pytest.raises(TimeoutError, match=r"still runs after 0\.2 s"):
        server.run(module_command(child, "wait"), os.environ, (None, None, None), 0.2)
    assert told(server, child)["loaded"]  # another server


def spec_of(server: ForkServer, child: str, scratch: Path, *arguments: str) -> ChildSpec:
    return ChildSpec("some", module_command(child, *arguments), scratch / "some.log", forked_by=server)


async def test_a_supervisor_starts_stops_and_reads_a_forked_child(
    server: ForkServer, child: str, tmp_path: Path
) -> None:
    failed = await Child.start(spec_of(server, child, tmp_path, "raise"))
    assert await failed.process.wait() == 1
    assert failed.last_line() == "KeyError: 'no such row'"
    running = await Child.start(spec_of(server, child, tmp_path, "wait"))
    assert running.process.returncode is None
    running.terminate()
    waiting = running.process.wait(), running.wait_or_kill(time.monotonic() + 60)
    assert [*await within(asyncio.gather(*waiting), 60)] == [-signal.SIGTERM] * 2
    assert running.process.returncode == -signal.SIGTERM


async def test_a_fork_server_takes_its_processes_along(server: ForkServer, child: str, tmp_path: Path) -> None:
    running = await Child.start(spec_of(server, child, tmp_path, "wait"))
    (server_process,) = (each for each in psutil.Process().children() if "forking" in " ".join(each.cmdline()))
    assert psutil.Process(running.pid).ppid() == server_process.pid
    with os.fdopen(os.pidfd_open(running.pid), "rb") as alive:
        server_process.kill()
        assert await within(running.process.wait(), 60) == -signal.SIGKILL
        assert select.select([alive], [], [], 60)[0]
    # The next child gets another server.
    again = await Child.start(spec_of(server, child, tmp_path, "exit", "3"))
    assert await again.process.wait() == 3


def test_a_fork_server_has_one_thread(child: str) -> None:
    """With the libraries of trainers and workers; CUDA is not initialised by their import."""
    with ForkServer([*MODELS]) as server, tempfile.TemporaryFile("w+b") as output:
        code = "import os, sys, torch; ppid = os.getppid(); print(len(os.listdir(f'/proc/{ppid}/task')), "
        code += "torch.cuda.is_initialized(), torch.get_num_threads(), 'transformers' in sys.modules)"
        Path(os.environ["PYTHONPATH"], "some_model.py").write_text(code)
        environment = {**os.environ, "OMP_NUM_THREADS": "3"}
        assert server.run(module_command("some_model"), environment, (None, output, output), 300) == 0
        output.seek(0)
        assert output.read().decode().split() == ["1", "False", "3", "True"]


def test_a_run_prints_its_first_line_before_anything_slow_is_imported() -> None:
    code = "import sys; from streamrl.deploy.local import long_steps; from streamrl.cli.app import main; "
    code += "slow = {'numpy', 'aiokafka', 'torch'}; "
    code += "long_steps.print_at_once = lambda line: sys.exit(f'{line}: {sorted(slow & set(sys.modules))}'); "
    code += "sys.argv[1:] = ['run', 'some.toml']; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr == "loading settings and libraries: []\n"
