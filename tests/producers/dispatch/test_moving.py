"""A move in the dispatcher: taken back, let go, ordered again elsewhere; and what becomes of it if somebody is lost."""

import asyncio
from dataclasses import dataclass, field

from streamrl.producers.dispatch.dispatcher import Dispatcher
from streamrl.producers.dispatch.repack import REPACK_EVERY_S
from streamrl.producers.dispatch.settings import DispatchSettings
from streamrl.schemas.identifiers import partial_partition_of
from streamrl.schemas.reports import ReleasedOrder, WorkerState
from streamrl.schemas.trajectories import PartialSource, ReleaseOrder, WorkOrder
from tests.producers.dispatch.dispatcher_harness import LOOP, DispatcherHarness, version

SETTINGS = DispatchSettings(repack=True, strategy="least_loaded")
TOKENS = 40


@dataclass
class Moving:
    """Four groups of two at two workers, which then await new weights: both ramp down, and one lets go.

    The bound allows six: whoever was released may take two more.
    """

    harness: DispatcherHarness = field(
        default_factory=lambda: DispatcherHarness(
            settings=SETTINGS, loop=LOOP.model_copy(update={"max_staleness": 2}), max_attempts=2
        )
    )
    dispatcher: Dispatcher = field(init=False)

    async def ramping_down(self) -> None:
        await self.harness.step(0)
        self.dispatcher = await self.harness.start()
        for worker in ("w0", "w1"):
            await self.beat(worker, awaits=None, capacity=4)
        await self.harness.until(lambda: len(self.harness.orders()) == 4)
        await self.harness.settle()
        assert self.harness.taken_back() == []
        for worker in ("w0", "w1"):
            await self.beat(worker)

    async def taken_back(self) -> ReleaseOrder:
        await self.ramping_down()
        await self.harness.until(lambda: bool(self.harness.taken_back()))
        (release,) = self.harness.taken_back()
        return release

    def settled(self, worker: str) -> list[ReleaseOrder]:
        return [one for one in self.harness.taken_back() if one.settled and one.worker_id == worker]

    async def beat(self, worker: str, *released: ReleasedOrder, **changes: object) -> None:
        fields = {"capacity": 64, "partials_from": 7, "released": released, "awaits": version(1)}
        await self.harness.beat(worker, **(fields | changes))

    def sent(self, release: ReleaseOrder) -> list[WorkOrder]:
        """The orders that were taken back."""
        return [one for one in self.harness.orders(release.worker_id) if one.group_id in release.groups]

    def again(self, release: ReleaseOrder) -> list[WorkOrder]:
        return [one for one in self.harness.orders() if one.group_id in release.groups and one.attempt > 0]


def let_go(order: WorkOrder, *samples: int) -> ReleasedOrder:
    return ReleasedOrder(
        group_id=order.group_id, attempt=order.attempt, samples=tuple((index, TOKENS) for index in samples)
    )


def other(worker: str) -> str:
    return {"w0": "w1", "w1": "w0"}[worker]


async def test_the_tail_of_one_worker_goes_to_the_other_after_its_release() -> None:
    moving = Moving()
    release = await moving.taken_back()
    sent = moving.sent(release)
    assert release.incarnation == "a"
    assert release.groups == {order.group_id: 0 for order in moving.harness.orders(release.worker_id)}
    await moving.harness.settle()
    assert moving.again(release) == []  # nobody gets it before
    await moving.beat(release.worker_id, *(let_go(order, 0, 1) for order in sent))
    await moving.harness.until(lambda: len(moving.again(release)) == len(sent))
    source = PartialSource(partition=partial_partition_of(release.worker_id), offset=7)
    for order in moving.again(release):
        assert (order.worker_id, order.attempt, order.moves) == (other(release.worker_id), 1, 1)
        assert order.partials == (source,)
    status = moving.dispatcher.status()
    assert (status.orders.moved, status.orders.reordered) == (2, 0)
    await moving.harness.end()


async def test_nothing_is_taken_back_while_no_prompt_may_begin() -> None:
    moving = Moving(DispatcherHarness(settings=SETTINGS))
    await moving.ramping_down()
    await asyncio.sleep(1.2 * REPACK_EVERY_S)
    assert moving.harness.taken_back() == []
    await moving.harness.end()


async def test_whole_samples_are_waited_for_and_not_ordered_again() -> None:
    moving = Moving()
    release = await moving.taken_back()
    sent = moving.sent(release)
    await moving.beat(release.worker_id, *(let_go(order, 1) for order in sent))
    await moving.harness.settle()
    assert moving.again(release) == []
    for order in sent:
        await moving.harness.finish(order, [0])
    await moving.harness.until(lambda: moving.dispatcher.status().orders.missing == 8 - len(sent))
    await moving.beat(release.worker_id, *(let_go(order, 1) for order in sent))
    await moving.harness.until(lambda: len(moving.again(release)) == len(sent))
    assert {order.sample_indices for order in moving.again(release)} == {(1,)}
    await moving.harness.end()


async def test_releases_by_another_attempt_or_process_are_ignored() -> None:
    moving = Moving()
    release = await moving.taken_back()
    sent = moving.sent(release)
    await moving.beat(release.worker_id, *(let_go(order.replace(attempt=1), 0, 1) for order in sent))
    await moving.beat(other(release.worker_id), *(let_go(order, 0, 1) for order in sent))
    await moving.harness.settle()
    assert moving.again(release) == []
    await moving.harness.end()


