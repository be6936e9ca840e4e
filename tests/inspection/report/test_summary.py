from typing import Any

import pytest

from inspection.report.summary import Summary, build_summary, summary_lines
from observability.run_state.state import RunState
from schemas.identifiers import PolicyVersion
from schemas.reports import RecordRef
from tests.schemas.examples import examples


def summed(steps: int, **options: Any) -> Summary:
    """Of steps of half a second and 64 trajectories, whose reward is the step's number."""
    state, report = RunState("run"), examples()["step-report"].replace(finished=False)
    for step in range(1, steps + 1):
        refs = tuple(RecordRef("t", 0, 64 * step + row) for row in range(64))
        metrics = {"time/step": 0.5, "completions/num_tokens": 640.0, "reward": float(step)}
        changes = {"step": step, "version": PolicyVersion(1, step), "sent_at": float(step)}
        state.observe_message(report.replace(micro_batches=(refs,), metrics=metrics, **changes))
    given: dict[str, Any] = {"engine": "e", "seed": 0, "before": {}, "after": {}, "restarts": 0}
    return build_summary(state, **given | {"run_seconds": 20.4, "resumed_from": 0} | options)


def test_the_rates_are_those_of_the_seconds_beside_them() -> None:
    summary = summed(20)
    assert summary["step_seconds"] * summary["trajectories_per_s"] == pytest.approx(summary["trajectories"])
    assert summary_lines(summary)[1:4] == [
        "reward: 3.000 → 18.000 (first and last 5 steps)",
        "20 steps in 20 s, start and end included; 1280 trajectories trained",
        "128 trajectories/s, 1280 completion tokens/s once running (10.0 s of optimizer steps)",
    ]


def test_a_run_that_went_on_claims_only_the_steps_of_this_start() -> None:
    assert "steps 13 to 20 in 20 s, start and end included; 1280 trajectories trained since step 1" in summary_lines(
        summed(20, resumed_from=12)
    )
    assert "no step in 20 s, start and end included; 20 steps before, 1280 trajectories trained" in summary_lines(
        summed(20, resumed_from=20)
    )


def test_a_run_without_a_step_tells_no_reward() -> None:
    summary = summed(0)
    assert summary["reward_first"] is None
    assert not [line for line in summary_lines(summary) if line.startswith("reward")]
