"""What displays tell of the instances beside a run's own trainer."""

import asyncio
import time
from types import SimpleNamespace

import pytest

from streamrl.bus.history import BusHistory, Extent
from streamrl.bus.memory import MemoryBus
from streamrl.bus.port import Outgoing, Record, TopicPartition
from streamrl.deploy.local.watching import plain_line
from streamrl.inspection.terminal.command import line_of
from streamrl.inspection.terminal.sections import draw_workers
from streamrl.observability.run_state.feed import RunFeed
from streamrl.observability.run_state.snapshot import snapshot
from streamrl.observability.run_state.state import RunState
from streamrl.policies import role_attaching
from streamrl.policies.role_attaching import instances_on
from streamrl.policies.role_run_part import Instances, standing
from streamrl.schemas.codec import encode, headers_of
from streamrl.schemas.control import ArmShare, InstanceState, PolicySplit, RunFinished, Served, control_key
from streamrl.schemas.identifiers import PolicyVersion, scope_of
from streamrl.schemas.messages import Message
from streamrl.schemas.reports import StepReport, TrainerBeat
from streamrl.schemas.topics import CONTROL, HEARTBEATS, INSTANCE_TOPICS, STEPS, TRAJECTORIES, Topic
from tests.fakes.messages import step_report
from tests.observability.run_state.writing import append_raw, topics_of
from tests.progress import patience
from tests.schemas.examples import few_examples

RUN, NAME = "made-up", "rloo-1"


def state_of_run() -> RunState:
    return RunState(RUN, parts=(Instances(RUN),))


def part_of(state: RunState) -> Instances:
    (part,) = state.parts
    assert isinstance(part, Instances)
    return part


def put(bus: MemoryBus, topic: Topic, scope: str, message: Message, key: str) -> None:
    append_raw(bus, Outgoing.of(topic.full_name(scope), message, key=key), 0, time.time())


def attached(bus: MemoryBus, mode: str = "run", sequence: int = 1) -> None:
    told = {"policy": NAME, "algorithm": "rloo", "mode": mode}
    message = InstanceState.model_validate({"sequence": sequence, "sent_at": time.time(), **told})
    put(bus, CONTROL, RUN, message, control_key(message))


def report(number: int, policy: str | None) -> StepReport:
    lag = {"kafka/lag/bucket_0": 2.0, "kafka/lag/bucket_1": 5.0}
    return step_report(
        1,
        number,
        algorithm="grpo" if policy is None else "rloo",
        group_ids=(f"g/{number}",),
        metrics={"reward": number / 10, "off_policy/mean": 3.0, **lag},
        policy=policy,
        sent_at=time.time(),
    )


async def test_an_instance_that_is_attached_meanwhile_gets_a_row_and_is_not_taken_for_the_run() -> None:
    bus, scope = topics_of(RUN), scope_of(RUN, NAME)
    for topic in INSTANCE_TOPICS:
        bus.create_topic(topic.full_name(scope), 1)
    put(bus, STEPS, RUN, report(2, None), "grpo")
    state, stop = state_of_run(), asyncio.Event()
    feed = RunFeed(bus, state, pace_s=lambda: 0.02)
    following = asyncio.create_task(feed.run(stop))

    async def until(number: int) -> None:
        async with patience(10):
            while not any(row["step"] == number for row in part_of(state).rows(time.time())):
                await asyncio.sleep(0.01)

    put(bus, STEPS, scope, report(7, NAME), "rloo")
    attached(bus)
    await until(7)
    put(bus, STEPS, scope, report(8, NAME), "rloo")
    attached(bus, "pause", 2)
    await until(8)
    stop.set()
    await following
    assert (state.progress.step, state.progress.algorithm) == (2, "grpo")
    (row,) = snapshot(state, time.time())["instances"]
    assert {**row, "quiet_s": 0} == {
        "name": NAME,
        "algorithm": "rloo",
        "mode": "pause",
        "served": False,
        "silent": False,
        "version": f"{NAME}/1-8",
        "step": 8,
        "reward": 0.8,
        "age": 3.0,
        "lag": 7,
        "quiet_s": 0,
    }
    drawn = draw_workers({"workers": [WORKER], "instances": [row], "arms": []}, 100, 9).plain
    assert f"{NAME}/1-8" in drawn
    assert "pause" in drawn