async def test_a_source_that_is_lost_before_it_answers_is_a_lost_worker() -> None:
    moving = Moving()
    release = await moving.taken_back()
    await moving.beat(other(release.worker_id), number=1, awaits=None)
    await moving.beat(release.worker_id, state=WorkerState.STOPPED)
    await moving.harness.until(lambda: len(moving.again(release)) == len(release.groups))
    assert {(order.worker_id, order.moves) for order in moving.again(release)} == {(other(release.worker_id), 0)}
    await moving.harness.end()


async def test_a_target_that_has_taken_new_work_and_has_no_room_is_passed_over() -> None:
    """It took its weights and new prompts meanwhile, and ramps down again with a full batch."""
    moving = Moving()
    release = await moving.taken_back()
    sent, target = moving.sent(release), other(release.worker_id)
    await moving.beat(target, awaits=None, number=1)
    await moving.harness.until(lambda: len(moving.harness.orders(target)) == 4)
    await moving.beat(target, awaits=version(2), number=1, capacity=8)
    await moving.beat(release.worker_id, *(let_go(order, 0, 1) for order in sent))
    await moving.harness.settle()
    assert moving.again(release) == []
    # The ordinary way of a group whose worker was lost: any that takes orders, here the one that was released.
    await moving.beat(release.worker_id, *(let_go(order, 0, 1) for order in sent), awaits=None, number=1)
    await moving.harness.until(lambda: len(moving.again(release)) == len(sent))
    assert {(order.worker_id, order.moves) for order in moving.again(release)} == {(release.worker_id, 1)}
    await moving.harness.end()


async def test_a_target_takes_as_many_groups_as_it_has_room_for() -> None:
    """Of two groups of two one: it has four completions, and its batch may be of seven."""
    moving = Moving()
    release = await moving.taken_back()
    sent, target = moving.sent(release), other(release.worker_id)
    await moving.beat(target, capacity=7)
    await moving.beat(release.worker_id, *(let_go(order, 0, 1) for order in sent))
    await moving.harness.until(lambda: len(moving.again(release)) == 1)
    await moving.harness.settle()
    assert [order.worker_id for order in moving.again(release)] == [target]
    await moving.harness.end()


async def test_a_release_is_settled_once_another_order_names_its_place() -> None:
    moving = Moving()
    release = await moving.taken_back()
    sent, source = moving.sent(release), release.worker_id
    told = [let_go(order, 1) for order in sent]
    await moving.beat(source, *told)
    await moving.harness.settle()
    assert moving.settled(source) == []
    for order in sent:
        await moving.harness.finish(order, [0])
    await moving.harness.until(lambda: moving.dispatcher.status().orders.missing == 8 - len(sent))
    await moving.beat(source, *told)
    await moving.harness.until(lambda: len(moving.again(release)) == len(sent))
    # Named once more, though another has it by now, and one more that is under way nowhere.
    ended = ReleasedOrder(group_id="toy/99/0", attempt=3, samples=((0, 1),))
    await moving.beat(source, *told, ended, state=WorkerState.PAUSED)
    await moving.harness.settle()
    assert moving.settled(source) == []  # it would not read that
    await moving.beat(source, *told, ended)
    await moving.harness.until(lambda: bool(moving.settled(source)))
    (settled,) = moving.settled(source)
    assert (settled.incarnation, settled.groups) == ("a", {})
    assert settled.settled == {order.group_id: 0 for order in sent} | {"toy/99/0": 3}
    await moving.harness.end()


async def test_a_target_that_is_lost_first_is_not_waited_for_and_moves_are_no_failures() -> None:
    """With two attempts allowed, a group that was moved and then lost once is ordered again, and not given up."""
    moving = Moving()
    release = await moving.taken_back()
    sent = moving.sent(release)
    await moving.harness.beat("w2", capacity=64)
    await moving.beat(other(release.worker_id), state=WorkerState.STOPPED)
    await moving.beat(release.worker_id, *(let_go(order, 0, 1) for order in sent))
    await moving.harness.until(lambda: len(moving.again(release)) == len(sent))
    moved = {order.worker_id for order in moving.again(release)}
    assert other(release.worker_id) not in moved
    for worker in moved:
        await moving.beat(worker, state=WorkerState.STOPPED)
    await moving.harness.beat("w3", capacity=64)
    await moving.harness.until(lambda: len([one for one in moving.again(release) if one.attempt == 2]) == len(sent))
    assert {order.moves for order in moving.again(release)} == {1}
    await moving.harness.end()


async def test_a_restarted_dispatcher_finds_releases_made_meanwhile() -> None:
    moving = Moving()
    release = await moving.taken_back()
    sent = moving.sent(release)
    await moving.harness.end()
    await moving.harness.start()
    await moving.beat(other(release.worker_id), awaits=None)
    await moving.beat(release.worker_id, *(let_go(order, 0, 1) for order in sent))
    await moving.harness.until(lambda: len(moving.again(release)) == len(sent))
    assert {order.moves for order in moving.again(release)} == {1}
    await moving.harness.end()


async def test_workers_are_asked_to_release_only_if_able_and_if_repack_is_set() -> None:
    for settings, fields in ((SETTINGS, {"released": None}), (SETTINGS.model_copy(update={"repack": False}), {})):
        moving = Moving(DispatcherHarness(settings=settings))
        await moving.harness.step(0)
        await moving.harness.start()
        for awaits in (None, version(1)):
            for worker in ("w0", "w1"):
                await moving.beat(worker, **({"awaits": awaits} | fields))
            await moving.harness.until(lambda: len(moving.harness.orders()) == 4)  # noqa: B023
            await moving.harness.settle()
        assert moving.harness.taken_back() == []
        await moving.harness.end()
