"""An order for what a lost worker left says where its tokens may be, and whoever had the order before."""

from streamrl.producers.dispatch.dispatcher import build_reorder
from streamrl.producers.dispatch.settings import DispatchSettings
from streamrl.producers.dispatch.state import DispatchState
from streamrl.producers.lengths.predictor import ConstantLength
from streamrl.schemas.identifiers import partial_partition_of
from streamrl.schemas.reports import WorkerState
from streamrl.schemas.trajectories import PartialSource, TrajectoryPart, WorkOrder
from tests.producers.dispatch.dispatcher_harness import (
    LOOP,
    DispatcherHarness,
    heartbeat,
    order,
    step_report,
    trajectory,
    version,
)

GROUP = "toy/0/0"


def source(worker: str, offset: int) -> PartialSource:
    return PartialSource(partition=partial_partition_of(worker), offset=offset)


def state_with(sent: WorkOrder, *, partials_from: int | None = None) -> DispatchState:
    """A group on its way at worker w0, which has said where it keeps what is unfinished."""
    state = DispatchState(
        LOOP.model_copy(update={"heartbeat_timeout_s": 5.0}), DispatchSettings(), ConstantLength(LOOP)
    )
    state.observe(step_report(0), 0.0)
    state.observe(heartbeat("w0", partials_from=partials_from), 0.0)
    (worker,) = state.candidates(0.0)
    state.admit(sent.replace(incarnation="a"), worker, 0.0)
    return state


def reordered(state: DispatchState, worker: str, now: float) -> WorkOrder:
    """What the dispatcher sends for the one group that was lost."""
    (flight,) = state.take_from_lost_workers(now)
    chosen = state.choose(1, lambda held: True, now, other_than=flight.order.worker_id)
    assert chosen is not None
    assert chosen.worker_id == worker
    again = build_reorder(flight, chosen, state.partials_of(flight))
    state.reassign(again, chosen, now)
    return again


def test_a_lost_workers_order_says_where_it_wrote() -> None:
    state = state_with(order(GROUP), partials_from=70)
    state.observe(heartbeat("w1"), 6.0)
    again = reordered(state, "w1", 6.0)
    assert (again.attempt, again.partials) == (1, (source("w0", 70),))
    # That one keeps no record, so it adds no place to look at.
    state.observe(heartbeat("w2"), 12.0)
    assert reordered(state, "w2", 12.0).partials == again.partials


def test_a_worker_that_restarted_is_looked_for_where_its_former_process_wrote() -> None:
    state = state_with(order(GROUP), partials_from=70)
    state.observe(heartbeat("w0", incarnation="b", partials_from=900), 1.0)
    assert reordered(state, "w0", 1.0).partials == (source("w0", 70),)


def test_all_chunks_of_an_unknown_worker_are_searched() -> None:
    """After a restart of everything later than heartbeats are kept."""
    state = DispatchState(
        LOOP.model_copy(update={"heartbeat_timeout_s": 5.0}), DispatchSettings(), ConstantLength(LOOP)
    )
    state.observe(step_report(0), 0.0)
    state.restore(order(GROUP).replace(incarnation="long ago"), 0.0)
    state.observe(heartbeat("w1"), 0.0)
    assert reordered(state, "w1", 0.0).partials == (source("w0", 0),)


def test_every_earlier_worker_is_named_with_its_earliest_offset() -> None:
    state = state_with(order(GROUP), partials_from=70)
    state.observe(heartbeat("w1", partials_from=30), 6.0)
    reordered(state, "w1", 6.0)
    state.observe(heartbeat("w0", incarnation="b", partials_from=200), 12.0)
    last = reordered(state, "w0", 12.0)
    assert set(last.partials) == {source("w0", 70), source("w1", 30)}
    state.observe(heartbeat("w1", incarnation="c", partials_from=50), 18.0)
    assert set(reordered(state, "w1", 18.0).partials) == {source("w0", 70), source("w1", 30)}


def test_tokens_that_no_step_may_train_any_more_are_not_gone_on_with() -> None:
    """A trainer that went back and forth has got past the group's bound: what is sampled anew may still be trained."""
    state = state_with(order(GROUP), partials_from=70)
    state.observe(heartbeat("w1", number=2), 6.0)
    state.observe(step_report(1), 6.0)
    assert state.ledger.is_trainable(GROUP)
    state.observe(step_report(2), 6.0)
    assert not state.ledger.is_trainable(GROUP)
    (flight,) = state.take_from_lost_workers(6.0)
    assert state.partials_of(flight) == ()


def test_a_workers_speed_is_learnt_from_the_tokens_that_it_sampled_itself() -> None:
    """Of 100 tokens in 6 s it had found 90: it is not taken to be ten times as fast as it is."""
    speeds = []
    for parts in (
        (),
        (TrajectoryPart(worker_id="w9", attempt=0, start=0), TrajectoryPart(worker_id="w0", attempt=1, start=90)),
    ):
        sent = order(GROUP, samples=1, median=100)
        state = state_with(sent)
        state.observe(trajectory(sent, 0, length=100).replace(parts=parts), 6.0)
        speeds.append(state.progress.speeds["w0"])
    whole, part = speeds
    assert part < whole / 5


async def test_the_dispatcher_sends_it_and_a_new_group_has_no_such_place() -> None:
    harness = DispatcherHarness()
    await harness.step(0)
    await harness.start()
    await harness.beat("w0", partials_from=12)
    await harness.until(lambda: len(harness.orders()) == 4)
    assert {one.partials for one in harness.orders()} == {()}
    await harness.beat("w1")
    await harness.beat("w0", partials_from=34, state=WorkerState.STOPPED)
    await harness.until(lambda: len(harness.orders("w1")) == 4)
    assert {one.partials for one in harness.orders("w1")} == {(source("w0", 34),)}
    assert version(0) == harness.orders("w1")[0].admitted_version
    await harness.end()
