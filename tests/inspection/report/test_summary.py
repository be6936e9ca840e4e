from typing import Any

import pytest

from streamrl.inspection.report.summary import Summary, build_summary, summary_lines
from streamrl.observability.run_state.state import RunState
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.reports import RecordRef, SkipReason
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


def test_rates_belong_to_the_seconds_next_to_them() -> None:
    summary = summed(20)
    assert summary["step_seconds"] * summary["trajectories_per_s"] == pytest.approx(summary["trajectories"])
    assert summary_lines(summary)[1:4] == [
        "reward: 3.000 → 18.000 (first and last 5 steps)",
        "20 steps in 20 s from the start of its processes to their end; 1280 trajectories trained",
        "128 trajectories/s, 1280 completion tokens/s, start-up excluded (10.0 s of optimizer steps)",
    ]


def test_a_short_run_tells_no_window_twice() -> None:
    assert "reward: 1.500 → 3.500 (first and last 2 steps)" in summary_lines(summed(4))
    assert "reward: 1.000 (one step)" in summary_lines(summed(1))
    evaluated = {step: {"step": step, "eval/pass@1": 0.5} for step in (0, 4)}
    one = summed(4) | {"evaluation": {"versions": 1, "first": evaluated[0], "last": evaluated[0]}}
    assert "pass@1: 0.500 (held out, step 0)" in summary_lines(one)
    two = summed(4) | {"evaluation": {"versions": 2, "first": evaluated[0], "last": evaluated[4]}}
    assert "pass@1: 0.500 → 0.500 (held out, steps 0 and 4)" in summary_lines(two)


def test_a_run_that_went_on_claims_only_the_steps_of_this_start() -> None:
    assert (
        "steps 13 to 20 in 20 s from the start of its processes to their end; 1280 trajectories trained since step 1"
        in summary_lines(summed(20, resumed_from=12))
    )
    assert (
        "no step in 20 s from the start of its processes to their end; 20 steps before, 1280 trajectories trained"
        in summary_lines(summed(20, resumed_from=20))
    )


def test_a_run_ends_with_what_it_sampled_and_did_not_train() -> None:
    state, report = RunState("run"), examples()["step-report"]
    metrics = {"kafka/lag/bucket_0": 4.0, "kafka/finished/bucket_0": 16.0, "kafka/finished/bucket_1": 8.0}
    state.observe_message(report.replace(metrics=metrics, policy=None))
    # Workers published more after the last step: the topic's end counts.
    state.trajectories.ends = {0: 400, 1: 8}
    summary = build_summary(state, engine="e", seed=0, run_seconds=1.0, resumed_from=0, before={}, after={}, restarts=0)
    assert (summary["lag"], summary["lag_by_bucket"]) == (384, {0: 384, 1: 0})
    assert "384 left over: sampled, not trained before the run ended" in summary_lines(summary)
    assert not [line for line in summary_lines(summed(20)) if "left over" in line]


def test_a_run_without_a_step_shows_no_reward() -> None:
    summary = summed(0)
    assert summary["reward_first"] is None
    assert not [line for line in summary_lines(summary) if line.startswith("reward")]


def test_a_run_ends_with_what_it_skipped_and_why() -> None:
    state, row = RunState("run"), examples()["skip"]
    details = [
        (SkipReason.REFUSED, "longer than 127 tokens: prompt d/3: expected a prompt of 1 to 127 tokens, got 300", 1200),
        (SkipReason.REFUSED, "no tokens: prompt d/4: expected a prompt of 1 to 127 tokens, got 0", 30),
        (SkipReason.POISON, "reward exact: ValueError: no answer\n in it", 2),
        (SkipReason.STALE, "expected at most 3 steps of staleness, got 4", 5),
        (SkipReason.ZERO_ADVANTAGE, "all rewards of the group are equal", 500),
    ]
    for reason, detail, count in details:
        for number in range(count):
            state.observe_message(row.replace(reason=reason, detail=detail, trajectory_id=f"d/3/0/{number}"))
    summary = build_summary(state, engine="e", seed=0, run_seconds=1.0, resumed_from=0, before={}, after={}, restarts=0)
    assert summary_lines(summary)[-3:] == [
        "skipped: 2 poison, 1,230 refused, 5 stale (trajectories)",
        "  poison: 2 reward exact; for example d/3/0/0: ValueError: no answer in it",
        "  refused: 1,200 longer than 127 tokens, 30 no tokens; for example prompt d/3: expected a prompt of 1 to 127 "
        "tokens, got 300",
    ]
    assert summary["skip_causes"]["refused"]["counts"] == {"longer than 127 tokens": 1200, "no tokens": 30}
    assert not [line for line in summary_lines(summed(20)) if "skipped" in line]
