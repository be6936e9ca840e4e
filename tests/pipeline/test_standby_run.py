"""The leading trainer of a run is killed while another stands by."""

import time

import pytest

from tests.pipeline.accounts import read_accounts
from tests.pipeline.conftest import Start
from tests.pipeline.local_run import EMULATED, LocalRun

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(400)]

TAKEOVER_S = 10.0


def lineage(run: LocalRun) -> int:
    return int(max((line["lineage/number"] for line in run.metrics()), default=0))


async def test_a_standby_takes_over_within_ten_seconds_and_keeps_the_workers(
    start: Start, bootstrap_servers: str
) -> None:
    run = start("--training.max_steps=400", run={"workers": 1, "standby_trainers": 1}, **EMULATED)
    standby_log = run.directory / "logs" / "standby-0.log"
    run.wait_until(lambda: run.steps() >= 8 and "standing by" in standby_log.read_text(), "leader and standby")
    assert lineage(run) == 1, "the standby left the one that was starting alone"
    worker = run.pid_of("worker-0")
    run.kill_child("trainer")
    killed_at = time.monotonic()
    run.wait_until(lambda: lineage(run) == 2, "step of the standby")
    took_s = time.monotonic() - killed_at
    print(f"from SIGKILL of the leader to the standby's first step: {took_s:.1f} s")
    assert took_s < TAKEOVER_S
    # The one that was killed is back, and stands by in its turn.
    leader_log = run.directory / "logs" / "trainer.log"
    run.wait_until(lambda: "standing by" in leader_log.read_text(), "second standby")
    assert run.pid_of("worker-0") == worker
    run.end()
    accounts = await read_accounts(bootstrap_servers, run.directory.name)
    assert max(accounts.trained.values()) == 1
    assert [report.step for report in accounts.steps] == list(range(1, len(accounts.steps) + 1))
