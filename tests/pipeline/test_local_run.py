"""`streamrl run` on a real broker with real processes. With a real model it runs in tests/streamrl/test_api.py."""

import asyncio
import json
import signal
import subprocess

import pytest

from tests.pipeline.accounts import Accounts, read_accounts
from tests.pipeline.conftest import Start
from tests.pipeline.local_run import CLI, EMULATED, PATIENCE_S, LocalRun, is_alive

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(400)]

SUMMARY_KEYS = {
    "engine",
    "seed",
    "run_seconds",
    "step_seconds",
    "steps",
    "trajectories",
    "trajectories_per_s",
    "tokens_per_s",
    "staleness_mean",
    "staleness_max",
    "trainer_wait_share",
}


def assert_every_record_met_one_fate(accounts: Accounts, *, groups: int) -> None:
    assert max(accounts.trained.values()) == 1, "a record entered the gradient twice"
    assert len(accounts.trained_ids) == len(set(accounts.trained_ids)), "a trajectory entered the gradient twice"
    assert not accounts.trained.keys() - accounts.produced.keys()
    assert sum(len(report.group_ids) for report in accounts.steps) == groups


async def test_a_run_with_its_own_broker_ends_well_and_leaves_a_report(start: Start) -> None:
    run = start(own_broker=True, **EMULATED)
    assert run.wait() == 0, run.text()[-4000:]
    summary = run.summary()
    assert summary.keys() >= SUMMARY_KEYS
    assert summary["steps"] == 12
    assert summary["trajectories"] == 12 * 4 * 4
    assert summary["staleness_max"] <= 3
    assert len(run.metrics()) == 12
    report = (run.directory / "report.html").read_text()
    assert "Staleness" in report
    assert "http://" not in report.split("</style>")[0]
    assert (run.directory / "checkpoints" / "step_12").exists()
    text = run.text()
    # Which version a worker holds, tests/deploy/local/test_progress.py asks: here it may be shown too early, or gone.
    for part in ("reward", "staleness", "lag b0:", "workers ", "report:"):
        assert part in text
    assert not is_alive(run.pid_of("worker-0"))
    again = LocalRun.start(run.directory.parent / f"{run.directory.name}.toml", run.directory.name)
    try:
        assert again.wait() == 0, again.text()[-4000:]
    finally:
        again.end()
    assert again.text().startswith(f"run {run.directory.name} is already at step 12 of 12: nothing to train; ")
    assert run.summary() == summary


async def test_a_worker_joins_by_hand_and_leaves_and_after_ctrl_c_the_same_command_goes_on(
    start: Start, bootstrap_servers: str
) -> None:
    run = start("--training.max_steps=100000", run={"workers": 1}, **EMULATED)
    run.wait_until(lambda: run.steps() >= 1, "first step")
    by_hand = subprocess.Popen(
        [
            *CLI,
            "worker",
            str(run.directory / "config.resolved.toml"),
            "--id",
            "by-hand",
            f"--kafka.bootstrap_servers={bootstrap_servers}",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.STDOUT,
    )
    try:
        run.wait_until(lambda: "by-hand@1-" in run.text(), "worker by hand in the display")
        seen = run.steps()
        run.wait_until(lambda: run.steps() >= seen + 8, "further steps")
        async with asyncio.timeout(PATIENCE_S):
            while not (await read_accounts(bootstrap_servers, run.directory.name)).workers["by-hand"]:
                await asyncio.sleep(0.5)
        by_hand.send_signal(signal.SIGTERM)
        assert by_hand.wait(40) == 0
    finally:
        by_hand.kill()
        by_hand.wait()
    left = run.steps()
    run.wait_until(lambda: run.steps() >= left + 4, "steps after the worker by hand left")
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 130, run.text()[-4000:]
    pids = [run.pid_of(name) for name in ("coordinator", "relay", "trainer", "worker-0", "dispatcher")]
    assert not [pid for pid in pids if is_alive(pid)]
    assert "Traceback" not in run.text()
    reached, name = run.steps(), run.directory.name
    again = LocalRun.start(
        run.directory.parent / f"{name}.toml",
        name,
        f"--kafka.bootstrap_servers={bootstrap_servers}",
        f"--training.max_steps={reached + 4}",
    )
    try:
        assert again.wait() == 0, again.text()[-4000:]
    finally:
        again.end()
    assert f"going on from step {reached}; changed: training.max_steps 100000 → {reached + 4}\n" in again.text()
    assert f"steps {reached + 1} to {reached + 4} in " in again.text()
    accounts = await read_accounts(bootstrap_servers, name)
    assert accounts.workers["by-hand"] > 0
    assert_every_record_met_one_fate(accounts, groups=(reached + 4) * 4)
    assert json.loads((run.directory / "summary.json").read_text())["steps"] == reached + 4
