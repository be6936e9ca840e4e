"""A run whose rewards come from graders, one of which is killed."""

import asyncio
from pathlib import Path

import pytest

from inspection.audit.command import audit_history
from inspection.source import open_run
from tests.broker_fixture import unique_numbers
from tests.pipeline.accounts import read_accounts
from tests.pipeline.local_run import EMULATED, LocalRun, write_config

pytestmark = [pytest.mark.kafka]
_numbers = unique_numbers()


def test_a_killed_grader_loses_nothing_and_nothing_is_graded_twice_into_training(
    tmp_path: Path, bootstrap_servers: str
) -> None:
    name, judge = f"graded-{next(_numbers)}", "tests.pipeline.letter_reward:share_of_a"
    sections = EMULATED | {
        "kafka": {"bootstrap_servers": bootstrap_servers},
        "rewards": {"functions": [judge], "graded": [judge], "graders": 2, "weights": []},
        "training": {"backend": "emulated", "max_steps": 14, "checkpoint_every": 4},
        "ingest": {"max_unrewarded_share": 1.0},
    }
    run = LocalRun.start(write_config(tmp_path, tmp_path / "none", name, **sections), name)
    try:
        run.wait_until(lambda: run.steps() >= 3, "third step")
        run.kill_child("grader-1")
        assert run.wait() == 0, run.text()[-4000:]
    finally:
        run.end()
    report = audit_history(open_run(run.directory), None)
    assert report.is_balanced, report.violations
    accounts = asyncio.run(read_accounts(bootstrap_servers, name))
    assert len(accounts.trained_ids) == len(set(accounts.trained_ids)) == 14 * 16
    # Every trained sample went by way of the graders.
    assert report.sampled - report.in_grading >= 14 * 16
    assert set(accounts.skipped.values()) <= {"duplicate", "group_incomplete"}
