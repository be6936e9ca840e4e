import json

from streamrl.inspection.terminal.command import line_of, object_of
from streamrl.observability.run_state.state import RunState
from tests.inspection.terminal.made_up_state import MadeUpState


def test_a_line_says_what_status_says() -> None:
    run = MadeUpState(60.0)
    entries = run.state.learning.steps.entries
    newest = entries[-1]
    entries[-1] = newest._replace(metrics={"kafka/lag/bucket_0": 3.0, "kafka/lag/bucket_1": 0.0})
    line = line_of(run.state, run.now)
    assert "\n" not in line
    for told in (f"step {run.state.progress.step}", "running", "traj/s", "tok/s", "b0:3", "worker-5@1-", "staleness"):
        assert told in line, told


def test_a_line_is_there_from_the_first_moment_on() -> None:
    assert line_of(RunState("r"), 1.0).startswith("r starting  step 0  reward –")
    json.dumps(object_of(RunState("r"), 1.0, 0), allow_nan=False)


def test_an_object_holds_only_events_that_were_not_printed_before() -> None:
    run = MadeUpState(30.0)
    first = object_of(run.state, run.now, 0)
    told = run.state.log.numbered
    assert first["events"][-1]["number"] == told
    run.state.log.add(run.now, "warn", "something new")
    assert [event["text"] for event in object_of(run.state, run.now, told)["events"]] == ["something new"]
    assert json.loads(json.dumps(first, allow_nan=False)) == first
