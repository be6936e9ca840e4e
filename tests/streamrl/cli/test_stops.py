"""Commands asked to end by SIGTERM: said in a line, an exit code of its own, and nothing left of them."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from streamrl.bus.embedded.runtime import cache_root
from streamrl.deploy.local.supervisor import CRASHED_AT_STOP
from tests.ended_children import handles_sigterm
from tests.pipeline.local_run import EMULATED, LocalRun, write_config
from tests.progress import calm_s

pytestmark = pytest.mark.processes

MARK = "STREAMRL_TEST_MARK"
# The command's own imports; then those of the demo, then of its model's training in a process of its own, and that.
MOMENTS_S = (0.0, 0.3, 1.0, 3.0, 8.0)


def marked(mark: str) -> list[str]:
    """Processes of this machine that were started with the mark in their environment, whoever their parent is."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (place / "environ").read_bytes():
                found.append((place / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:  # it is gone, or not ours
            continue
    return [command for command in found if command]  # a zombie has none


@contextmanager
def demo(folder: Path, *arguments: str) -> Iterator["subprocess.Popen[str]"]:
    """`streamrl demo` in a folder, with a cache that has all that a first start would fetch, and no model.

    It is to be stopped in the block: at its end, that has been reported and nothing is left of the demo.
    """
    cache = folder / "cache"
    cache.mkdir()
    for made in cache_root().glob("*"):
        if made.name != "models":
            (cache / made.name).symlink_to(made)
    mark = f"{os.getpid()}-{time.time_ns()}"
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "streamrl", "demo", *arguments],
        cwd=folder,
        env={**os.environ, "STREAMRL_CACHE": str(cache), MARK: mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
        _, said = process.communicate(timeout=120)
    finally:
        process.kill()
    assert marked(mark) == []
    assert (process.returncode, said) == (128 + signal.SIGTERM, "stopped by SIGTERM\n")
    assert not list(cache.glob("models/.making-*"))
    assert not (folder / "runs").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="who is left is looked up in /proc")
@pytest.mark.parametrize("moment_s", MOMENTS_S)
def test_sigterm_while_the_demo_starts_leaves_no_process_behind(moment_s: float, tmp_path: Path) -> None:
    with demo(tmp_path, "--seed=1") as process:  # the model of seed 0 is shipped
        deadline = calm_s() + 60
        while not handles_sigterm(process.pid):
            assert calm_s() < deadline
            time.sleep(0.005)
        time.sleep(moment_s)
        process.send_signal(signal.SIGTERM)


@pytest.mark.skipif(sys.platform != "linux", reason="who is left is looked up in /proc")
@pytest.mark.parametrize("delay_s", [0.0, 0.5])
def test_sigterm_while_the_broker_of_the_demo_starts_leaves_no_process_and_no_file(
    delay_s: float, tmp_path: Path
) -> None:
    with demo(tmp_path) as process:
        assert process.stdout is not None
        assert any(line.startswith("starting Kafka") for line in process.stdout)
        time.sleep(delay_s)
        process.send_signal(signal.SIGTERM)


CRASHES_AT_ITS_END = """
import atexit, os, signal, sys
def crash():
    if sys.argv[1:2] == ["relay"]:
        os.kill(os.getpid(), signal.SIGSEGV)
atexit.register(crash)  # forks have what their server registered
"""


def test_a_run_that_is_stopped_names_who_crashed_meanwhile(
    tmp_path: Path, bootstrap_servers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The relay dies as it ends; everything else of the stop is as ever."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "sitecustomize.py").write_text(CRASHES_AT_ITS_END)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'code'}:{Path.cwd()}")
    name = f"t{time.time_ns()}"
    endless = {"training": EMULATED["training"] | {"max_steps": 100_000}}
    config = write_config(tmp_path, tmp_path / "model", name, **(EMULATED | endless))
    run = LocalRun.start(config, name, f"--kafka.bootstrap_servers={bootstrap_servers}")
    try:
        run.wait_until(lambda: run.steps() > 0, "a step")
        run.process.send_signal(signal.SIGTERM)
        assert run.wait() == CRASHED_AT_STOP, run.text()[-4000:]
    finally:
        run.process.kill()
        run.process.wait()
    log = run.directory / "logs" / "relay.log"
    assert f"error: relay ended with signal SIGSEGV while it was stopped; its log is {log}" in run.text().splitlines()
    assert "Fatal Python error: Segmentation fault" in log.read_text()
    assert (run.directory / "summary.json").exists()


@pytest.mark.parametrize("wrapped_by", ["carry_out()", "raise_as_ours()"])
def test_a_signal_that_comes_while_a_class_is_made_stops_the_command_too(wrapped_by: str) -> None:
    code = f"""
import os, signal
import streamrl.cli.app as app
from streamrl.schemas.errors import SettingsError
from streamrl.__main__ import main

class Slow:
    def __set_name__(self, owner, name):
        os.kill(os.getpid(), signal.SIGTERM)

def carry_out():
    class Made:
        it = Slow()

def raise_as_ours():
    try:
        carry_out()
    except Exception as error:
        ours = SettingsError("expected a class")
        ours.__cause__ = error
        app._exit_with(ours)

app.main = lambda: {wrapped_by}
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (128 + signal.SIGTERM, "stopped by SIGTERM\n")
