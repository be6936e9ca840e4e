import asyncio
from collections.abc import Mapping
from contextlib import aclosing

import pytest

from streamrl.bus.history import BusHistory
from streamrl.bus.memory import MemoryBus
from streamrl.bus.port import Outgoing, TopicPartition
from streamrl.inspection.diagnostics.tail import At, Extents, Last, OffsetsSince, Since, Start, TopicReader, parse_start
from streamrl.schemas.errors import DataLossRefused, TopicMissing, UserError


async def filled(count: int = 6) -> MemoryBus:
    bus = MemoryBus()
    bus.create_topic("t", 2)
    publisher = await bus.publisher("w")
    for number in range(count):
        await publisher.publish(Outgoing("t", b"%d" % number, "k", number % 2))
        await asyncio.sleep(0.002)
    return bus


def since_by_reading(bus: MemoryBus) -> OffsetsSince:
    """What a broker is asked for: offsets by time, from a look at every record."""

    async def offsets_since(extents: Extents, moment: float) -> Mapping[TopicPartition, int]:
        found: dict[TopicPartition, int] = {}
        for topic in {tp.topic for tp in extents}:
            async for record in BusHistory(bus).records(topic):
                if record.timestamp >= moment:
                    found.setdefault(TopicPartition(record.topic, record.partition), record.offset)
        return found

    return offsets_since


def following(bus: MemoryBus, notes: list[str] | None = None, partitions: frozenset[int] | None = None) -> TopicReader:
    return TopicReader(bus, "t", since_by_reading(bus), (notes if notes is not None else []).append, partitions)


async def values(bus: MemoryBus, start: Start, partitions: frozenset[int] | None = None) -> list[int]:
    found = [record async for record in following(bus, None, partitions).records(start, follow=False)]
    return [int(record.value or b"") for record in found]


async def test_reading_starts_at_the_given_place_and_stops_at_the_end() -> None:
    bus = await filled()
    assert sorted(await values(bus, At(0))) == [0, 1, 2, 3, 4, 5]
    assert sorted(await values(bus, At(2))) == [4, 5]
    assert await values(bus, At(99)) == []
    assert await values(bus, Last(3)) == [3, 4, 5]
    assert await values(bus, Last(99)) == [0, 1, 2, 3, 4, 5]
    assert await values(bus, Last(0)) == []
    assert await values(bus, Last(2), frozenset({1})) == [3, 5]
    moment = bus.log("t").partitions[0][1].timestamp
    assert sorted(await values(bus, Since(moment))) == [2, 3, 4, 5]


async def test_following_delivers_what_comes() -> None:
    bus, got = await filled(), []
    publisher = await bus.publisher("w")
    async with aclosing(following(bus).records(Last(1), follow=True)) as records:
        async for record in records:
            got.append(int(record.value or b""))
            if len(got) == 3:
                break
            await publisher.publish(Outgoing("t", b"%d" % (10 + len(got)), "k", 0))
    assert got == [5, 11, 12]


class Forgetful(MemoryBus):
    """Its first subscription behind the beginning loses a record to retention."""

    told = False

    async def subscribe(self, topics, **options):  # type: ignore[no-untyped-def]
        start = options.get("start")
        if isinstance(start, dict) and not self.told:
            self.told = True
            (tp, position), *_ = sorted(start.items())
            raise DataLossRefused("gone", [(*tp, position, position + 1)])
        return await super().subscribe(topics, **options)


async def test_following_survives_gaps_and_outages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamrl.inspection.diagnostics.tail.RETRY_S", 0.0)
    bus = Forgetful()
    bus.create_topic("t", 1)
    publisher, notes = await bus.publisher("w"), list[str]()
    for number in range(4):
        await publisher.publish(Outgoing("t", b"%d" % number, "k", 0))
    got = []
    async with aclosing(following(bus, notes).records(At(1), follow=True)) as records:
        async for record in records:
            got.append(int(record.value or b""))
            if len(got) == 2:
                break
    assert got == [2, 3]
    assert notes == ["t[0]: 1 to 1 were deleted"]


async def test_a_missing_topic_or_partition_is_reported() -> None:
    bus = await filled()
    with pytest.raises(TopicMissing):
        await values(bus, At(0), frozenset({7}))


@pytest.mark.parametrize(
    ("text", "start"),
    [
        ("beginning", At(0)),
        ("latest", Last(0)),
        ("-100", Last(100)),
        ("42", At(42)),
        ("10m", Since(400.0)),
        ("1970-01-01T00:00:10+00:00", Since(10.0)),
    ],
)
def test_a_start_is_read(text: str, start: Start) -> None:
    assert parse_start(text, 1000.0) == start


@pytest.mark.parametrize("text", ["yesterday", "", "-", "-x", "-9999999", "10 parsecs"])
def test_an_invalid_start_is_refused(text: str) -> None:
    with pytest.raises(UserError):
        parse_start(text, 1000.0)
