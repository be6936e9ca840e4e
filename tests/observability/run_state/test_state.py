import itertools

import pytest

from streamrl.bus.port import Record
from streamrl.observability.run_state.skips import CAUSES_HELD, EXAMPLE_LIMIT
from streamrl.observability.run_state.snapshot import snapshot
from streamrl.observability.run_state.state import (
    AWAY_S,
    CURVES,
    FLAT_STEPS,
    SHOWN_OF_GROUP,
    SHOWN_TRAJECTORIES,
    TRAINER,
    WORKERS_HELD,
    RunState,
)
from streamrl.schemas.control import RunFinished
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.reports import RecordRef, SkipReason, StepReport, WorkerState
from streamrl.schemas.starts import ChangedValue, RunStart
from streamrl.schemas.topics import TRAJECTORIES
from tests.observability.run_state.made_up_run import MadeUpRun
from tests.observability.run_state.writing import append, append_letters, paused, topics_of
from tests.schemas.examples import examples

RUN, BEGIN = "made-up", 1_795_000_000.0


def records(seconds: float) -> list[Record]:
    bus = topics_of(RUN)
    for happening in itertools.takewhile(lambda each: each.at < BEGIN + seconds, MadeUpRun(BEGIN).happenings()):
        append(bus, RUN, happening)
    append_letters(bus, RUN, BEGIN + seconds)
    logs = [record for log in bus.logs.values() for partition in log.partitions for record in partition]
    return sorted(logs, key=lambda record: record.timestamp)


def test_a_run_is_folded_into_what_a_display_needs() -> None:
    state = RunState(RUN)
    for record in records(40.0):
        state.observe_record(record)
    shown = snapshot(state, BEGIN + 40.0)
    loop = shown["loop"]
    assert loop["health"] == "running"
    assert loop["workers"] == 6
    assert loop["step"] == state.learning.curves.columns()["step"][-1]
    assert loop["sampled_per_s"] == pytest.approx(20, rel=0.5)
    assert loop["dead_letters"] == 2
    assert [each["name"] for each in shown["timeline"]][:3] == ["trainer", "coordinator", "worker-0"]
    assert any(kind == "adopt" for lane in shown["timeline"] for _, kind, _ in lane["marks"])
    assert sum(count for _, count in shown["staleness"]["counts"]) == pytest.approx(64 * loop["step"])
    assert 0.5 < shown["lengths"]["close"] < 1
    assert len(shown["trajectories"]) == SHOWN_TRAJECTORIES
    assert all(lane["stretches"] == sorted(lane["stretches"]) for lane in shown["timeline"])


def test_every_trajectory_is_counted() -> None:
    one_by_one, at_once = RunState(RUN), RunState(RUN)
    came = records(120.0)
    for record in came:
        one_by_one.observe_record(record)
    for begin in range(0, len(came), 1000):
        at_once.observe_records(came[begin : begin + 1000])
    exact, told = one_by_one.processes.rates, at_once.processes.rates
    assert exact["sampled"].total > 2000
    assert told["sampled"].total == exact["sampled"].total
    assert sum(at_once.trajectories.buckets.values()) == sum(one_by_one.trajectories.buckets.values())
    assert at_once.trajectories.calibration.close_share == pytest.approx(
        one_by_one.trajectories.calibration.close_share or 0, abs=0.1
    )
    assert list(at_once.trajectories.last) == list(one_by_one.trajectories.last)
    assert at_once.progress.step == one_by_one.progress.step


def test_a_list_begins_with_trajectories_whose_fate_is_known_and_has_few_of_a_group() -> None:
    state = RunState(RUN)
    bus = topics_of(RUN)
    written = (each for each in MadeUpRun(BEGIN).happenings() if each.topic is TRAJECTORIES)
    for happening in itertools.islice(written, 200):
        append(bus, RUN, happening)
    for partition in bus.log(f"{RUN}.{TRAJECTORIES.name}").partitions:
        for record in partition:
            state.observe_record(record)
    assert all(row["fate"] == "waiting" for row in snapshot(state, BEGIN)["trajectories"])
    group = list(state.trajectories.undecided.values())[:8]
    for summary in group:
        summary = state.trajectories.undecided[summary.partition, summary.offset] = summary._replace(group_id="g")
        skipped = examples()["skip"].model_copy(update={"partition": summary.partition, "offset": summary.offset})
        state.observe_message(skipped)
    listed = state.trajectories.listed()
    assert len(listed) == len(set(listed)) == SHOWN_TRAJECTORIES
    assert [each.group_id for each in listed].count("g") == SHOWN_OF_GROUP
    assert {each.group_id for each in listed[:SHOWN_OF_GROUP]} == {"g"}
    assert listed[SHOWN_OF_GROUP] == state.trajectories.last[-1]


def marks_of(state: RunState) -> list[tuple[int, str]]:
    return [(step, kind) for step, _, kind, _ in snapshot(state, BEGIN)["curves"]["marks"]]


def reported(step: int, lineage: int, at: float) -> StepReport:
    report = examples()["step-report"]
    assert isinstance(report, StepReport)
    return report.replace(
        step=step, version=PolicyVersion(lineage, step), sent_at=BEGIN + at, finished=False, policy=None
    )


