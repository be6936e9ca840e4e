"""What a change of the bucket boundaries does to a running dispatcher."""

from streamrl.producers.lengths.buckets import Buckets
from streamrl.producers.lengths.predictor import ObservedQuantiles
from streamrl.schemas.settings import LoopSettings
from streamrl.schemas.topics import TRAJECTORIES
from streamrl.schemas.trajectories import Trajectory, WorkOrder
from tests.producers.dispatch.dispatcher_harness import DispatcherHarness, trajectory

LOOP = LoopSettings(
    groups_per_step=2,
    num_generations=2,
    max_staleness=1,
    max_completion_length=1000,
    bucket_boundaries=(20, 50, 80),
)


async def _finish(harness: DispatcherHarness, order: WorkOrder, sample: int) -> None:
    length = 5 + 7 * order.position + 3 * sample
    await harness.send(TRAJECTORIES, trajectory(order, sample, length=length), order.group_id, order.partition)


def _partitions(harness: DispatcherHarness) -> dict[str, set[int]]:
    """By group, where its trajectories are."""
    found: dict[str, set[int]] = {}
    for number, log in enumerate(harness.bus.log(TRAJECTORIES.full_name("r")).partitions):
        for record in log:
            message = record.message()
            assert isinstance(message, Trajectory)
            found.setdefault(message.group_id, set()).add(number)
    return found


async def test_a_change_of_boundaries_reroutes_new_work_only_and_loses_nothing() -> None:
    """One group is half done when the boundaries change, and its worker is lost then."""
    buckets = Buckets(LOOP.bucket_boundaries, fit_every=4, fit_after=4, clock=lambda: 7.0)
    harness = DispatcherHarness(loop=LOOP, predictor=ObservedQuantiles(LOOP, buckets, min_observations=1))
    await harness.step(0)
    await harness.start()
    await harness.beat()
    await harness.until(lambda: len(harness.orders()) == 4)
    held, *others = harness.orders()
    await _finish(harness, held, 0)
    for order in others:
        for sample in range(2):
            await _finish(harness, order, sample)
    await harness.until(lambda: buckets.version > 0)
    await harness.beat(incarnation="b")
    await harness.until(lambda: len(harness.orders()) == 5)
    again = next(order for order in harness.orders() if order.attempt)
    assert (again.group_id, again.partition, again.estimate) == (held.group_id, held.partition, held.estimate)
    await _finish(harness, again, 1)
    for number in range(1, 4):
        done = sorted(_partitions(harness), key=lambda group: int(group.split("/")[1]))
        await harness.step(number, done[2 * number - 2 : 2 * number])
        await harness.beat(incarnation="b", number=number)
        await harness.until(lambda n=number: len(harness.orders()) == 5 + 2 * n)  # type: ignore[misc]
        for order in harness.orders()[-2:]:
            for sample in range(2):
                await _finish(harness, order, sample)
    await harness.end()
    orders = [order for order in harness.orders() if not order.attempt]
    assert [order.position for order in orders] == list(range(10))
    assert {order.estimate.boundaries_version for order in orders[:4]} == {0}
    assert all(order.estimate.boundaries_version >= 7 for order in orders[4:])
    assert all(order.partition // LOOP.shards == order.estimate.bucket for order in orders)
    assert _partitions(harness) == {order.group_id: {order.partition} for order in orders}
