"""The services of the compose file as processes, without containers.

A long test; ``test_compose_file.py`` looks at each command, and ``test_engine.py`` has the containers themselves.
"""

import json
import re
import sys
from pathlib import Path

import pytest

from streamrl.bus.embedded.node import free_ports
from streamrl.consumers.training.checkpoints.catalogue import newest_model
from streamrl.settings.run_directory import RunDirectory
from tests.deploy.compose.containers import Containers
from tests.deploy.compose.stack import task_like_the_trial
from tests.pipeline.accounts import Accounts, read_accounts
from tests.progress import calm_s

pytestmark = pytest.mark.long

GROUPS, STEPS, SECONDS = 8, 6, 270.0
PROMPTS = 40
"""Fewer than groups are trained: all of them are met."""
SETTINGS = {
    'path = "prompts.jsonl"': 'path = "own.jsonl"',
    "num_generations = 4\nmax_staleness = 2\nmax_completion_length = 2048": (
        'mode = "stream"\nnum_generations = 1\nmax_completion_length = 20'
    ),
    "max_num_seqs = 32": "max_num_seqs = 32\nmax_model_len = 30",
    "max_steps = 200": f"max_steps = {STEPS}",
    "time_scale = 20.0": "time_scale = 50.0",
}


def _task(folder: Path) -> Path:
    """The trial of the images with a few steps only, in graded groups of one that stream, and one prompt too long."""
    task_like_the_trial(folder, SETTINGS, '[rewards]\nfunctions = ["format"]\ngraded = ["format"]\n')
    rows = [{"prompt": ("long " * 60 if number == 0 else "short ") + str(number)} for number in range(PROMPTS)]
    (folder / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
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
        {"STREAMRL_TASK": str(task), "STREAMRL_RUN__NAME": name, "STREAMRL_REWARDS__GRADERS": "0"},
        places | ports,
        logs,
        Path(sys.executable).parent,
    )
    deadline = calm_s() + SECONDS
    try:
        containers.start("prepare")
        assert containers.ended("prepare-1", deadline) == 0
        assert f"run {name} is ready for its processes" in containers.said("prepare-1")
        for service in ("run", "trainer"):
            containers.start(service)
        for number in (1, 2):
            containers.start("worker", number)
            containers.start("grader", number)
        everybody = ("trainer-1", "worker-1", "worker-2", "grader-1", "grader-2", "run-1")
        assert [containers.ended(ended, deadline) for ended in everybody] == [0] * 6
        containers.start("tools")
        assert containers.ended("tools-1", deadline) == 0
        # A second `up`: nobody trains, and nobody waits.
        again = Containers(containers.variables, containers.replaced, logs / "again", containers.bin)
        again.logs.mkdir()
        for service in ("run", "trainer", "worker", "grader"):
            again.start(service)
        for ended in ("run-1", "trainer-1", "worker-1", "grader-1"):
            assert again.ended(ended, deadline) == 0
            assert f"already at step {STEPS} of {STEPS}: nothing to train" in again.said(ended)
    finally:
        containers.remove()
    assert f"run       {name}" in containers.said("tools-1")
    assert not list((runs / ".prometheus").glob("*.json"))
    _check_the_run(RunDirectory(runs / name))
    graded = [re.search(r"grader ended.* graded=(\d+)", containers.said(f"grader-{number}")) for number in (1, 2)]
    assert sum(int(found[1]) for found in graded if found) >= GROUPS * STEPS
    accounts = await read_accounts(bootstrap_servers, name)
    assert [report.step for report in accounts.steps] == list(range(1, STEPS + 1))
    assert len(accounts.workers) == 2
    _the_prompt_that_cannot_be_sampled_is_skipped_and_told(RunDirectory(runs / name), containers.said("run-1"))
    _the_others_are_trained_by_the_weights_that_sampled_them(accounts)


def _check_the_run(directory: RunDirectory) -> None:
    steps = [json.loads(line)["step"] for line in directory.metrics.read_text().splitlines()]
    assert steps[-1] == STEPS
    assert newest_model(directory.checkpoints, Path()) == directory.checkpoints / f"step_{STEPS}"
    assert json.loads(directory.summary.read_text())["steps"] == STEPS
    assert directory.report.stat().st_size > 10_000
    logs = sorted(path.stem for path in directory.logs.glob("*.log"))
    assert {"coordinator", "dispatcher", "relay", "trainer"} < set(logs)
    assert len(logs) == 8, "workers and graders under ids of their own"


def _the_prompt_that_cannot_be_sampled_is_skipped_and_told(directory: RunDirectory, said: str) -> None:
    summary = json.loads(directory.summary.read_text())
    assert summary["restarts"] == 0
    causes = summary["skip_causes"]["refused"]["counts"]
    assert [*causes] == ["longer than 29 tokens"]
    (count,) = causes.values()
    assert count in (1, 2)
    assert f"skipped: {count} refused (trajectories)" in said
    example = "for example prompt own/1: expected a prompt of 1 to 29"
    assert f"refused: {count} longer than 29 tokens; {example}" in said


def _the_others_are_trained_by_the_weights_that_sampled_them(accounts: Accounts) -> None:
    assert [len(report.group_ids) for report in accounts.steps] == [GROUPS] * STEPS
    assert set(accounts.trained.values()) == {1}
    assert max(report.metrics["off_policy/max"] for report in accounts.steps) == 0
    assert set(accounts.skipped.values()) == {"refused"}