def test_restarts_and_a_resumed_run_are_marked_in_the_curves() -> None:
    state, beat = RunState(RUN), examples()["heartbeat"].replace(sent_at=BEGIN)
    state.observe_message(reported(5, 1, 0.0))
    for number, incarnation in enumerate(("a", "a", "b")):
        state.observe_message(beat.replace(incarnation=incarnation, sent_at=BEGIN + number))
    # One that had left, and one of a resumed run, were not lost.
    state.observe_message(beat.replace(incarnation="b", state=WorkerState.STOPPED, sent_at=BEGIN + 3))
    state.observe_message(beat.replace(incarnation="c", sent_at=BEGIN + 4))
    state.observe_message(reported(4, 2, 20.0))
    state.processes.starts = (
        RunStart(at=BEGIN - 9.0, step=0),
        RunStart(at=BEGIN + 29.0, step=4),
        RunStart(at=BEGIN + 49.0, step=4, changed=(ChangedValue("a.b", "1", "2"),)),
    )
    state.observe_message(reported(4, 3, 40.0))
    state.observe_message(reported(4, 4, 60.0))
    state.observe_message(beat.replace(incarnation="d", sent_at=BEGIN + 61))
    assert marks_of(state) == [(5, "restart"), (4, "restart"), (4, "resumed"), (4, "settings")]
    assert state.log.events[-2].text == "resumed from step 4; changed: a.b 1 → 2"
    assert state.log.events[-1].text.endswith("joined again")


def test_a_finished_run_shows_what_was_and_no_worker_that_warns() -> None:
    state = RunState(RUN)
    for record in records(40.0):
        state.observe_record(record)
    state.observe_message(RunFinished(sequence=9, sent_at=BEGIN + 40.0, step=state.progress.step))
    shown = snapshot(state, BEGIN + 500.0)
    assert shown["loop"]["over"]
    assert {row["state"] for row in shown["workers"]} == {"stopped"}
    assert {row["tokens_per_s"] for row in shown["workers"]} == {0}
    assert shown["loop"]["step_at"] == state.progress.step_at
    assert shown["loop"]["whole"]["trajectories"] == 64 * state.progress.step


def test_a_display_speaks_of_the_moment_until_which_the_run_is_known() -> None:
    state = RunState(RUN)
    assert state.known_until(BEGIN) == BEGIN
    state.read_at = BEGIN
    assert state.known_until(BEGIN + 4) == BEGIN
    assert state.known_until(BEGIN - 1) == BEGIN - 1
    assert state.known_until(BEGIN + AWAY_S + 1) == BEGIN + AWAY_S + 1


def test_the_state_stays_bounded() -> None:
    state = RunState(RUN)
    beat, report = examples()["heartbeat"], examples()["step-report"]
    for index in range(2000):
        state.observe_message(beat.replace(worker_id=f"worker-{index}", sent_at=BEGIN + index))
        refs = tuple(RecordRef("t", 0, 100 * index + row) for row in range(50))
        changes = {"step": index + 1, "version": PolicyVersion(2, index + 5), "sent_at": BEGIN + index}
        changes["metrics"] = {f"rewards/r{number}/mean": 1.0 for number in range(20)}
        state.observe_message(report.replace(micro_batches=(refs,), finished=False, **changes))
    assert len(state.processes.workers) == WORKERS_HELD
    assert len(state.processes.tracks) <= WORKERS_HELD + 2
    assert len(state.learning.curves.rows) <= state.learning.curves.most + 1
    assert len(state.trajectories.fates.fates) <= 20_000
    assert set(state.learning.curves.columns()) == {
        "step",
        *CURVES,
        *(f"rewards/r{number}/mean" for number in range(8)),
    }


def test_repeated_steps_replace_older_ones() -> None:
    state, report = RunState(RUN), examples()["step-report"]
    for lineage, step in ((1, 1), (1, 2), (1, 3), (2, 2)):
        changes = {"step": step, "version": PolicyVersion(lineage, step), "metrics": {"reward": lineage + step / 10}}
        state.observe_message(report.replace(finished=False, sent_at=BEGIN + step, **changes))
    state.observe_message(report.replace(step=3, version=PolicyVersion(1, 3), finished=False))
    assert state.learning.curves.columns()["reward"] == [1.1, 2.2]
    assert state.progress.version == PolicyVersion(2, 2)
    assert "a new trainer continues" in state.log.events[-1].text


def test_a_step_is_drawn_as_its_phases() -> None:
    state, report = RunState(RUN), examples()["step-report"]
    metrics = {"time/wait_for_batch": 1.0, "time/forward_backward": 2.0, "time/optimizer": 0.5}
    state.observe_message(report.replace(metrics=metrics, finished=False, sent_at=BEGIN))
    kinds = [(round(s.start - BEGIN, 3), s.kind) for s in state.processes.tracks[TRAINER].intervals]
    assert kinds == [(-3.5, "wait"), (-2.5, "train"), (-0.5, "optimizer")]


