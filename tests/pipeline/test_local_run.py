"""What `streamrl run` tells and leaves. With a real model and its own broker tests/streamrl/test_api.py runs it."""

import pytest

from tests.command import ended
from tests.pipeline.emulated import EmulatedRun
from tests.pipeline.local_run import is_alive

pytestmark = pytest.mark.timeout(400)

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
    "lag",
    "lag_by_bucket",
}


def test_a_run_ends_well_and_leaves_a_report(emulated_run: EmulatedRun) -> None:
    run, summary = emulated_run, emulated_run.summary()
    assert summary.keys() >= SUMMARY_KEYS
    assert summary["steps"] == 4
    assert summary["trajectories"] == 4 * 8 * 4
    assert summary["staleness_max"] <= 1
    assert [line["step"] for line in run.metrics() if "evaluated" not in line] == [1, 2, 3, 4]
    report = (run.directory / "report.html").read_text()
    assert "Staleness" in report
    assert "http://" not in report.split("</style>")[0]
    assert (run.directory / "checkpoints" / "step_4").exists()
    text = run.text()
    # Which version a worker holds, tests/deploy/local/test_progress.py asks: here it may be shown too early, or gone.
    for part in ("reward", "staleness", "lag ", "workers", "report:"):
        assert part in text
    assert not is_alive(run.pid_of("worker-0"))
    again = ended("run", str(run.config))
    assert again.returncode == 0, again.stderr
    assert f"run {run.directory.name} is already at step 4 of 4: nothing to train; " in again.stdout
    assert run.summary() == summary
