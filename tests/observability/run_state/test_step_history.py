from streamrl.observability.run_state.aggregates import KEPT_STEPS, end_windows
from streamrl.observability.run_state.state import RunState, lag_by_bucket
from streamrl.schemas.reports import RecordRef, SkipReason, SkipRecord, StepReport
from tests.coordinator.factories import heartbeat
from tests.fakes.messages import skip_record, step_report


def report(lineage: int, step: int, *, sent_at: float = 0.0, reward: float = 0.5) -> StepReport:
    lag = {"kafka/lag/bucket_1": 7, "kafka/lag/bucket_0": 2}
    return step_report(
        lineage,
        step,
        manifest_sha256="0" * 64,
        group_ids=("g",),
        micro_batches=((RecordRef("g/0", 0, step), RecordRef("g/1", 0, step + 100)),),
        metrics={"reward": reward, **lag, "off_policy/mean": 1.5},
        sent_at=sent_at,
    )


def test_a_resumed_trainer_replaces_the_steps_that_were_lost() -> None:
    state = RunState("run")
    for step in (1, 2, 3):
        state.observe_message(report(1, step, reward=0.1))
    state.observe_message(report(2, 2, reward=0.9))
    state.observe_message(report(1, 4))
    assert [(entry.step, entry.version.lineage) for entry in state.learning.steps.entries] == [(1, 1), (2, 2)]
    assert state.metrics["reward"] == 0.9


def test_the_first_report_of_a_resumed_trainer_keeps_the_step_it_resumed_from() -> None:
    state = RunState("run")
    for step in (1, 2, 3):
        state.observe_message(report(1, step))
    state.observe_message(report(2, 2).replace(micro_batches=(), group_ids=()))
    assert [entry.step for entry in state.learning.steps.entries] == [1, 2]


def test_throughput_is_trained_trajectories_over_the_time_between_reports() -> None:
    state = RunState("run")
    for step in (1, 2, 3):
        state.observe_message(report(1, step, sent_at=step * 0.5))
    assert state.learning.steps.pace().trajectories_per_s == 4.0
    assert state.learning.steps.pace(2.0).trajectories_per_s == 4.0, "the next step is not overdue yet"
    assert state.learning.steps.pace(4.0).trajectories_per_s == 4 / 3
    assert state.learning.steps.pace(4.0).steps_per_s == 2 / 3


def test_skips_are_counted_by_reason() -> None:
    state = RunState("run")
    for reason in (SkipReason.STALE, SkipReason.STALE, SkipReason.POISON):
        state.observe_message(
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
    assert state.skipped == {"poison": 1, "stale": 2}


def test_silent_and_stopped_workers_are_not_living() -> None:
    state = RunState("run")
    state.observe_message(heartbeat("a", sent_at=100.0))
    state.observe_message(heartbeat("b", sent_at=80.0))
    state.observe_message(heartbeat("c", sent_at=100.0, state="stopped"))
    assert [beat.worker_id for beat in state.living_workers(now=105.0)] == ["a"]


def test_sums_are_over_all_steps_that_were_not_undone() -> None:
    state = RunState("run")
    for step in range(1, KEPT_STEPS + 11):
        state.observe_message(report(1, step, reward=float(step)))
    assert len(state.learning.steps.entries) == KEPT_STEPS
    sums = state.learning.steps.sums()
    assert sums.trajectories == 2 * (KEPT_STEPS + 10)
    assert sums.staleness / sums.trajectories == 1.5
    assert [reward for _, reward in state.learning.steps.first_rewards] == [1.0, 2.0, 3.0, 4.0, 5.0]
    state.observe_message(report(2, KEPT_STEPS + 1, reward=-1.0))
    assert state.learning.steps.sums().trajectories == 2 * (KEPT_STEPS + 1)
    first, last = state.learning.steps.reward_windows()
    assert first == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert last[-2:] == [float(KEPT_STEPS), -1.0]


def test_the_windows_of_first_and_last_rewards_share_no_step() -> None:
    assert end_windows([]) == ([], [])
    assert end_windows([1.0]) == ([], [1.0])
    assert end_windows([1.0, 2.0, 3.0]) == ([1.0], [3.0])
    assert end_windows([float(n) for n in range(9)]) == ([0.0, 1.0, 2.0, 3.0], [5.0, 6.0, 7.0, 8.0])
    assert [len(each) for each in end_windows([0.0] * 40)] == [5, 5]


def test_a_trainer_that_falls_back_to_its_beginning_takes_its_first_rewards_back() -> None:
    state = RunState("run")
    for step in (1, 2, 3):
        state.observe_message(report(1, step, reward=0.1))
    state.observe_message(report(2, 2, reward=0.9))
    assert state.learning.steps.first_rewards == [(1, 0.1), (2, 0.9)]


def test_lag_is_what_the_trainer_has_not_finished_and_what_came_since() -> None:
    state = RunState("run")
    state.trajectories.ends = {0: 4, 1: 0}
    assert state.lag == {0: 4, 1: 0}, "without a step nothing is finished"
    step = report(1, 1)
    state.observe_message(step)
    assert state.lag == {0: 2, 1: 7}, "a trainer that does not say what is finished"
    told = {"kafka/finished/bucket_0": 10, "kafka/finished/bucket_1": 5}
    state.observe_message(report(1, 2).replace(metrics={**step.metrics, **told}))
    assert state.lag == {0: 2, 1: 7}, "ends that are older than the trainer's"
    state.trajectories.ends = {0: 13, 1: 12, 2: 1}
    assert state.lag == {0: 3, 1: 7, 2: 1}


def test_skips_that_a_step_has_reported_are_not_counted_again_and_undone_ones_not_at_all() -> None:
    state = RunState("run")

    def row(lineage: int, sent_at: float) -> SkipRecord:
        return skip_record(step=1, lineage=lineage, sent_at=sent_at)

    step = report(1, 1, sent_at=10.0)
    for message in (row(1, 9.0), row(1, 11.0), step.replace(metrics={**step.metrics, "ledger/skipped/stale": 5.0})):
        state.observe_message(message)
    assert state.skipped == {"stale": 6}
    state.observe_message(report(2, 1, sent_at=20.0).replace(micro_batches=(), group_ids=()))
    assert state.skipped == {"stale": 5}
    state.observe_message(row(1, 21.0))
    state.observe_message(row(2, 21.0))
    assert state.skipped == {"stale": 6}


def test_lag_is_ordered_by_bucket() -> None:
    assert list(lag_by_bucket({"kafka/lag/bucket_10": 1, "kafka/lag/bucket_2": 3, "reward": 1})) == [2, 10]


def test_how_long_a_run_stood_still_says_nothing_of_its_pace() -> None:
    state = RunState("run")
    for step in (1, 2, 3):
        state.observe_message(report(1, step, sent_at=float(step)))
    state.observe_message(report(2, 3, sent_at=500.0).replace(micro_batches=(), group_ids=()))
    state.observe_message(report(2, 4, sent_at=1000.0))
    assert state.learning.steps.pace().steps_per_s == 0.0
    state.observe_message(report(2, 5, sent_at=1002.0))
    assert state.learning.steps.pace().steps_per_s == 0.5
