from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from streamrl.bus.history import BusHistory, Extent
from streamrl.bus.memory import MemoryBus
from streamrl.bus.port import Outgoing, Record, TopicPartition
from streamrl.inspection import export as exporting
from streamrl.inspection.audit.audit import audit
from streamrl.inspection.export import (
    ALL,
    MANIFEST,
    USUAL,
    Exporter,
    Format,
    SegmentHistory,
    read_segment,
    write_segment,
)
from streamrl.inspection.trajectory_columns import Trained
from streamrl.schemas.codec import encode, headers_of
from streamrl.schemas.errors import DataError
from streamrl.schemas.topics import HEARTBEATS, TRAJECTORIES
from tests.consumers.factories import trajectory
from tests.fakes.topics import create_topics
from tests.inspection.audit.test_balance import busy_world
from tests.inspection.audit.written_topics import RUN

FORMATS: tuple[Format, ...] = ("parquet", "jsonl")
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
records = st.builds(
    Record,
    st.just("t"),
    st.integers(0, 3),
    st.integers(0, 2**40),
    st.none() | texts,
    st.none() | st.binary(max_size=200),
    st.lists(st.tuples(texts, st.binary(max_size=30)), max_size=4).map(tuple),
    st.floats(0, 4e9, allow_nan=False),
)


@pytest.mark.parametrize("encoding", FORMATS)
@given(st.lists(records, max_size=8))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_segment_gives_back_the_records_byte_by_byte(encoding: Format, tmp_path: Path, written: list[Record]) -> None:
    path = tmp_path / f"s.{encoding}"
    write_segment(path, written, encoding, {})
    assert read_segment(path, "t", encoding) == written


async def _bus() -> MemoryBus:
    bus = create_topics(MemoryBus(), RUN, 3)
    publisher = await bus.publisher("p")
    for _, out in busy_world(0).written:
        await publisher.submit(out)
    await publisher.submit(Outgoing(HEARTBEATS.full_name(RUN), b"beat", "w", 0))
    return bus


async def _all(
    history: BusHistory | SegmentHistory, topic: str, ranges: dict[int, Extent] | None = None
) -> list[Record]:
    return sorted([record async for record in history.records(topic, ranges)], key=lambda r: (r.partition, r.offset))


@pytest.mark.parametrize("encoding", FORMATS)
async def test_an_export_shows_the_same_history_as_the_bus(
    encoding: Format, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporting, "SEGMENT_RECORDS", 50)
    source = BusHistory(await _bus())
    to = tmp_path / "out"
    manifest = await Exporter(source, RUN, Path("runs/x/config.toml"), to, encoding).export(USUAL, [])
    assert len(manifest.topics[TRAJECTORIES.full_name(RUN)].files) > 3
    assert sum(file.records for file in manifest.topics[TRAJECTORIES.full_name(RUN)].files) > 150
    read = SegmentHistory(to)
    for topic in USUAL:
        name = topic.full_name(RUN)
        assert await read.extents(name) == await source.extents(name)
        assert await _all(read, name) == await _all(source, name)
    name = TRAJECTORIES.full_name(RUN)
    ranges = {0: Extent(5, 60), 2: Extent(40, 41)}
    assert await _all(read, name, ranges) == await _all(source, name, ranges)
    names = [topic.full_name(RUN) for topic in USUAL]
    held = await read.extents(*names)
    assert held == await source.extents(*names)
    within = [sorted([record async for record in history.within(held)]) for history in (read, source)]
    assert within[0] == within[1]
    assert {record.topic for record in within[0]} > {name}
    places = [(0, 0), (1, 33), (2, 5), (2, 9999), (8, 0)]
    assert await read.fetch(name, places) == await source.fetch(name, places)
    assert await read.extents(HEARTBEATS.full_name(RUN)) == {}
    assert await _all(read, HEARTBEATS.full_name(RUN)) == []


async def test_an_export_is_a_moment_of_the_run(tmp_path: Path) -> None:
    """The run takes a step, and writes a checkpoint, each time that the export asks where a topic ends."""
    world, bus = busy_world(0), await _bus()
    publisher, before = await bus.publisher("p"), world.manifests()

    class Living(BusHistory):
        async def extents(self, *topics: str) -> dict[TopicPartition, Extent]:
            sent = len(world.written)
            world.step([world.produce(f"d/{sent}/0/0", 0)])
            world.checkpoint()
            world.announce()
            for _, out in world.written[sent:]:
                await publisher.submit(out)
            return await super().extents(*topics)

    manifest = await Exporter(Living(bus), RUN, Path("c"), tmp_path).export(USUAL, before)
    report = await audit(SegmentHistory(tmp_path), RUN, lambda: manifest.checkpoints)
    assert report.is_balanced, report.violations


