"""A version of an arm's trajectory bears the arm's name wherever it is told: numbers alone would mix up policies."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from streamrl.bus.history import BusHistory
from streamrl.bus.memory import MemoryBus
from streamrl.bus.port import Outgoing, Record
from streamrl.datasets import example_of
from streamrl.inspection.dashboard.records import history_json
from streamrl.inspection.diagnostics.fields import line_of, shown_record
from streamrl.inspection.replay.history import TrajectoryHistory
from streamrl.inspection.replay.show import history_text
from streamrl.inspection.report.gathering import gather_topics
from streamrl.inspection.terminal.drawing import preview, whole
from streamrl.observability.run_state.snapshot import snapshot
from streamrl.observability.run_state.state import RunState
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.reports import Heartbeat, RecordRef, StepReport
from streamrl.schemas.topics import HEARTBEATS, STEPS, TRAJECTORIES
from streamrl.schemas.trajectories import Trajectory, VersionSpan
from tests.observability.run_state.writing import append_raw, topics_of
from tests.schemas.examples import example, trajectory

RUN = "r"
SPANS = (
    VersionSpan(version=PolicyVersion(1, 9), start=0, end=2),
    VersionSpan(version=PolicyVersion(1, 10), start=2, end=4),
)
SERVED = trajectory(4, version_spans=SPANS, policy="")
OF_ARM = SERVED.replace(policy="rloo-1", admitted_version=PolicyVersion(3, 40))


def written(*messages: Trajectory) -> MemoryBus:
    bus = topics_of(RUN)
    for message in messages:
        append_raw(bus, Outgoing.of(TRAJECTORIES.full_name(RUN), message, key="k"), 0, message.finished_at)
    return bus


def rows(one: Trajectory) -> dict[str, object]:
    state = RunState(RUN)
    state.observe_record(written(one).log(TRAJECTORIES.full_name(RUN)).partitions[0][0])
    (row,) = snapshot(state, time.time())["trajectories"]
    return dict(row)


def tail_line(one: Trajectory) -> str:
    out = Outgoing.of("r.trajectories", one, key="k")
    return line_of(shown_record(Record("r.trajectories", 0, 0, "k", out.value, out.headers, 0.0), None))


DISPLAYS: dict[str, Callable[[Trajectory], str]] = {
    "show": lambda one: history_text(TrajectoryHistory(one, (), (), settled=True), str).plain,
    "page": lambda one: str(history_json(TrajectoryHistory(one, (), (), settled=True), str, "runs/x")["spans"]),
    "list": lambda one: str(rows(one)["versions"]),
    "top, a row": lambda one: preview(rows(one)).plain,
    "top, a record": lambda one: whole(one, "0@0", "waiting", "streamrl show x").plain,
    "tail": tail_line,
    "data set": lambda one: str(example_of(one)["version"]),
}


@pytest.mark.parametrize("display", DISPLAYS)
def test_an_arms_versions_bear_its_name(display: str) -> None:
    assert "rloo-1/1-9" in DISPLAYS[display](OF_ARM)
    served = DISPLAYS[display](SERVED)
    assert "1-9" in served
    assert "/1-9" not in served


def test_the_versions_of_a_row_are_in_their_order() -> None:
    assert rows(SERVED)["versions"] == ["1-9", "1-10"]
    assert rows(OF_ARM)["versions"] == ["rloo-1/1-9", "rloo-1/1-10"]


async def test_a_report_names_arms_and_ages_their_trajectories_by_the_served_version(tmp_path: Path) -> None:
    bus = written(OF_ARM)
    beat = example("heartbeat", Heartbeat).replace(
        worker_id=OF_ARM.worker_id, policy="rloo-1", version=PolicyVersion(1, 9)
    )
    append_raw(bus, Outgoing.of(HEARTBEATS.full_name(RUN), beat, key="w"), 0, beat.sent_at)
    ref = RecordRef(partition=0, offset=0, trajectory_id=OF_ARM.trajectory_id)
    step = example("step-report", StepReport).replace(step=43, version=PolicyVersion(3, 43), micro_batches=((ref,),))
    append_raw(bus, Outgoing.of(STEPS.full_name(RUN), step, key="k"), 0, step.sent_at)
    found = await gather_topics(BusHistory(bus), RUN, tmp_path, {})
    assert found is not None
    assert found.first[0].versions == ("rloo-1/1-9", "rloo-1/1-10")
    assert [version for _, version in found.workers[OF_ARM.worker_id].adopted] == ["rloo-1/1-9"]
    assert found.staleness == {2: 1}, "admitted when 3-40 was served, trained on 3-42"
