import json

from streamrl.observability.run_state.snapshot import SECTIONS, snapshot
from streamrl.observability.run_state.state import RunState
from streamrl.schemas.topics import TRAJECTORIES
from tests.observability.run_state.made_up_run import MadeUpRun
from tests.observability.run_state.writing import append, topics_of
from tests.schemas.examples import examples


def test_a_snapshot_is_plain_data_from_the_first_moment_on() -> None:
    state = RunState("r")
    empty = snapshot(state, 1_795_000_100.0)
    assert json.loads(json.dumps(empty, allow_nan=False)) == empty
    assert set(empty) == set(SECTIONS)
    for message in examples().values():
        state.observe_message(message)
    full = snapshot(state, 1_795_000_100.0)
    assert json.loads(json.dumps(full, allow_nan=False)) == full
    assert full["loop"]["announced"] == "2-4"


def test_trajectories_that_a_finished_run_did_not_train_are_left_over() -> None:
    bus, state = topics_of("r"), RunState("r")
    first = next(each for each in MadeUpRun(0.0).happenings() if each.topic is TRAJECTORIES)
    append(bus, "r", first)
    state.observe_record(bus.log(f"r.{TRAJECTORIES.name}").partitions[first.partition][0])
    assert [row["fate"] for row in snapshot(state, 9.0)["trajectories"]] == ["waiting"]
    state.observe_message(examples()["control-run-finished"])
    assert [row["fate"] for row in snapshot(state, 9.0)["trajectories"]] == ["left over"]


def test_shares_of_the_last_minute_add_up_to_one() -> None:
    state, beat = RunState("r"), examples()["heartbeat"]
    for second in range(9):
        state.observe_message(beat.replace(sent_at=100.0 + second, running=0 if second in (3, 4) else 2))
    (row,) = snapshot(state, 108.0)["split"]
    assert row["name"] == "worker-1"
    assert abs(sum(row["shares"].values()) + row["wait"] - 1) < 1e-3
    assert row["wait"] == 0.25