def test_health_follows_what_is_heard() -> None:
    state = RunState(RUN)

    def health(now: float) -> str:
        return str(snapshot(state, now)["loop"]["health"])

    assert health(BEGIN) == "starting"
    state.observe_message(examples()["step-report"].replace(finished=False, sent_at=BEGIN))
    assert health(BEGIN + 1) == "running"
    assert health(BEGIN + 100) == "stalled"
    state.observe_message(paused(BEGIN, "pause").message)
    assert health(BEGIN + 1) == "paused"
    state.observe_message(paused(BEGIN, "run").message)
    state.observe_message(RunFinished(sequence=9, sent_at=BEGIN, step=4, reason="max_steps"))
    assert health(BEGIN + 1) == "finished"


def test_a_silent_worker_is_reported_once_and_again_when_it_returns() -> None:
    state, beat = RunState(RUN), examples()["heartbeat"].replace(sent_at=BEGIN, state=WorkerState.READY)
    state.observe_message(beat)
    for later in (5.0, 11.0, 12.0):
        state.tick(BEGIN + later)
    assert [event.text for event in state.log.events if "silent" in event.text] == [
        "worker-1 is silent: no heartbeat for 10 s"
    ]
    assert snapshot(state, BEGIN + 12)["workers"][0]["state"] == "silent"
    state.observe_message(beat.replace(sent_at=BEGIN + 20))
    assert state.log.events[-1].text == "worker-1 is heard again"


def test_records_that_do_not_decode_are_passed_over() -> None:
    state = RunState(RUN)
    for topic in ("trajectories", "steps", "heartbeats", "skips", "control"):
        state.observe_record(Record(f"{RUN}.{topic}", 0, 0, None, b"rubbish", (), BEGIN))
    assert snapshot(state, BEGIN)["loop"]["health"] == "starting"


def test_skips_are_counted_by_reason_and_ranges_count_whole() -> None:
    state, row = RunState(RUN), examples()["skip"]
    state.observe_message(row)
    state.observe_message(row.replace(reason="retention_expired", offset=20, end_offset=120))
    assert state.skipped == {"stale": 1, "retention_expired": 100}
    assert state.trajectories.fates.of((3, 12)) == "skipped: stale"


def test_a_run_whose_trajectories_are_all_skipped_says_why_it_takes_no_step() -> None:
    state, report, skip = RunState(RUN), examples()["step-report"], examples()["skip"]
    assert isinstance(report, StepReport)
    report = report.replace(sent_at=BEGIN, policy=None, finished=False)
    state.observe_message(report)
    equal = {"reason": SkipReason.ZERO_ADVANTAGE, "detail": "all rewards of the group are equal: 0", "policy": None}
    for offset in range(99):
        state.observe_message(skip.replace(offset=offset, sent_at=BEGIN, group_id=f"p/{offset}/0", **equal))
    assert state.warning(BEGIN + 11) is None
    state.observe_message(skip.replace(offset=99, sent_at=BEGIN, group_id="p/99/0", **equal))
    assert state.warning(BEGIN + 9) is None
    assert state.warning(BEGIN + 11) == (
        "no step for 11 s, trajectories skipped since: 100 zero advantage; "
        "p/99/0: all rewards of the group are equal: 0"
    )
    state.tick(BEGIN + 11)
    state.tick(BEGIN + 12)
    assert [event.level for event in state.log.events].count("bad") == 1
    following = PolicyVersion(report.version.lineage, report.version.number + 1)
    state.observe_message(report.replace(sent_at=BEGIN + 12, step=report.step + 1, version=following))
    assert state.warning(BEGIN + 60) is None


def test_a_run_whose_rewards_are_all_equal_says_that_it_learns_nothing() -> None:
    state, report = RunState(RUN), examples()["step-report"]
    assert isinstance(report, StepReport)
    for step in range(1, FLAT_STEPS + 1):
        assert state.warning(BEGIN) is None
        metrics = {"reward": 0.0, "frac_reward_zero_std": 1.0}
        version = PolicyVersion(1, step)
        state.observe_message(
            report.replace(sent_at=BEGIN, policy=None, finished=False, step=step, version=version, metrics=metrics)
        )
    assert (
        state.warning(BEGIN) == "in the last 10 steps all samples of each prompt had equal rewards: nothing is learned"
    )
    version, metrics = PolicyVersion(1, FLAT_STEPS + 1), {"frac_reward_zero_std": 0.9}
    state.observe_message(
        report.replace(
            sent_at=BEGIN, policy=None, finished=False, step=version.number, version=version, metrics=metrics
        )
    )
    assert state.warning(BEGIN) is None


def test_causes_of_skips_stay_bounded() -> None:
    state, row = RunState(RUN), examples()["skip"]
    for number in range(500):
        detail = f"error number {number}: {'x' * 900}"
        state.observe_message(row.replace(reason=SkipReason.POISON, detail=detail, trajectory_id=f"d/{number}/0/0"))
    causes = state.refusals.skip_causes["poison"]
    assert sum(causes.counts.values()) == 500
    assert len(causes.counts) == CAUSES_HELD + 1
    assert len(causes.example) == EXAMPLE_LIMIT
