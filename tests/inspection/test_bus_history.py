import contextlib
import uuid
from typing import Any

from streamrl.bus.history import NEIGHBOURS, BusHistory, ConnectedHistory, Extent
from streamrl.bus.kafka.bus import KafkaBus
from streamrl.bus.kafka.settings import KafkaSettings
from streamrl.bus.memory import MemoryBus
from streamrl.bus.port import Bus, Outgoing, Position, Record, TopicPartition
from tests.contract.topics import create_topic
from tests.progress import patience


async def _publish(bus: Bus, topic: str, partition: int, count: int) -> None:
    publisher = await bus.publisher("writer")
    for number in range(count):
        await publisher.submit(Outgoing(topic, b"%d" % number, f"k{number}", partition, (("h", b"\x00v"),)))
    await publisher.close()


async def _all(history: BusHistory, topic: str, ranges: dict[int, Extent] | None = None) -> list[Record]:
    return [record async for record in history.records(topic, ranges)]


def _places(records: list[Record]) -> list[tuple[int, int]]:
    return sorted((record.partition, record.offset) for record in records)


async def _filled(partitions: int = 3, count: int = 10) -> BusHistory:
    bus = MemoryBus()
    bus.create_topic("t", partitions)
    for partition in range(partitions - 1):
        await _publish(bus, "t", partition, count)
    return BusHistory(bus)


async def test_a_missing_topic_has_no_extents_and_no_records() -> None:
    history = BusHistory(MemoryBus())
    assert await history.extents("t") == {}
    assert await _all(history, "t") == []
    assert await history.fetch("t", [(0, 0)]) == {}


async def test_every_record_is_delivered_once_in_the_order_of_its_partition() -> None:
    history = await _filled()
    assert await history.extents("t") == {
        TopicPartition("t", 0): Extent(0, 10),
        TopicPartition("t", 1): Extent(0, 10),
        TopicPartition("t", 2): Extent(0, 0),
    }
    records = await _all(history, "t")
    assert len(records) == 20
    assert [record.offset for record in records if record.partition == 1] == list(range(10))


async def test_only_requested_offsets_are_delivered() -> None:
    history = await _filled()
    ranges = {0: Extent(3, 5), 1: Extent(8, 99), 2: Extent(0, 5), 7: Extent(0, 1)}
    assert _places(await _all(history, "t", ranges)) == [(0, 3), (0, 4), (1, 8), (1, 9)]
    assert await _all(history, "t", {0: Extent(50, 60), 8: Extent(0, 3)}) == []
    assert await _all(history, "t", {}) == []


async def test_several_topics_are_read_in_one_go_and_missing_ones_hold_nothing() -> None:
    history = await _filled()
    bus = history.bus
    assert isinstance(bus, MemoryBus)
    bus.create_topic("u", 1)
    await _publish(bus, "u", 0, 4)
    held = await history.extents("u", "missing", "t")
    assert held == await history.extents("u") | await history.extents("t")
    ranges = held | {TopicPartition("t", 0): Extent(6, 8), TopicPartition("missing", 0): Extent(0, 9)}
    del ranges[TopicPartition("t", 1)]
    read = [(record.topic, record.partition, record.offset) async for record in history.within(ranges)]
    assert sorted(read) == [("t", 0, 6), ("t", 0, 7), ("u", 0, 0), ("u", 0, 1), ("u", 0, 2), ("u", 0, 3)]


async def test_places_are_fetched_and_empty_ones_left_out() -> None:
    history = await _filled(count=3 * NEIGHBOURS)
    far = 3 * NEIGHBOURS - 1
    found = await history.fetch("t", [(0, 1), (0, 3), (0, far), (1, 2), (1, far + 5), (2, 0), (9, 0)])
    assert found.keys() == {(0, 1), (0, 3), (0, far), (1, 2)}
    assert found[0, far].value == b"%d" % far


async def test_reading_stops_at_the_ends_seen_at_the_start_though_the_log_grows() -> None:
    history = await _filled(partitions=2)
    seen = []
    async for record in history.records("t"):
        seen.append(record)
        if len(seen) < 50:
            await _publish(history.bus, "t", 0, 5)
    assert len(seen) == 10