async def test_a_silent_served_instance_is_reported_with_what_to_do_until_it_returns() -> None:
    bus, scope, now = topics_of(RUN), scope_of(RUN, NAME), time.time()
    for topic in INSTANCE_TOPICS:
        bus.create_topic(topic.full_name(scope), 1)
    attached(bus)
    put(bus, CONTROL, RUN, Served(sequence=2, sent_at=now, policy=NAME, since=PolicyVersion(1, 4)), "served")
    state, stop = state_of_run(), asyncio.Event()
    following = asyncio.create_task(RunFeed(bus, state, pace_s=lambda: 0.02).run(stop))

    async def heard(at: float) -> None:
        beat = TrainerBeat(
            algorithm="rloo", incarnation="a", version=PolicyVersion(2, 4), sequence=0, policy=NAME, sent_at=at
        )
        put(bus, HEARTBEATS, scope, beat, "rloo")
        async with patience(10):
            while part_of(state).heard_at.get(NAME) != at:
                await asyncio.sleep(0.01)

    await heard(now + 1)
    assert state.warning(now + 10) is None
    told = state.warning(now + 12)
    assert told is not None
    assert f"streamrl attach {NAME} --run {RUN}" in told
    assert f"streamrl promote policy --run {RUN}" in told
    assert told in plain_line(state, 10, now + 12)
    assert told in line_of(state, now + 12)
    (row,) = snapshot(state, now + 12)["instances"]
    assert (row["served"], row["silent"]) == (True, True)
    assert "served, silent" in draw_workers({"workers": [WORKER], "instances": [row], "arms": []}, 100, 9).plain
    for _ in range(2):
        state.tick(now + 12)
    assert [event.text for event in state.log.events].count(told) == 1
    await heard(now + 13)
    stop.set()
    await following
    (row,) = snapshot(state, now + 14)["instances"]
    drawn = draw_workers({"workers": [WORKER], "instances": [row], "arms": []}, 100, 9).plain
    assert "served" in drawn
    assert "silent" not in drawn


def test_the_last_step_of_a_policy_that_is_not_served_ends_no_run() -> None:
    state = state_of_run()
    state.observe_message(report(1, None))
    state.observe_message(Served(sequence=1, sent_at=0.0, policy=NAME, since=PolicyVersion(1, 1)))
    state.observe_message(report(2, None).replace(finished=True))
    assert not state.progress.finished
    state.observe_message(RunFinished(sequence=2, sent_at=0.0, step=5))
    state.observe_message(report(3, None))
    assert state.progress.finished


WORKER = {
    "id": "worker-0",
    "state": "ready",
    "version": "1-2",
    "behind": 0,
    "running": 1,
    "waiting": 0,
    "capacity": 4,
    "tokens_per_s": 10,
    "age": 0,
}


async def test_status_of_instances_and_displays_tell_the_same_of_a_step() -> None:
    """By one function: `streamrl algorithms ls`, `top`, the page and the Python API."""
    bus, scope = topics_of(RUN), scope_of(RUN, NAME)
    for topic in INSTANCE_TOPICS:
        bus.create_topic(topic.full_name(scope), 1)
    attached(bus)
    newest = report(7, NAME)
    put(bus, STEPS, scope, newest, "rloo")
    told = standing(newest)
    assert told == {"version": f"{NAME}/1-7", "step": 7, "reward": 0.7, "age": 3.0, "lag": 7}
    assert set(standing(None).values()) == {None}
    state = state_of_run()
    state.observe_records([record async for record in BusHistory(bus).records(CONTROL.full_name(RUN))])
    state.observe_records([record async for record in BusHistory(bus).records(STEPS.full_name(scope))])
    (shown,) = snapshot(state, time.time())["instances"]
    own, status = await instances_on(BusHistory(bus), RUN, {})
    assert {name: shown[name] for name in told} == {name: getattr(status, name) for name in told} == told
    assert {getattr(own, name) for name in told} == {None}


