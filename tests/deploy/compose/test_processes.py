import json
import shutil
import sys
import time
from pathlib import Path

import pytest

from bus.embedded.node import free_ports
from bus.kafka.settings import KafkaSettings
from consumers.training.checkpoints.catalogue import newest_model
from deploy.images.health import metrics_address
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
    places = {"kafka:19092": bootstrap_servers, "/runs": str(runs), "http://relay": "http://127.0.0.1"}
    ports = {"8800": str(relay), "9400": str(min(metrics, 60_000)), "0.0.0.0": "127.0.0.1"}
    containers = Containers(
        {"STREAMRL_TASK": str(task), "STREAMRL_RUN__NAME": name}, places | ports, logs, Path(sys.executable).parent
    )
    deadline = time.monotonic() + SECONDS
    try:
        containers.start("topics")
        assert containers.ended("topics-1", deadline) == 0
        assert "trajectories" in containers.said("topics-1")
        for service in ("coordinator", "relay", "dispatcher", "trainer"):
            containers.start(service)
        containers.healthy("relay", deadline)
        for number in (1, 2):
            containers.start("worker", number)
        assert containers.ended("trainer-1", deadline) == 0
        assert [containers.ended(ended, deadline) for ended in ("worker-1", "worker-2", "dispatcher-1")] == [0, 0, 0]
        containers.start("tools")
        assert containers.ended("tools-1", deadline) == 0
        assert metrics_address(runs / ".prometheus", "127.0.0.1"), "the relay and the coordinator have left notes"
        assert [containers.stop(stopped, deadline) for stopped in ("coordinator-1", "relay-1")] == [0, 0]
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
