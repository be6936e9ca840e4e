"""What a change of the bucket boundaries does to a running dispatcher."""

from streamrl.producers.lengths.buckets import Buckets
from streamrl.producers.lengths.predictor import ObservedQuantiles
from streamrl.producers.lengths.settings import LengthSettings
from streamrl.schemas.settings import LoopSettings
from streamrl.schemas.topics import TRAJECTORIES
from streamrl.schemas.trajectories import Trajectory, WorkOrder
from tests.producers.dispatch.scene import Scene, trajectory

LOOP = LoopSettings(
    groups_per_step=2,
    num_generations=2,
    max_staleness=1,
    max_completion_length=1000,
    bucket_boundaries=(20, 50, 80),
)


async def _finish(scene: Scene, order: WorkOrder, sample: int) -> None:
    length = 5 + 7 * order.position + 3 * sample
    await scene.send(TRAJECTORIES, trajectory(order, sample, length=length), order.group_id, order.partition)


def _partitions(scene: Scene) -> dict[str, set[int]]:
    """By group, where its trajectories are."""
    found: dict[str, set[int]] = {}
    for number, log in enumerate(scene.bus.log(TRAJECTORIES.full_name("r")).partitions):
        for record in log:
            message = record.message()
            assert isinstance(message, Trajectory)
            found.setdefault(message.group_id, set()).add(number)
    return found


async def test_a_change_of_boundaries_reroutes_new_work_only_and_loses_nothing() -> None:
    """One group is half done when the boundaries change, and its worker is lost then."""
    buckets = Buckets(LOOP.bucket_boundaries, fit_every=4, fit_after=4, clock=lambda: 7.0)
    scene = Scene(loop=LOOP, predictor=ObservedQuantiles(LengthSettings(min_observations=1), LOOP, buckets))
    await scene.step(0)
    await scene.start()
    await scene.beat()
    await scene.until(lambda: len(scene.orders()) == 4)
    held, *others = scene.orders()
    await _finish(scene, held, 0)
    for order in others:
        for sample in range(2):
            await _finish(scene, order, sample)
    await scene.until(lambda: buckets.version > 0)
    await scene.beat(incarnation="b")
    await scene.until(lambda: len(scene.orders()) == 5)
    again = next(order for order in scene.orders() if order.attempt)
    assert (again.group_id, again.partition, again.estimate) == (held.group_id, held.partition, held.estimate)
    await _finish(scene, again, 1)
    for number in range(1, 4):
        done = sorted(_partitions(scene), key=lambda group: int(group.split("/")[1]))
        await scene.step(number, done[2 * number - 2 : 2 * number])
        await scene.beat(incarnation="b", number=number)
        await scene.until(lambda n=number: len(scene.orders()) == 5 + 2 * n)  # type: ignore[misc]
        for order in scene.orders()[-2:]:
            for sample in range(2):
                await _finish(scene, order, sample)
    await scene.end()
    orders = [order for order in scene.orders() if not order.attempt]
    assert [order.position for order in orders] == list(range(10))
    assert {order.estimate.boundaries_version for order in orders[:4]} == {0}
    assert all(order.estimate.boundaries_version >= 7 for order in orders[4:])
    assert all(order.partition // LOOP.shards == order.estimate.bucket for order in orders)
    assert _partitions(scene) == {order.group_id: {order.partition} for order in orders}
