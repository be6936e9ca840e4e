"""Processes that join a run by its name alone, next to `streamrl run` with a broker of its own."""

import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from streamrl.bus.embedded.node import free_ports
from tests.command import ended
from tests.pipeline.local_run import CLI, EMULATED, LocalRun, write_config

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

NAME = "joined"


@contextmanager
def process(cwd: Path, *arguments: str) -> Iterator["subprocess.Popen[bytes]"]:
    """A command of a second terminal; its output goes to a file in ``cwd``."""
    with (cwd / f"{arguments[0]}.out").open("wb") as output:
        started = subprocess.Popen([*CLI, *arguments], cwd=cwd, stdout=output, stderr=subprocess.STDOUT)
    try:
        yield started
    finally:
        started.terminate()
        started.wait(60)


def takes_requests(port: int) -> bool:
    """Whether a gateway at this port knows a worker that takes requests."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def test_a_worker_and_a_gateway_join_a_run_by_its_name_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs, elsewhere = tmp_path / "runs", tmp_path / "elsewhere"
    for folder in (runs, elsewhere):
        folder.mkdir()
    monkeypatch.chdir(tmp_path)
    own_port, port = free_ports(2)
    run_settings = {"workers": 1, "directory": "runs"}
    gateway = {"enabled": True, "port": own_port}
    config = write_config(runs, tmp_path / "no-model", NAME, run=run_settings, gateway=gateway, **EMULATED)
    run = LocalRun.start(config, NAME, "--training.max_steps=100000")
    try:
        run.wait_until(lambda: run.steps() >= 1, "first step")
        join = ["--run", NAME, "--id", "by-hand"]
        # The gateway's directory is another one than the run's, whose relative paths do not hold there.
        served = ["--run", str(run.directory), f"--gateway.port={port}"]
        with process(tmp_path, "worker", *join), process(elsewhere, "gateway", *served):
            run.wait_until(lambda: "  2 workers" in run.text(), "worker by hand in the display")
            run.wait_until(lambda: takes_requests(port), "gateway by hand")
        assert not (elsewhere / "runs").exists()
    finally:
        run.end()
    done = ended("worker", *join)
    assert done.returncode == 2
    assert f"expected a running broker of run {NAME}, got none" in done.stderr
    assert f"`streamrl run runs/{NAME}/config.resolved.toml`" in done.stderr