async def test_on_a_broker_reading_ends_though_transaction_markers_stand_last(bootstrap_servers: str) -> None:
    topic = f"history-{uuid.uuid4().hex[:8]}"
    await create_topic(bootstrap_servers, topic, 2)
    bus = KafkaBus(KafkaSettings(bootstrap_servers=bootstrap_servers))
    history = BusHistory(bus)
    writer = await bus.transactional(f"{topic}-writer")
    await writer.commit([Outgoing(topic, b"one", "a", 0, (("h", b"\xff"),)), Outgoing(topic, b"two", None, 1)])
    await writer.commit([Outgoing(topic, b"three", "b", 0)])
    await writer.close()
    extents = await history.extents(topic)
    assert extents[TopicPartition(topic, 0)] == Extent(0, 4)
    async with patience(10):
        records = await _all(history, topic)
        fetched = await history.fetch(topic, [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0)])
    assert sorted(record.value or b"" for record in records) == [b"one", b"three", b"two"]
    assert fetched.keys() == {(0, 0), (0, 2), (1, 0)}
    assert fetched[0, 0].headers == (("h", b"\xff"),)
    assert fetched[0, 0].key == "a"
    assert await history.extents(f"{topic}-missing") == {}
    assert await history.extents(f"{topic}-missing", topic) == extents
    async with patience(10):
        first = [record async for record in history.within({TopicPartition(topic, 0): Extent(0, 2)})]
    assert first == [fetched[0, 0]]
    assert await _all(history, topic, {0: Extent(2, 99), 1: Extent(7, 9), 5: Extent(0, 1)}) == [fetched[0, 2]]
    assert await _all(history, topic, {5: Extent(0, 1)}) == []
    async with patience(10), contextlib.aclosing(history.records(topic)) as left_early:
        assert await anext(left_early)


async def test_a_kept_connection_never_changes_an_answer() -> None:
    bus = MemoryBus()
    bus.create_topic("kept.a", 3)
    bus.create_topic("kept.b", 1)
    publisher = await bus.publisher("p")
    for number in range(30):
        await publisher.publish(Outgoing("kept.a", str(number).encode(), None, number % 3))
        await publisher.publish(Outgoing("kept.b", str(number).encode(), None, 0))
    opened = []
    subscribe = bus.subscribe

    async def counted(topics: Any, **options: Any) -> Any:
        opened.append(tuple(topics))
        return await subscribe(topics, **options)

    bus.subscribe = counted  # type: ignore[method-assign]
    plain, kept = BusHistory(bus), ConnectedHistory(bus, ["kept.a", "kept.b"], "kept")
    positions = [
        Position("kept.a", 2, 3),
        Position("kept.b", 0, 7),
        Position("kept.a", 0, 9),
        Position("kept.b", 0, 29),
    ]
    ranges = {TopicPartition("kept.a", 1): Extent(2, 5), TopicPartition("kept.b", 0): Extent(0, 3)}
    expected = await plain.fetch_all(positions)
    read = [record async for record in plain.within(ranges)]
    opened.clear()
    for _ in range(2):
        assert await kept.fetch_all(positions) == expected
        assert sorted([record async for record in kept.within(ranges)]) == sorted(read)
        assert await kept.extents("kept.b", "kept.a") == await plain.extents("kept.b", "kept.a")
    # One is kept; the others are the plain history's, to compare with.
    assert sorted(len(topics) for topics in opened) == [2, 2, 2]
    # What is beyond the end, or fails over the connection, is asked over a new one.
    assert kept._subscription is not None
    await kept._subscription.close()
    assert await kept.fetch_all(positions) == expected
    assert await kept.fetch_all([Position("kept.b", 0, 99), Position("kept.b", 0, 1)]) == await plain.fetch_all(
        [Position("kept.b", 0, 1)]
    )
    await kept.close()


async def test_a_kept_connection_reads_what_a_new_one_reads_on_a_broker(bootstrap_servers: str) -> None:
    topic = f"kept-{uuid.uuid4().hex[:8]}"
    await create_topic(bootstrap_servers, topic, 3)
    bus = KafkaBus(KafkaSettings(bootstrap_servers=bootstrap_servers))
    for partition in range(3):
        await _publish(bus, topic, partition, 50)
    plain, kept = BusHistory(bus), ConnectedHistory(bus.for_single_records(), [topic], "kept", bulk=bus)
    positions = [Position(topic, 0, 7), Position(topic, 2, 49), Position(topic, 1, 0), Position(topic, 0, 30)]
    try:
        for _ in range(2):
            assert await kept.extents(topic) == await plain.extents(topic)
            found = await kept.fetch_all(positions)
            assert found == await plain.fetch_all(positions)
            assert len(found) == 4
        assert kept._subscription is not None
        assert await kept.fetch_all([Position(topic, 0, 500)]) == {}
        await _publish(bus, topic, 1, 1)
        (last,) = (await kept.fetch_all([Position(topic, 1, 50)])).values()
        assert last.value == b"0"
    finally:
        await kept.close()
