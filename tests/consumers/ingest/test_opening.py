"""What a reader does when the topic is not as its checkpoint left it."""

import asyncio
from collections.abc import Iterable

import pytest

from streamrl.bus.memory import MemoryBus, MemorySubscription
from streamrl.bus.port import TopicPartition
from streamrl.consumers.ingest.reader import ReaderSnapshot
from streamrl.schemas.errors import DataLossRefused
from streamrl.schemas.reports import SkipReason
from tests.consumers.ingest.reader_harness import ReaderHarness, checkpoint, next_group, refs_of


class ExpiringBus(MemoryBus):
    """Forgets the records before ``first[partition]``, as retention does. ``is_silent``: delivers nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first: dict[int, int] = {}
        self.is_silent = False

    def check(self, offsets: dict[TopicPartition, int]) -> None:
        holes = [
            (tp.topic, tp.partition, offset, self.first[tp.partition])
            for tp, offset in offsets.items()
            if offset < self.first.get(tp.partition, 0)
        ]
        if holes:
            raise DataLossRefused(f"expected offset {holes[0][2]}, it is gone", holes)

    async def subscribe(self, *args: object, **options: object) -> "ExpiringSubscription":
        found = await super().subscribe(*args, **options)  # type: ignore[arg-type]
        self.check(found.offsets)
        return ExpiringSubscription(self, found.offsets, found.group_id)


class ExpiringSubscription(MemorySubscription):
    bus: ExpiringBus

    async def poll(self, *, max_records: int = 500, timeout_s: float = 1.0) -> list[object]:  # type: ignore[override]
        if self.bus.is_silent:
            await asyncio.sleep(0.005)
            return []
        self.bus.check(self.offsets)
        return list(await super().poll(max_records=max_records, timeout_s=min(timeout_s, 0.01)))

    async def beginning_offsets(self, partitions: Iterable[TopicPartition] | None = None) -> dict[TopicPartition, int]:
        return {tp: self.bus.first.get(tp.partition, 0) for tp in await super().beginning_offsets(partitions)}


async def after_two_groups(harness: ReaderHarness) -> ReaderSnapshot:
    """Groups 0 and 1 are finished, group 2 is read and not."""
    for number in range(3):
        await harness.publish_group(number)
    async with harness.running(harness.reader()) as reader:
        reader.ledger.mark_trained(refs_of(await next_group(reader), await next_group(reader)))
        await harness.until_read(reader, 6)
        return checkpoint(reader)


async def test_records_that_retention_deleted_unread_end_the_trainer() -> None:
    bus = ExpiringBus()
    harness = ReaderHarness(bus)
    kept = await after_two_groups(harness)
    bus.first[0] = 6
    reader = harness.reader(kept)
    async with harness.running(reader):
        with pytest.raises(
            DataLossRefused, match=r"r.trajectories/0 offsets 4 to 5 .*--ingest.accept_loss true"
        ) as told:
            await next_group(reader)
    assert (told.value.exit_code, told.value.holes) == (4, ((harness.topic, 0, 4, 6),))
    assert harness.skips() == []


async def test_an_accepted_hole_gets_one_row_and_reading_continues_after_it() -> None:
    bus = ExpiringBus()
    harness = ReaderHarness(bus)
    kept = await after_two_groups(harness)
    bus.first[0] = 6
    await harness.publish_group(3)
    async with harness.running(harness.reader(kept, accept_loss=True)) as reader:
        reader.ledger.mark_trained(refs_of(await next_group(reader)))
        await reader.flush()
        assert reader.ledger.frontier.lows()[0] == 8
    (skip,) = harness.skips()
    assert (skip.reason, skip.offset, skip.end_offset) == (SkipReason.RETENTION_EXPIRED, 4, 6)
    assert (skip.trajectory_id, skip.group_id) == (None, None)


@pytest.mark.parametrize("accepted", [True, False])
async def test_a_hole_that_opens_while_reading_is_treated_alike(accepted: bool) -> None:
    bus = ExpiringBus()
    harness = ReaderHarness(bus)
    async with harness.running(harness.reader(accept_loss=accepted)) as reader:
        await harness.publish_group(0)
        group = await next_group(reader)
        bus.is_silent = True
        await asyncio.sleep(0.02)
        for number in range(1, 4):
            await harness.publish_group(number)
        bus.first[0], bus.is_silent = 6, False
        if not accepted:
            with pytest.raises(DataLossRefused, match="offsets 2 to 5"):
                await next_group(reader)
            return
        other = await next_group(reader)
        assert other.group_id == "d/3/0"
        kept = checkpoint(reader)
        assert kept.frontier.to_json()["0"] == {"low": 0, "done": [], "passed": [[2, 6]]}
        reader.ledger.mark_trained(refs_of(group, other))
        assert reader.ledger.frontier.lows()[0] == 8
        await reader.flush()
    assert [(skip.offset, skip.end_offset) for skip in harness.skips()] == [(2, 6)]


async def test_a_recreated_topic_is_recognised_by_a_record_below_the_frontier() -> None:
    harness = ReaderHarness()
    kept = await after_two_groups(harness)
    harness.bus.logs[harness.topic].partitions[0].clear()
    for number in range(10, 14):
        await harness.publish_group(number)
    reader = harness.reader(kept, accept_loss=True)
    async with harness.running(reader):
        with pytest.raises(
            DataLossRefused, match=r"'d/1/0/1' at offset 3 .*'d/11/0/1'.* deleted and recreated"
        ) as told:
            await next_group(reader)
    assert told.value.exit_code == 4


async def test_a_topic_that_ends_before_the_frontier_was_recreated() -> None:
    harness = ReaderHarness()
    kept = await after_two_groups(harness)
    harness.bus.logs[harness.topic].partitions[0].clear()
    reader = harness.reader(kept, accept_loss=True)
    async with harness.running(reader):
        with pytest.raises(DataLossRefused, match=r"expected 4 records in r.trajectories/0.*got 0: .*recreated"):
            await next_group(reader)


async def test_an_anchor_that_retention_deleted_is_not_looked_for() -> None:
    bus = ExpiringBus()
    harness = ReaderHarness(bus)
    kept = await after_two_groups(harness)
    bus.first[0] = 4
    async with harness.running(harness.reader(kept)) as reader:
        assert (await next_group(reader)).group_id == "d/2/0"
    assert kept.known_records[0].offset == 3


@pytest.mark.parametrize("accepted", [True, False])
async def test_records_deleted_from_a_partition_that_was_never_read_are_noticed(accepted: bool) -> None:
    bus = ExpiringBus()
    harness = ReaderHarness(bus)
    for number in range(3):
        await harness.publish_group(number, partition=2)
    bus.first[2] = 4
    async with harness.running(harness.reader(accept_loss=accepted)) as reader:
        if not accepted:
            with pytest.raises(DataLossRefused, match="offsets 0 to 3"):
                await next_group(reader)
            return
        assert (await next_group(reader)).group_id == "d/2/0"
        await reader.flush()
    assert [(skip.partition, skip.offset, skip.end_offset) for skip in harness.skips()] == [(2, 0, 4)]
