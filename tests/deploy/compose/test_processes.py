import json
import shutil
import sys
import time
from pathlib import Path

import pytest

from bus.embedded.node import free_ports
from bus.kafka.settings import KafkaSettings
from consumers.training.checkpoints.catalogue import newest_model
from settings.run_directory import RunDirectory
from tests.deploy.compose.containers import Containers
from tests.deploy.compose.stack import IMAGES
from tests.pipeline.accounts import read_accounts

pytestmark = [pytest.mark.kafka, pytest.mark.slow]

STEPS, SECONDS = 4, 270.0
SETTINGS = {"max_steps = 200": f"max_steps = {STEPS}", "time_scale = 20.0": "time_scale = 100.0"}


def _task(folder: Path) -> Path:
    """The trial of the images with a few steps only."""
    shutil.copytree(IMAGES / "trial", folder)
    config = folder / "streamrl.toml"
    text = config.read_text()
    for before, after in SETTINGS.items():
        assert before in text
        text = text.replace(before, after)
    config.write_text(text)
    return folder


async def test_every_service_runs_with_the_command_and_environment_of_the_compose_file(
    tmp_path: Path, bootstrap_servers: str
) -> None:
    name, task, runs, logs = "in-containers", _task(tmp_path / "task"), tmp_path / "runs", tmp_path / "logs"
    logs.mkdir()
    relay, metrics = free_ports(2)
    places = {"kafka:19092": bootstrap_servers, "/runs": str(runs), "http://run": "http://127.0.0.1"}
    ports = {"8800": str(relay), "9400": str(min(metrics, 60_000)), "0.0.0.0": "127.0.0.1"}
    containers = Containers(
        {"STREAMRL_TASK": str(task), "STREAMRL_RUN__NAME": name}, places | ports, logs, Path(sys.executable).parent
    )
    deadline = time.monotonic() + SECONDS
    try:
        containers.start("prepare")
        assert containers.ended("prepare-1", deadline) == 0
        assert f"run {name} is ready for its processes" in containers.said("prepare-1")
        for service in ("run", "trainer"):
            containers.start(service)
        for number in (1, 2):
            containers.start("worker", number)
        everybody = ("trainer-1", "worker-1", "worker-2", "run-1")
        assert [containers.ended(ended, deadline) for ended in everybody] == [0, 0, 0, 0]
        containers.start("tools")
        assert containers.ended("tools-1", deadline) == 0
        # A second `up`: nobody trains, and nobody waits.
        again = Containers(containers.variables, containers.replaced, logs / "again", containers.bin)
        again.logs.mkdir()
        for service in ("run", "trainer", "worker"):
            again.start(service)
        for ended in ("run-1", "trainer-1", "worker-1"):
            assert again.ended(ended, deadline) == 0
            assert f"already at step {STEPS} of {STEPS}: nothing to train" in again.said(ended)
    finally:
        containers.remove()
    assert f"run       {name}" in containers.said("tools-1")
    assert not list((runs / ".prometheus").glob("*.json"))
    _check_the_run(RunDirectory(runs / name))
    accounts = await read_accounts(KafkaSettings(bootstrap_servers=bootstrap_servers).bootstrap_servers or "", name)
    assert [report.step for report in accounts.steps] == list(range(1, STEPS + 1))
    assert len(accounts.workers) == 2


def _check_the_run(directory: RunDirectory) -> None:
    steps = [json.loads(line)["step"] for line in directory.metrics.read_text().splitlines()]
    assert steps[-1] == STEPS
    assert newest_model(directory.checkpoints, Path()) == directory.checkpoints / f"step_{STEPS}"
    assert json.loads(directory.summary.read_text())["steps"] == STEPS
    assert directory.report.stat().st_size > 10_000
    logs = sorted(path.stem for path in directory.logs.glob("*.log"))
    assert {"coordinator", "dispatcher", "relay", "trainer"} < set(logs)
    assert len(logs) == 6, "the workers under ids of their own"
