import asyncio
import random
from typing import Any

import pytest

from streamrl.bus.history import BusHistory, Extent
from streamrl.bus.memory import MemoryBus
from streamrl.bus.port import Outgoing, Subscription, TopicPartition
from streamrl.inspection.audit.audit import audit
from streamrl.inspection.audit.report import AuditReport, ViolationKind
from streamrl.schemas.errors import DataError
from streamrl.schemas.identifiers import make_trajectory_id
from streamrl.schemas.reports import SkipRecord
from streamrl.schemas.topics import CONTROL, DEAD_LETTERS, SKIPS, STEPS, TRAJECTORIES, UNGRADED, WORK_ORDERS
from streamrl.schemas.trajectories import WorkOrder
from tests.fakes.messages import work_order
from tests.fakes.topics import create_topics
from tests.inspection.audit.test_balance import REASONS, busy_world
from tests.inspection.audit.written_topics import RUN, WrittenTopics


async def _filled(world: WrittenTopics) -> MemoryBus:
    bus = create_topics(MemoryBus(), RUN, 3)
    publisher = await bus.publisher("p")
    for _, out in world.written:
        await publisher.submit(out)
    return bus


def order(group_id: str, *indices: int) -> WorkOrder:
    return work_order(samples=4).replace(group_id=group_id, sample_indices=indices)


async def test_a_run_is_audited_from_its_topics() -> None:
    world = busy_world(1)
    bus, told = await _filled(world), []
    publisher = await bus.publisher("p")
    produced = world.log[0][0]
    assert produced is not None
    group, _, index = produced.rpartition("/")
    for message in (order(group, int(index)), order("never/0", 0, 1, 2)):
        await publisher.publish(Outgoing.of(WORK_ORDERS.full_name(RUN), message, key=None, partition=5))
    headers = (("dlq-error-class", b"MalformedFrame"),)
    await publisher.publish(Outgoing(DEAD_LETTERS.full_name(RUN), b"x", None, 0, headers))
    verdict = await audit(BusHistory(bus), RUN, world.manifests, lambda *seen: told.append(seen))
    (own,) = verdict.algorithms
    assert verdict.is_balanced
    assert own.trained == len(world.current.trained)
    assert own.skipped_in_all == len(world.current.skipped)
    assert (verdict.orders, verdict.ordered, verdict.ordered_unproduced) == (2, 4, 3)
    assert verdict.dead_letters == {"MalformedFrame": 1}
    assert told[-1][1] == told[-1][2] == 1
    assert verdict.to_json()["total"]["produced"] == verdict.produced
    assert make_trajectory_id(group, int(index)) == produced


async def test_a_lost_record_is_named() -> None:
    world = busy_world(1)
    manifest = world.saved[-1].manifest
    partition, offset = world.pending()[0]
    frontier: dict[str, Any] = {**manifest.frontier, str(partition): {"low": offset + 1, "done": []}}
    world.saved[-1].manifest = manifest.model_copy(update={"frontier": frontier})
    verdict = await audit(BusHistory(await _filled(world)), RUN, world.manifests)
    lost = next(violation for violation in verdict.violations if violation.kind is ViolationKind.LOST)
    assert lost.trajectory_id == world.log[partition][offset]


async def test_a_missing_run_is_the_users_mistake() -> None:
    with pytest.raises(DataError, match="found none"):
        await audit(BusHistory(MemoryBus()), RUN, list)


async def test_an_undecodable_report_is_named() -> None:
    bus = await _filled(busy_world(0))
    await (await bus.publisher("p")).publish(Outgoing(STEPS.full_name(RUN), b"?", None, 0))
    with pytest.raises(DataError, match=r"steps\[0\]@"):
        await audit(BusHistory(bus), RUN, list)


async def test_rows_without_a_number_cannot_be_audited() -> None:
    world = busy_world(0)
    topic = SKIPS.full_name(RUN)
    row = world.records(SKIPS)[0].message()
    assert isinstance(row, SkipRecord)
    bus = await _filled(world)
    await (await bus.publisher("p")).publish(Outgoing.of(topic, row.replace(sequence=0, lineage=0), key=None))
    with pytest.raises(DataError, match="without a number"):
        await audit(BusHistory(bus), RUN, list)