async def test_a_trainer_is_alive_however_long_the_reading_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    bus, clock = topics_of(RUN), SimpleNamespace(now=100.0)
    beat = TrainerBeat(algorithm="grpo", incarnation="i", version=PolicyVersion(1, 0), sequence=1, sent_at=99.0)
    put(bus, HEARTBEATS, RUN, beat, "grpo")
    monkeypatch.setattr(role_attaching, "time", SimpleNamespace(time=lambda: clock.now))

    class SlowHistory(BusHistory):
        async def extents(self, *topics: str) -> dict[TopicPartition, Extent]:
            clock.now += 60 * (HEARTBEATS.full_name(RUN) in topics)
            return await super().extents(*topics)

    (own,) = await instances_on(SlowHistory(bus), RUN, {})
    assert own.alive
    (later,) = await instances_on(SlowHistory(bus), RUN, {})
    assert not later.alive


def test_arms_of_a_split_have_a_row_each_with_what_they_sampled_since_it_was_ordered() -> None:
    state = state_of_run()
    assert snapshot(state, 0.0)["arms"] == []
    arms = (ArmShare(policy=NAME, share=0.25),)
    split = PolicySplit(sequence=1, sent_at=1.0, arms=arms, workers={"w1": NAME})
    made = few_examples()["trajectory"]
    for policy, reward in ((NAME, 1.0), ("", 0.5)):
        observe(state, made, policy, reward)  # nobody asked for a comparison yet
    state.observe_message(split)
    for policy, reward in ((NAME, 1.0), (NAME, 0.0), ("", 0.25)):
        observe(state, made, policy, reward)
    # Who works for an arm may change, and nothing is counted anew.
    state.observe_message(split.replace(sequence=2, workers={"w1": NAME, "w2": NAME}))
    assert snapshot(state, 2.0)["arms"] == [
        {"name": NAME, "share": 0.25, "workers": 2, "sampled": 2, "reward": 0.5},
        {"name": "served", "share": 0.75, "workers": None, "sampled": 1, "reward": 0.25},
    ]
    shown = draw_workers(
        {**snapshot(state, 2.0), "workers": snapshot(state_with_a_worker(), 2.0)["workers"]}, 80, 20
    ).plain
    assert f"{NAME}   0.25    2" in shown
    assert "served   0.75    others" in shown
    assert any(NAME in event[3] for event in snapshot(state, 2.0)["events"])
    state.observe_message(PolicySplit(sequence=3, sent_at=3.0))
    assert snapshot(state, 3.0)["arms"] == []


def observe(state: RunState, made: Message, policy: str, reward: float) -> None:
    trajectory = made.replace(policy=policy, rewards={"accuracy": reward}, reward_errors={})
    headers = headers_of(trajectory)
    state.observe_record(Record(TRAJECTORIES.full_name(RUN), 0, 0, None, encode(trajectory), headers, 1.0))


def state_with_a_worker() -> RunState:
    state = state_of_run()
    state.observe_message(few_examples()["heartbeat"].replace(policy=NAME))
    assert snapshot(state, 2.0)["workers"][0]["version"] == f"{NAME}/2-4"
    return state


def test_a_promotion_is_marked_in_the_curves() -> None:
    state = state_of_run()
    state.observe_message(report(7, None))
    state.observe_message(Served(sequence=1, sent_at=1.0, policy=NAME, since=PolicyVersion(1, 7)))
    assert [mark[:1] + mark[2:] for mark in snapshot(state, 2.0)["curves"]["marks"]] == [
        [7, "promotion", f"{NAME} is served from now on"]
    ]
