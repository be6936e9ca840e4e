from io import StringIO

from rich.console import Console

from observability.run_state.observer import RunState, lag_by_bucket, live_view, plain_line
from schemas.identifiers import PolicyVersion
from schemas.reports import RecordRef, SkipReason, SkipRecord, StepReport
from tests.coordinator.factories import heartbeat


def report(lineage: int, step: int, *, sent_at: float = 0.0, reward: float = 0.5) -> StepReport:
    return StepReport(
        algorithm="grpo",
        step=step,
        version=PolicyVersion(lineage, step),
        manifest_sha256="0" * 64,
        group_ids=("g",),
        micro_batches=((RecordRef("g/0", 0, step), RecordRef("g/1", 0, step + 100)),),
        metrics={"reward": reward, "kafka/lag/bucket_1": 7, "kafka/lag/bucket_0": 2, "off_policy/mean": 1.5},
        sent_at=sent_at,
    )


def test_a_resumed_trainer_replaces_the_steps_that_were_lost() -> None:
    state = RunState()
    for step in (1, 2, 3):
        state.observe(report(1, step, reward=0.1))
    state.observe(report(2, 2, reward=0.9))
    state.observe(report(1, 4))
    assert [(point.step, point.version.lineage) for point in state.steps] == [(1, 1), (2, 2)]
    assert state.latest("reward") == 0.9


def test_the_first_report_of_a_resumed_trainer_keeps_the_step_it_resumed_from() -> None:
    state = RunState()
    for step in (1, 2, 3):
        state.observe(report(1, step))
    state.observe(report(2, 2).replace(micro_batches=(), group_ids=()))
    assert [point.step for point in state.steps] == [1, 2]


def test_throughput_is_trained_trajectories_over_the_time_between_reports() -> None:
    state = RunState()
    for step in (1, 2, 3):
        state.observe(report(1, step, sent_at=step * 0.5))
    assert state.trajectories_per_s() == 4.0


def test_skips_are_counted_by_reason() -> None:
    state = RunState()
    for reason in (SkipReason.STALE, SkipReason.STALE, SkipReason.POISON):
        state.observe(
            SkipRecord(
                algorithm="grpo",
                reason=reason,
                trajectory_id=None,
                group_id=None,
                partition=0,
                offset=0,
                step=1,
                sent_at=0.0,
            )
        )
    assert state.skips == {"stale": 2, "poison": 1}


def test_silent_and_stopped_workers_are_not_living() -> None:
    state = RunState()
    state.observe(heartbeat("a", sent_at=100.0))
    state.observe(heartbeat("b", sent_at=80.0))
    state.observe(heartbeat("c", sent_at=100.0, state="stopped"))
    assert [beat.worker_id for beat in state.living_workers(now=105.0)] == ["a"]


def test_the_plain_line_names_reward_lag_staleness_and_the_version_of_each_worker() -> None:
    state = RunState()
    state.observe(report(1, 2))
    state.observe(heartbeat("w7", sent_at=100.0))
    line = plain_line(state, 10, 101.0)
    for part in ("step 2/10", "reward 0.500", "staleness 1.5", "b0:2 b1:7", "w7@1-0"):
        assert part in line


def test_before_the_first_step_there_is_no_reward() -> None:
    assert "step 0/10  reward -  " in plain_line(RunState(), 10, 0.0)
    console = Console(width=200, file=StringIO())
    with console.capture() as shown:
        console.print(live_view(RunState(), 10, {}, 0.0))
    assert "step 0/10  reward -  " in shown.get()


def test_lag_is_ordered_by_bucket() -> None:
    assert list(lag_by_bucket({"kafka/lag/bucket_10": 1, "kafka/lag/bucket_2": 3, "reward": 1})) == [2, 10]
