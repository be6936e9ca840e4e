from pathlib import Path

import pytest

from streamrl.bus.history import BusHistory
from streamrl.bus.port import Outgoing
from streamrl.inspection.dashboard.records import history_json
from streamrl.inspection.replay.history import HistoryReader
from streamrl.inspection.replay.show import history_text
from streamrl.inspection.replay.view import number
from streamrl.observability.record_index.following import IndexFollower
from streamrl.observability.record_index.store import RecordIndex
from streamrl.schemas.control import WeightsReady, control_key
from streamrl.schemas.errors import UserError
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.reports import SkipReason
from streamrl.schemas.topics import CONTROL, HEARTBEATS, STEPS, WORK_ORDERS
from streamrl.schemas.trajectories import LengthEstimate, WorkOrder
from tests.consumers.training.trainer_harness import RUN
from tests.fakes.messages import heartbeat, step_report, work_order
from tests.inspection.replay.recorded_run import Recorded, members, record, usual_groups

ZERO = "0" * 64


def tracer(run: Recorded) -> HistoryReader:
    return HistoryReader(IndexFollower(BusHistory(run.harness.bus), RUN, RecordIndex(None)), run.algorithm.name)


async def send(run: Recorded, topic: str, message: object, key: str) -> None:
    publisher = await run.harness.bus.publisher("anyone")
    await publisher.publish(Outgoing.of(f"{RUN}.{topic}", message, key=key, partition=0))  # type: ignore[arg-type]


def order(attempt: int, indices: tuple[int, ...]) -> WorkOrder:
    named = {"worker_id": f"w{attempt}", "attempt": attempt, "sample_indices": indices}
    estimate = LengthEstimate(median=4, upper=8, bucket=1, predictor="constant")
    return work_order("p/0/0", 3, position=12, estimate=estimate, created_at=-10.0 + attempt, **named)


async def test_a_history_goes_from_the_order_to_the_weights_in_use(tmp_path: Path, model_path: Path) -> None:
    run = await record(tmp_path, model_path, usual_groups(2))
    for attempt, indices in ((0, (0, 1, 2)), (1, (1,)), (2, (2,))):
        await send(run, WORK_ORDERS.name, order(attempt, indices), "p/0/0")
    ready = WeightsReady(sequence=1, sent_at=4e9, version=PolicyVersion(1, 1), step=1, manifest_sha256=ZERO, relays=())
    await send(run, CONTROL.name, ready, control_key(ready))
    await send(run, HEARTBEATS.name, heartbeat("w1", sent_at=4e9 + 1), "w1")
    await send(run, HEARTBEATS.name, heartbeat("w1", version=PolicyVersion(1, 1), sent_at=4e9 + 2.5), "w1")
    history = await tracer(run).trace("p/0/0/1")
    assert history.trajectory.trajectory_id == "p/0/0/1"
    report = next(report for report in run.harness.reports() if "p/0/0" in report.group_ids)
    refs = [ref.trajectory_id for ref in report.trained_refs]
    assert history.advantage == report.advantages[refs.index("p/0/0/1")] != 0.0
    shown = history_json(history, "#{}".format, "run")
    assert shown["advantage"] == history.advantage
    assert f"advantage: {number(history.advantage)}" in history_text(history, "#{}".format).plain
    assert [event.what for event in history.events] == [
        "ordered", "ordered", "started", "finished", "appended", "trained", "reported", "weights announced",
        "weights in use",
    ]  # fmt: skip
    assert "worker w0, attempt 0, prompt position 12, estimated 4 tokens" in history.events[0].detail
    assert "worker w1, attempt 1" in history.events[1].detail
    assert (history.events[0].since, history.events[1].since, history.events[-1].since) == (None, 1.0, 2.5)
    assert "step 1, micro-batch " in history.events[5].detail
    (seen,) = history.records
    assert seen.fate == "trained in step 1"
    by_place = await tracer(run).trace(f"{seen.partition}@{seen.offset}")
    assert by_place.trajectory.trajectory_id == "p/0/0/1"


async def test_a_repeat_is_shown_next_to_the_record_that_was_trained(tmp_path: Path, model_path: Path) -> None:
    groups = usual_groups(2)
    run = await record(tmp_path, model_path, [[*groups[0], groups[0][0]], *groups[1:]])
    history = await tracer(run).trace("p/0/0/0")
    assert [seen.fate for seen in history.records] == ["trained in step 1", f"skipped: {SkipReason.DUPLICATE.value}"]
    assert [event.what for event in history.events].count("appended") == 2


async def test_steps_undone_by_a_crash_are_shown_and_do_not_count(tmp_path: Path, model_path: Path) -> None:
    run = await record(tmp_path, model_path, usual_groups(6), crash_at=5)
    history = await tracer(run).trace("p/8/0/0")
    trained = [event.detail for event in history.events if event.what == "trained"]
    assert len(trained) == 2
    assert ["undone by a crash" in detail for detail in trained] == [True, False]
    assert [seen.fate for seen in history.records] == ["trained in step 5"]


async def test_an_unfinished_trajectory_is_pending_and_left_over_after_the_run(
    tmp_path: Path, model_path: Path
) -> None:
    run = await record(tmp_path, model_path, usual_groups(2))
    await run.harness.publish(members(40, 2)[0])

    async def fates(name: str) -> list[str]:
        return [seen.fate for seen in (await tracer(run).trace(name)).records]

    assert await fates("p/40/0/0") == ["left over: the run is finished"]
    assert await fates("p/0/0/1") == ["trained in step 1"]
    goes_on = step_report(2, 2, parent=PolicyVersion(1, 2), sent_at=4e9)
    await send(run, STEPS.name, goes_on, "grpo")
    assert await fates("p/40/0/0") == ["pending"]


@pytest.mark.parametrize(
    ("name", "message"),
    [("p/99/0/0", "which is not there"), ("0@9999", "it holds offsets 0 to"), ("99@0", "no such partition")],
)
async def test_an_unknown_trajectory_gives_one_line(tmp_path: Path, model_path: Path, name: str, message: str) -> None:
    run = await record(tmp_path, model_path, usual_groups(1))
    with pytest.raises(UserError, match=message):
        await tracer(run).trace(name)


async def test_bytes_that_do_not_decode_are_named(tmp_path: Path, model_path: Path) -> None:
    run = await record(tmp_path, model_path, usual_groups(1))
    publisher = await run.harness.bus.publisher("anyone")
    position = await publisher.publish(Outgoing(f"{RUN}.trajectories", b"junk", None, 0))
    with pytest.raises(UserError, match="do not decode"):
        await tracer(run).trace(f"0@{position.offset}")