async def test_every_topic_can_be_exported(tmp_path: Path) -> None:
    await Exporter(BusHistory(await _bus()), RUN, Path("c"), tmp_path).export(ALL, [])
    assert await SegmentHistory(tmp_path).extents(HEARTBEATS.full_name(RUN)) == {
        TopicPartition(HEARTBEATS.full_name(RUN), 0): Extent(0, 1)
    }


async def test_an_export_asks_for_advantages_once_and_only_for_columns(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    asked = []

    async def trained() -> dict[tuple[int, int], Trained]:
        asked.append(1)
        return {(0, 0): Trained(1, 0.25)}

    bus = create_topics(MemoryBus(), RUN, 3)
    publisher = await bus.publisher("p")
    for partition in (0, 0, 1):
        await publisher.submit(Outgoing.of(TRAJECTORIES.full_name(RUN), trajectory(), key="g", partition=partition))
    for encoding in FORMATS:
        exporter = Exporter(BusHistory(bus), RUN, Path("c"), tmp_path / encoding, encoding, trained=trained)
        await exporter.export(USUAL, [])
    assert asked == [1]
    rows = pq.read_table(tmp_path / "parquet" / "trajectories" / "00000.parquet").to_pylist()
    told = {(row["partition"], row["offset"]): row["advantage"] for row in rows}
    assert told == {(0, 0): 0.25, (0, 1): None, (1, 0): None}


async def test_a_changed_segment_is_refused_by_name(tmp_path: Path) -> None:
    await Exporter(BusHistory(await _bus()), RUN, Path("c"), tmp_path).export([TRAJECTORIES], [])
    path = tmp_path / "trajectories" / "00000.parquet"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match="00000"):
        await _all(SegmentHistory(tmp_path), TRAJECTORIES.full_name(RUN))


async def test_a_manifest_that_leads_out_of_the_export_is_refused(tmp_path: Path) -> None:
    to = tmp_path / "out"
    await Exporter(BusHistory(await _bus()), RUN, Path("c"), to, "jsonl").export([TRAJECTORIES], [])
    content = (to / MANIFEST).read_text().replace("trajectories/00000.jsonl", "../00000.jsonl")
    (to / "trajectories/00000.jsonl").rename(tmp_path / "00000.jsonl")
    (to / MANIFEST).write_text(content)
    with pytest.raises(DataError, match="inside"):
        await _all(SegmentHistory(to), TRAJECTORIES.full_name(RUN))


async def test_no_manifest_means_no_export(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="complete export"):
        SegmentHistory(tmp_path)
    (tmp_path / MANIFEST).write_text("{}")
    with pytest.raises(DataError, match="manifest of an export"):
        SegmentHistory(tmp_path)


async def test_a_directory_that_is_not_empty_and_a_run_that_is_not_there_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="--out"):
        await Exporter(BusHistory(await _bus()), RUN, Path("c"), tmp_path).export(USUAL, [])
    with pytest.raises(DataError, match="found none"):
        await Exporter(BusHistory(MemoryBus()), RUN, Path("c"), tmp_path / "new").export(USUAL, [])


def test_a_parquet_segment_shows_trajectories_to_other_tools(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    shown, path = trajectory(), tmp_path / "s.parquet"
    good = Record("t", 0, 0, "k", encode(shown), headers_of(shown), 1.0)
    write_segment(path, [good, good._replace(offset=1, value=b"bad")], "parquet", {(0, 0): Trained(4, -0.5)})
    rows = pq.read_table(path).to_pylist()
    assert (rows[0]["completion"], rows[0]["length"]) == (shown.completion_text, len(shown.token_ids))
    assert dict(rows[0]["rewards"]) == shown.rewards
    assert rows[0]["token_ids"] == shown.token_ids.tolist()
    assert rows[0]["logprobs"] == shown.logprobs.tolist()
    assert rows[0]["finish_reason"] == shown.finish_reason.value
    assert (rows[0]["advantage"], rows[1]["advantage"]) == (-0.5, None)
    assert rows[1]["trajectory_id"] is rows[1]["token_ids"] is None
