"""Samples that graders have: no worker owes them, and their groups are not whole before they are graded."""

import time

from streamrl.bus.port import TopicPartition
from streamrl.producers.dispatch.fleet import ABSENT_TIMEOUTS
from streamrl.producers.dispatch.recovery import rebuild
from streamrl.producers.dispatch.settings import DispatchSettings
from streamrl.producers.dispatch.state import DispatchState
from streamrl.producers.lengths.predictor import ConstantLength
from streamrl.schemas.identifiers import graders_group
from streamrl.schemas.topics import TRAJECTORIES, UNGRADED, WORK_ORDERS
from streamrl.schemas.trajectories import UngradedTrajectory, WorkOrder
from tests.producers.dispatch.dispatcher_harness import (
    LOOP,
    DispatcherHarness,
    heartbeat,
    order,
    step_report,
    trajectory,
)


def ungraded(of: WorkOrder, sample: int) -> UngradedTrajectory:
    return UngradedTrajectory.of(trajectory(of, sample), of.prompt)


def state_with(one: WorkOrder) -> DispatchState:
    state = DispatchState(LOOP, DispatchSettings(), ConstantLength(LOOP))
    state.observe(step_report(0), 0.0)
    state.observe(heartbeat(), 0.0)
    state.restore(one, 0.0)
    return state


def test_a_sample_in_grading_is_not_sampled_again_and_keeps_its_group_open() -> None:
    one = order()
    state = state_with(one)
    for sample in one.sample_indices:
        state.observe(ungraded(one, sample), 1.0)
    assert state.flights.load("w0") == (0, 0)
    assert not list(state.flights.unfinished())

    def missing() -> int | None:
        return state.ledger.oldest_missing

    # Later groups are held back by its version until it is whole where the trainer reads.
    assert missing() == 0
    state.observe(trajectory(one, 0), 2.0)
    assert missing() == 0
    state.observe(trajectory(one, 1), 2.0)
    assert missing() is None
    assert len(state.grading) == 0


def test_the_two_topics_may_be_read_in_either_order() -> None:
    one = order()
    state = state_with(one)
    state.observe(trajectory(one, 0), 1.0)
    state.observe(ungraded(one, 0), 1.0)
    assert len(state.grading) == 0
    state.observe(ungraded(one, 1), 1.0)
    state.observe(ungraded(one, 1), 1.0)
    state.observe(trajectory(one, 1), 1.0)
    state.observe(trajectory(one, 1), 1.0)
    assert state.ledger.oldest_missing is None


def test_a_length_is_learnt_once() -> None:
    one, seen = order(), list[int]()
    state = state_with(one)
    state.predictor.observe = lambda completion: seen.append(completion.length)  # type: ignore[method-assign]
    state.observe(ungraded(one, 0), 1.0)
    state.observe(trajectory(one, 0), 2.0)
    assert seen == [5]


def test_samples_at_the_graders_are_not_ordered_again_when_their_worker_is_lost() -> None:
    one = order()
    state = state_with(one)
    state.observe(ungraded(one, 0), 1.0)
    (lost,) = state.lost(1e6)
    assert lost.missing == {1}
    state.observe(ungraded(one, 1), 1.0)
    assert state.lost(1e6) == []


def test_a_group_that_ends_is_forgotten_with_what_graders_have_of_it() -> None:
    one = order()
    state = state_with(one)
    state.observe(ungraded(one, 0), 1.0)
    state.observe(step_report(1, [one.group_id]), 2.0)
    assert len(state.grading) == 0
    state.observe(trajectory(one, 0), 3.0)
    assert not state.ledger.is_in_flight(one.group_id)


async def _rebuilt(harness: DispatcherHarness) -> tuple[DispatchState, dict[TopicPartition, int]]:
    state = DispatchState(LOOP, DispatchSettings(), ConstantLength(LOOP))
    return state, await rebuild(harness.bus, "r", state, time.time, has_graders=True)


async def test_a_restarted_dispatcher_knows_what_the_graders_have() -> None:
    harness = DispatcherHarness()
    await harness.step(0)
    await harness.beat()
    done, half = order("toy/0/0"), order("toy/1/0")
    for one in (done, half):
        await harness.send(WORK_ORDERS, one, one.group_id, 0)
        await harness.sample(one)
    await harness.finish(done)
    # The group has committed what is graded; what lies before that is read on the other topic.
    harness.bus.committed[graders_group("r"), TopicPartition(UNGRADED.full_name("r"), 0)] = 2
    state, positions = await _rebuilt(harness)
    assert not list(state.flights.unfinished())
    assert (len(state.grading), state.ledger.oldest_missing) == (2, 0)
    assert positions[TopicPartition(UNGRADED.full_name("r"), 0)] == 4
    assert positions[TopicPartition(TRAJECTORIES.full_name("r"), 0)] == 2
    assert state.lost(time.time() + 1e6) == []


async def test_a_dispatcher_with_graders_orders_nothing_twice_and_goes_on_when_they_are_done() -> None:
    harness = DispatcherHarness(
        has_graders=True,
        loop=LOOP.model_copy(update={"heartbeat_timeout_s": 0.3}),
        settings=DispatchSettings(order_timeout_s=0.3),
    )
    await harness.step(0)
    await harness.beat()
    await harness.start()
    for _ in range(50):
        await harness.beat()
        await harness.settle()
        if len(harness.orders()) == 4:
            break
    sent = harness.orders()
    for one in sent:
        await harness.sample(one)
    # The worker's heartbeats name none of them any more, for longer than an order may stay away from them.
    for _ in range(int(10 * ABSENT_TIMEOUTS * 0.3) + 4):
        await harness.beat(orders={})
        await harness.settle()
    assert harness.orders() == sent
    for one in sent:
        await harness.finish(one)
    await harness.step(1, [one.group_id for one in sent[:2]])
    for _ in range(50):
        await harness.beat(number=1, orders={})
        await harness.settle()
        if len(harness.orders()) == 6:
            break
    assert len(harness.orders()) == 6
    await harness.end()
