"""A reader on a bus that fails: the trainer learns of it, and displays do without."""

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from streamrl.bus.memory import MemoryBus, MemoryPublisher, MemorySubscription
from streamrl.bus.port import Outgoing, Position, Record, TopicPartition
from streamrl.consumers.ingest.limits import IntakeLimits
from streamrl.consumers.ingest.metrics import ENDS_RETRY_S, LOOK_S
from streamrl.schemas.errors import BusError, BusUnavailable, LifecycleError, StreamRLError
from streamrl.schemas.reports import SkipReason
from streamrl.schemas.topics import SKIPS
from tests.consumers.factories import trajectory
from tests.consumers.ingest.reader_harness import RUN, ReaderHarness, next_group, refs_of
from tests.progress import within


class FailingOperations(MemoryBus):
    """Raises ``errors[name]`` in the operation of that name, once it is set."""

    errors: dict[str, Exception]

    def __init__(self) -> None:
        super().__init__()
        self.errors = {}
        self.asked = Counter[str]()

    def check(self, name: str) -> None:
        self.asked[name] += 1
        if name in self.errors:
            raise self.errors[name]

    async def subscribe(self, *args: Any, **options: Any) -> "FailingReads":
        found = await super().subscribe(*args, **options)
        return FailingReads(self, found.offsets, found.group_id)

    async def publisher(self, client_id: str) -> "FailingSkips":
        return FailingSkips(self, client_id)


class FailingReads(MemorySubscription):
    bus: FailingOperations

    async def poll(self, *, max_records: int = 500, timeout_s: float = 1.0) -> list[Record]:
        self.bus.check("poll")
        return await super().poll(max_records=max_records, timeout_s=min(timeout_s, 0.01))

    async def end_offsets(self, partitions: Iterable[TopicPartition] | None = None) -> dict[TopicPartition, int]:
        self.bus.check("end_offsets")
        return await super().end_offsets(partitions)

    async def commit(self, offsets: Mapping[TopicPartition, int]) -> None:
        self.bus.check("commit")
        await super().commit(offsets)


class FailingSkips(MemoryPublisher):
    bus: FailingOperations

    async def submit(self, record: Outgoing) -> "asyncio.Future[Position]":
        if record.topic == SKIPS.full_name(RUN):
            self.bus.check("skips")
        return await super().submit(record)


def failing_reader() -> tuple[ReaderHarness, FailingOperations]:
    bus = FailingOperations()
    return ReaderHarness(bus), bus


@pytest.mark.parametrize(
    ("error", "expected", "text"),
    [
        (BusError("the log is gone"), BusError, "the log is gone"),
        (ZeroDivisionError("our mistake"), StreamRLError, "ZeroDivisionError.*our mistake"),
    ],
)
async def test_an_error_of_the_reader_ends_the_wait_for_a_group(
    error: Exception, expected: type[StreamRLError], text: str
) -> None:
    harness, bus = failing_reader()
    async with harness.running(harness.reader()) as reader:
        waiting = asyncio.create_task(reader.next_group())
        await asyncio.sleep(0.02)
        bus.errors["poll"] = error
        with pytest.raises(expected, match=text):
            await within(waiting, 5)


async def test_a_cancelled_reader_ends_the_wait_for_a_group() -> None:
    harness = ReaderHarness()
    reader = harness.reader()
    reading = asyncio.create_task(reader.run(asyncio.Event()))
    waiting = asyncio.create_task(reader.next_group())
    await asyncio.sleep(0.02)
    reading.cancel()
    with pytest.raises(StreamRLError, match="CancelledError"):
        await within(waiting, 5)
    await asyncio.wait({reading})
    assert reading.cancelled()


async def test_a_failed_reader_refuses_even_the_groups_that_are_ready() -> None:
    """What is trained after the reader died could never be accounted for."""
    harness, bus = failing_reader()
    async with harness.running(harness.reader()) as reader:
        await harness.publish_group(0)
        await harness.until_read(reader, 2)
        bus.errors["poll"] = BusUnavailable("gone")
        await asyncio.sleep(0.05)
        with pytest.raises(BusUnavailable):
            await next_group(reader)


async def test_no_checkpoint_can_be_taken_of_a_row_that_cannot_be_written() -> None:
    harness, bus = failing_reader()
    bus.errors["skips"] = BusUnavailable("no room")
    async with harness.running(harness.reader()) as reader:
        await harness.publish(trajectory("d/0/0", 0), trajectory("d/0/0", 0))
        with pytest.raises(BusUnavailable, match="no room"):
            await next_group(reader)
        with pytest.raises(BusUnavailable, match="no room"):
            await reader.flush()
    assert harness.skips() == []


async def test_a_silent_broker_costs_only_the_lag_display() -> None:
    harness, bus = failing_reader()
    async with harness.running(harness.reader()) as reader:
        await harness.publish_group(0)
        await harness.until_read(reader, 2)
        bus.errors |= {"end_offsets": BusUnavailable("silent")}
        harness.now += LOOK_S
        await harness.publish_group(1)
        for _ in range(2):
            reader.ledger.mark_trained(refs_of(await next_group(reader)))
        assert set((await reader.lag()).values()) == {0}
        asked = bus.asked["end_offsets"]
        bus.errors.clear()
        await harness.publish_group(2)
        await next_group(reader)
        assert bus.asked["end_offsets"] == asked  # reading does not wait for it again at once
        harness.now += ENDS_RETRY_S
        await harness.until(lambda: bus.asked["end_offsets"] > asked)


async def test_measuring_metrics_sends_no_request_to_the_broker() -> None:
    harness, bus = failing_reader()
    async with harness.running(harness.reader()) as reader:
        await harness.publish_group(0)
        await next_group(reader)
        asked = dict(bus.asked)
        measured = reader.metrics()
        with pytest.raises(StopIteration):
            measured.send(None)  # it never lets go of the event loop
        assert bus.asked == asked


async def test_a_group_is_finished_once_and_only_if_it_was_handed_out() -> None:
    harness = ReaderHarness()
    async with harness.running(harness.reader()) as reader:
        await harness.publish_group(0)
        group = await next_group(reader)
        reader.ledger.mark_skipped(group, SkipReason.ZERO_ADVANTAGE, "equal")
        with pytest.raises(LifecycleError, match="handed out"):
            reader.ledger.mark_trained(refs_of(group))
        with pytest.raises(LifecycleError, match="handed out"):
            reader.ledger.mark_skipped(group, SkipReason.STALE, "again")
        assert (reader.ledger.counts().skipped, reader.ledger.counts().trained) == (2, 0)


async def test_when_too_much_is_bad_the_rows_that_say_why_are_on_the_topic() -> None:
    harness = ReaderHarness()
    async with harness.running(harness.reader(limits=IntakeLimits(max_consecutive_faults=3))) as reader:
        for _ in range(4):
            await harness.send(Outgoing(harness.topic, b"junk", None, 0))
        with pytest.raises(StreamRLError, match="undecodable"):
            await next_group(reader)
    assert [skip.reason for skip in harness.skips()] == [SkipReason.POISON] * 4
