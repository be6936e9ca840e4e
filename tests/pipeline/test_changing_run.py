"""One run whose processes come and go: a grader, a worker, the leading trainer, and at last all of them.

A long test. Its short representatives:
- ``tests/chaos/stops`` ends every role at any moment, ``tests/chaos/crashing`` kills the trainer at every point;
- ``tests/consumers/standby/test_standby_trainer.py`` has a standby that takes over;
- ``tests/deploy/local/test_resuming.py`` has a command that goes on.
"""

import asyncio
import json
import signal
import subprocess

import pytest

from streamrl.inspection.audit.command import audit_history
from streamrl.inspection.source import open_run
from tests.pipeline.accounts import Accounts, read_accounts
from tests.pipeline.conftest import Start
from tests.pipeline.local_run import CLI, EMULATED, PATIENCE_S, LocalRun, is_alive
from tests.progress import calm_s, patience

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

JUDGE = "tests.pipeline.letter_reward:share_of_a"
GROUPS, SAMPLES = 4, 4
TAKEOVER_S = 10.0
PROCESSES = ("coordinator", "relay", "trainer", "standby-0", "worker-0", "dispatcher", "grader-0", "grader-1")


async def test_a_grader_a_worker_and_the_trainer_go_and_after_ctrl_c_the_same_command_goes_on_and_nothing_is_lost(
    start: Start, bootstrap_servers: str
) -> None:
    run = start(
        "--training.max_steps=100000",
        run={"workers": 1, "standby_trainers": 1},
        rewards={"functions": [JUDGE], "graded": [JUDGE], "graders": 2, "weights": []},
        ingest={"max_unrewarded_share": 1.0},
        **EMULATED,
    )
    await a_killed_grader_loses_nothing(run, bootstrap_servers)
    await a_worker_joins_by_hand_and_leaves(run, bootstrap_servers)
    a_standby_takes_over_within_ten_seconds_and_keeps_the_worker(run)
    steps = after_ctrl_c_the_same_command_goes_on(run, bootstrap_servers)
    accounts = await read_accounts(bootstrap_servers, run.directory.name)
    assert accounts.workers["by-hand"] > 0
    assert_every_record_met_one_fate(accounts, steps)
    report = await asyncio.to_thread(audit_history, open_run(run.directory), None)
    assert report.is_balanced, report.violations
    # Every trained sample went by way of the graders.
    assert report.sampled - report.in_grading >= steps * GROUPS * SAMPLES


async def a_killed_grader_loses_nothing(run: LocalRun, servers: str) -> None:
    run.wait_until(lambda: run.steps() >= 3, "third step")
    run.kill_child("grader-1")
    run.wait_until(lambda: run.steps() >= 14, "steps after the kill")
    accounts = await read_accounts(servers, run.directory.name)
    assert set(accounts.skipped.values()) <= {"duplicate", "group_incomplete"}
    assert_every_record_met_one_fate(accounts, len(accounts.steps))


async def a_worker_joins_by_hand_and_leaves(run: LocalRun, servers: str) -> None:
    config, broker = str(run.directory / "config.resolved.toml"), f"--kafka.bootstrap_servers={servers}"
    by_hand = subprocess.Popen(
        [*CLI, "worker", config, "--id", "by-hand", broker], stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT
    )
    try:
        run.wait_until(lambda: "  2 workers" in run.text(), "worker by hand in the display")
        seen = run.steps()
        run.wait_until(lambda: run.steps() >= seen + 8, "further steps")
        async with patience(PATIENCE_S):
            while not (await read_accounts(servers, run.directory.name)).workers["by-hand"]:
                await asyncio.sleep(0.5)
        by_hand.send_signal(signal.SIGTERM)
        assert by_hand.wait(40) == 128 + signal.SIGTERM
    finally:
        by_hand.kill()
        by_hand.wait()
    left = run.steps()
    run.wait_until(lambda: run.steps() >= left + 4, "steps after the worker by hand left")


def a_standby_takes_over_within_ten_seconds_and_keeps_the_worker(run: LocalRun) -> None:
    leader_log, standby_log = (run.directory / "logs" / f"{name}.log" for name in ("trainer", "standby-0"))
    run.wait_until(lambda: "standing by" in standby_log.read_text(), "standby")
    assert lineage(run) == 1, "the standby left the one that was starting alone"
    worker = run.pid_of("worker-0")
    run.kill_child("trainer")
    killed_at = calm_s()
    run.wait_until(lambda: lineage(run) == 2, "step of the standby")
    took_s = calm_s() - killed_at
    print(f"from SIGKILL of the leader to the standby's first step: {took_s:.1f} s")
    assert took_s < TAKEOVER_S
    # The one that was killed is back, and stands by in its turn.
    run.wait_until(lambda: "standing by" in leader_log.read_text(), "second standby")
    assert run.pid_of("worker-0") == worker


def after_ctrl_c_the_same_command_goes_on(run: LocalRun, servers: str) -> int:
    """The last step."""
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 130, run.text()[-4000:]
    assert not [name for name in PROCESSES if is_alive(run.pid_of(name))]
    assert "Traceback" not in run.text()
    reached, name = run.steps(), run.directory.name
    options = (f"--kafka.bootstrap_servers={servers}", f"--training.max_steps={reached + 4}")
    again = LocalRun.start(run.directory.parent / f"{name}.toml", name, *options)
    try:
        assert again.wait() == 0, again.text()[-4000:]
    finally:
        again.end()
    assert f"continuing from step {reached}; changed: training.max_steps 100000 → {reached + 4}\n" in again.text()
    assert f"steps {reached + 1} to {reached + 4} in " in again.text()
    assert json.loads((run.directory / "summary.json").read_text())["steps"] == reached + 4
    return reached + 4


def assert_every_record_met_one_fate(accounts: Accounts, steps: int) -> None:
    assert [report.step for report in accounts.steps] == list(range(1, steps + 1))
    assert max(accounts.trained.values()) == 1, "a record entered the gradient twice"
    assert len(accounts.trained_ids) == len(set(accounts.trained_ids)), "a trajectory entered the gradient twice"
    assert len(accounts.trained_ids) == steps * GROUPS * SAMPLES
    assert not accounts.trained.keys() - accounts.produced.keys()
    assert sum(len(report.group_ids) for report in accounts.steps) == steps * GROUPS


def lineage(run: LocalRun) -> int:
    return int(max((line["lineage/number"] for line in run.metrics()), default=0))