@pytest.mark.parametrize("seed", range(4))
async def test_a_live_audit_raises_no_false_alarm(seed: int) -> None:
    """The trainer goes on, crashes and resumes at every await of the audit; half of the audits see it in the middle."""
    rng, world = random.Random(seed), WrittenTopics(partitions=3)
    bus = create_topics(MemoryBus(), RUN, 3)
    publisher = await bus.publisher("p")
    sent, visible = 0, 0

    async def catch_up() -> None:
        nonlocal sent
        while sent < len(world.written):
            await publisher.submit(world.written[sent][1])
            sent += 1
            await asyncio.sleep(0)

    async def live() -> None:
        nonlocal visible
        for turn in range(200):
            for _ in range(rng.randint(1, 6)):
                world.produce(f"d/{turn}/{rng.random()}/0", rng.randrange(3))
            await catch_up()
            pending = world.pending()
            rng.shuffle(pending)
            if turn % 4 == 3 and pending:
                world.skip(pending.pop(), rng.choice(REASONS))
            world.step(pending[:5])
            if turn % 3 == 2:
                await catch_up()  # rows are settled first
                world.checkpoint()
                visible = len(world.saved)
                await asyncio.sleep(0)
            if turn % 23 != 22:
                world.announce()
            else:
                world.restart(world.saved[-rng.randint(1, 2)])
                world.saved = [each for each in world.saved if each.manifest.policy_version <= world.current.parent]  # type: ignore[operator]
                visible = len(world.saved)
            await catch_up()

    verdicts: list[AuditReport] = []
    living = asyncio.create_task(live())

    class Interrupted(BusHistory):
        async def _extents_of(self, topic: str, subscription: Subscription) -> dict[TopicPartition, Extent]:
            for _ in range(rng.randint(1, 8)):
                await asyncio.sleep(0)
            return await super()._extents_of(topic, subscription)

    history = Interrupted(bus)
    while not living.done():
        verdict = await audit(history, RUN, lambda: world.manifests()[:visible])
        assert verdict.violations == (), [str(violation) for violation in verdict.violations]
        assert verdict.is_balanced
        verdicts.append(verdict)
    await living
    assert len({verdict.produced for verdict in verdicts}) > 10
    final = await audit(history, RUN, world.manifests)
    assert final.is_balanced
    assert final.algorithms[0].trained == len(world.current.trained)


async def test_an_audit_reads_topics_in_the_order_in_which_they_refer_to_each_other() -> None:
    asked: list[str] = []

    class Asked(BusHistory):
        async def _extents_of(self, topic: str, subscription: Subscription) -> dict[TopicPartition, Extent]:
            asked.append(topic)
            return await super()._extents_of(topic, subscription)

    def listed() -> list[object]:
        asked.append("checkpoints")
        return []

    await audit(Asked(await _filled(busy_world(0))), RUN, listed)  # type: ignore[arg-type]
    # Control says which instances there are: after their checkpoints, before their steps.
    topics = (CONTROL, STEPS, SKIPS, UNGRADED, TRAJECTORIES)
    assert asked[:6] == ["checkpoints", *(topic.full_name(RUN) for topic in topics)]


async def test_an_audit_that_fails_on_a_record_closes_its_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    bus = await _filled(busy_world(1))
    publisher = await bus.publisher("p")
    unnumbered = SkipRecord.model_validate(
        {"algorithm": "grpo", "reason": "stale", "trajectory_id": None, "group_id": None}
        | {"partition": 0, "offset": 0, "step": 1, "sent_at": 0.0}
    )
    await publisher.publish(Outgoing.of(SKIPS.full_name(RUN), unnumbered, key=None))
    held: list[Subscription] = []
    subscribe, let_go = bus.subscribe, list[Subscription]()

    async def noted(*arguments: object, **options: object) -> Subscription:
        subscription = await subscribe(*arguments, **options)  # type: ignore[arg-type]
        close = subscription.close

        async def closing() -> None:
            let_go.append(subscription)
            await close()

        monkeypatch.setattr(subscription, "close", closing)
        held.append(subscription)
        return subscription

    monkeypatch.setattr(bus, "subscribe", noted)
    with pytest.raises(DataError, match="expected numbered skip rows"):
        await audit(BusHistory(bus), RUN, list, lambda *_: None)
    assert held
    assert let_go == held, "a connection to a broker that stays open keeps uvloop from closing: the command hangs"
