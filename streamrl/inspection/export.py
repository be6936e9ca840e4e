"""Exports: a run's topics as segment files (Parquet or JSON lines), and a history that is read from them.

An export is byte-exact: a command reads a run from it just as from a broker. Parquet segments of trajectories have the
bytes and, for people and query engines, the columns of the Python API's table, including token ids and log-probs. Only
the bytes are read back. The manifest is written last, so its presence means that the export is complete. A file whose
checksum differs from the manifest's is refused.

Invariant an_export_is_a_moment_of_the_run: an export contains every record that its records and checkpoints refer to.
For this, checkpoints are listed before the ends of the topics are fixed. The end of a topic is fixed before the ends
of the topics that its records refer to.
"""

import base64
import hashlib
import json
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from streamrl.bus.history import Extent, History
from streamrl.bus.port import Position, Record, TopicPartition
from streamrl.bus.waiting import in_thread
from streamrl.consumers.training.checkpoints.manifest import CheckpointManifest
from streamrl.inspection.scopes import scopes_of
from streamrl.schemas.errors import DataError
from streamrl.schemas.extras import require_extra
from streamrl.schemas.files import sha256_of
from streamrl.schemas.identifiers import policy_in
from streamrl.schemas.topics import (
    COMMANDS,
    CONTROL,
    DEAD_LETTERS,
    EVALUATION_SAMPLES,
    EVALUATIONS,
    HEARTBEATS,
    INSTANCE_TOPICS,
    PARTIAL_TRAJECTORIES,
    SKIPS,
    STEPS,
    TOKENS,
    TRAJECTORIES,
    UNGRADED,
    WORK_ORDERS,
    Topic,
)
from streamrl.schemas.weights import Sha256

if TYPE_CHECKING:
    from streamrl.inspection.trajectory_columns import Place, Trained

    ReadTrained = Callable[[], Awaitable[Mapping[Place, Trained]]]

MANIFEST = "manifest.json"
Format = Literal["parquet", "jsonl"]
Progress = Callable[[str, int, int], None]
USUAL = (STEPS, SKIPS, TRAJECTORIES, DEAD_LETTERS, CONTROL, COMMANDS, WORK_ORDERS)
"""Topics that audit, replay and report need. Each comes before the topics that its records refer to."""
ALL = (*USUAL, HEARTBEATS, TOKENS, PARTIAL_TRAJECTORIES, UNGRADED, EVALUATIONS, EVALUATION_SAMPLES)
SEGMENT_BYTES, SEGMENT_RECORDS = 32 << 20, 20_000
"""Largest size of a segment, in bytes of values and in records: the first limit reached ends it. A segment is held in
memory as a whole when it is written or read."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class SegmentFile(_Part):
    """One file of a topic: its path within the export, and the range of its records' offsets by partition."""

    path: str
    records: int
    size: int
    sha256: Sha256
    extents: dict[int, Extent]


class ExportedTopic(_Part):
    """``extents``: the offsets that the topic held, by partition, also empty ones; ``files``: in order of reading."""

    extents: dict[int, Extent]
    files: tuple[SegmentFile, ...]


class ExportManifest(_Part):
    """``topics``: by full name. ``checkpoints``: the run's manifests, listed before the topics were read.

    ``config``: path of the run's resolved settings, in the run's directory. The checkpoints themselves stay there.
    """

    format: Literal[1] = 1
    run: str
    config: str
    encoding: Format
    created_at: float
    topics: dict[str, ExportedTopic]
    checkpoints: tuple[CheckpointManifest, ...] = ()


def write_manifest(directory: Path, manifest: ExportManifest) -> None:
    """Write the manifest durably, which makes the export complete."""
    draft = directory / f".{MANIFEST}"
    with draft.open("w") as file:
        file.write(manifest.model_dump_json(indent=1))
        # On disk before the renaming: otherwise a power cut could leave an empty file under the final name.
        file.flush()
        os.fsync(file.fileno())
    # Renaming is atomic: a reader finds no manifest or a complete one.
    draft.replace(directory / MANIFEST)


def read_manifest(directory: Path) -> ExportManifest:
    """The manifest of an export.

    Raises:
        DataError: there is no complete export in this directory.
    """
    try:
        return ExportManifest.model_validate_json((directory / MANIFEST).read_bytes())
    except FileNotFoundError as error:
        raise DataError(f"expected a complete export with {MANIFEST} in {directory}, found none") from error
    except (OSError, ValidationError) as error:
        raise DataError(f"expected the manifest of an export in {directory}, got {error}") from error


@dataclass
class _Segment:
    """Records for the next file."""

    records: list[Record] = field(default_factory=list)
    size: int = 0

    def add(self, record: Record) -> bool:
        """Add a record; true if the file should be written now."""
        self.records.append(record)
        self.size += len(record.value or b"")
        return self.size >= SEGMENT_BYTES or len(self.records) >= SEGMENT_RECORDS


@dataclass(frozen=True)
class Exporter:
    """``to``: a directory that is empty or does not exist yet. ``config``: path of the run's configuration.

    ``trained``: reads which trajectories were trained, for the columns of Parquet files; None: these columns are empty.
    """

    history: History
    run: str
    config: Path
    to: Path
    encoding: Format = "parquet"
    progress: Progress = lambda topic, done, total: None
    trained: "ReadTrained | None" = None

    async def export(self, topics: Sequence[Topic], checkpoints: Sequence[CheckpointManifest]) -> ExportManifest:
        """Write the topics, and those of attached instances. Topics that do not exist are left out.

        Raises:
            DataError: the directory is not empty or cannot be written, or there is no such run.
            BusUnavailable: the topics cannot be read.
        """
        _check_parquet(self.encoding)
        self._check_empty()
        # Steps before trajectories: a report refers to older records, which lie within ends that are fixed later. An
        # instance's topics come first, because their records refer to those of the run.
        scopes = await scopes_of(self.history, self.run)
        wanted = [(scope, topic) for scope in scopes for topic in topics if topic in INSTANCE_TOPICS]
        wanted += [(self.run, topic) for topic in sorted(topics, key=ALL.index)]
        held = {(scope, topic): await self._extents(topic.full_name(scope)) for scope, topic in wanted}
        if not any(held.values()):
            raise DataError(f"expected the topics of run {self.run!r}, found none: check its name and the broker")
        exported = {}
        for scope, topic in wanted:
            if extents := held[scope, topic]:
                exported[topic.full_name(scope)] = ExportedTopic(
                    extents=extents, files=tuple([file async for file in self._files(scope, topic, extents)])
                )
        manifest = ExportManifest(
            run=self.run,
            config=str(self.config),
            encoding=self.encoding,
            created_at=time.time(),
            topics=exported,
            checkpoints=tuple(checkpoints),
        )
        write_manifest(self.to, manifest)
        return manifest

    def _check_empty(self) -> None:
        try:
            self.to.mkdir(parents=True, exist_ok=True)
            occupied = next(self.to.iterdir(), None)
        except OSError as error:
            raise DataError(f"expected a writable directory for the export, got {self.to}: {error.strerror}") from error
        # Files of two exports in one directory would be read as one export.
        if occupied is not None:
            content = "a complete export" if (self.to / MANIFEST).exists() else occupied.name
            raise DataError(f"expected an empty directory, {self.to} holds {content}; name another with --out")

    async def _extents(self, name: str) -> dict[int, Extent]:
        found = await self.history.extents(name)
        return {tp.partition: extent for tp, extent in found.items()}

    async def _files(self, scope: str, topic: Topic, extents: dict[int, Extent]) -> AsyncIterator[SegmentFile]:
        policy = policy_in(scope)
        folder = topic.name if policy is None else f"{topic.name}-{policy}"
        name, total = topic.full_name(scope), sum(extent.end - extent.first for extent in extents.values())
        trained = await self._trained() if topic is TRAJECTORIES else None
        segment, number, done = _Segment(), 0, 0
        self.progress(name, 0, total)
        async for record in self.history.records(name, extents):
            if segment.add(record):
                # In a thread: compression would block the event loop, and with it the connection to the broker.
                yield await in_thread(self._write, folder, number, segment.records, trained)
                done += len(segment.records)
                self.progress(name, done, total)
                segment, number = _Segment(), number + 1
        if segment.records:
            yield await in_thread(self._write, folder, number, segment.records, trained)
        self.progress(name, total, total)

    async def _trained(self) -> "Mapping[Place, Trained]":
        return {} if self.trained is None or self.encoding != "parquet" else await self.trained()

    def _write(
        self, name: str, number: int, records: Sequence[Record], trained: "Mapping[Place, Trained] | None"
    ) -> SegmentFile:
        folder = self.to / name
        path = folder / f"{number:05d}.{self.encoding}"
        try:
            folder.mkdir(exist_ok=True)
            write_segment(path, records, self.encoding, trained)
            # Read back, so that the checksum is that of the file's real contents.
            content = path.read_bytes()
        except OSError as error:
            raise DataError(f"expected to write {path}, got: {error.strerror or error}") from error
        extents: dict[int, Extent] = {}
        for record in records:
            known = extents.get(record.partition, Extent(record.offset, record.offset))
            # Offsets ascend within a partition, with gaps at the transactions' markers.
            extents[record.partition] = Extent(known.first, record.offset + 1)
        return SegmentFile(
            path=path.relative_to(self.to).as_posix(),
            records=len(records),
            size=len(content),
            sha256=hashlib.sha256(content).hexdigest(),
            extents=extents,
        )


class SegmentHistory:
    """Reads an export, as ``bus.history.History`` reads a broker.

    Raises:
        DataError: there is no complete export in the directory.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.manifest: ExportManifest = read_manifest(directory)
        self._verified: set[str] = set()

    async def extents(self, *topics: str) -> dict[TopicPartition, Extent]:
        """The offsets that each partition of these topics (full names) held; a topic not in the export has none."""
        return {
            TopicPartition(topic, partition): extent
            for topic in topics
            for partition, extent in sorted(self._topic(topic).extents.items())
        }

    async def records(self, topic: str, ranges: Mapping[int, Extent] | None = None) -> AsyncIterator[Record]:
        """All records of the topic, or only those within the named ranges of offsets; ascending per partition.

        Raises:
            DataError: a file is missing or has changed.
        """
        for file in self._topic(topic).files:
            if ranges is None or any(_overlap(extent, ranges.get(p)) for p, extent in file.extents.items()):
                # In a thread: decompression would block the event loop.
                for record in await in_thread(self._read, topic, file):
                    if ranges is None or _holds(ranges.get(record.partition), record.offset):
                        yield record

    async def within(self, ranges: Mapping[TopicPartition, Extent]) -> AsyncGenerator[Record, None]:
        """The records of several topics within these ranges of offsets, topic by topic.

        Raises:
            DataError: see ``records``.
        """
        for topic in dict.fromkeys(tp.topic for tp in ranges):
            async for record in self.records(topic, {tp.partition: ranges[tp] for tp in ranges if tp.topic == topic}):
                yield record

    async def fetch(self, topic: str, places: Iterable[tuple[int, int]]) -> dict[tuple[int, int], Record]:
        """The records at these partitions and offsets; places without a record are left out.

        Raises:
            DataError: see ``records``.
        """
        wanted = set(places)
        found: dict[tuple[int, int], Record] = {}
        # Most files hold none of the wanted records, so they are not read.
        for file in self._topic(topic).files:
            if any(_holds(file.extents.get(partition), offset) for partition, offset in wanted):
                for record in await in_thread(self._read, topic, file):
                    if (record.partition, record.offset) in wanted:
                        found[record.partition, record.offset] = record
        return found

    async def fetch_all(self, positions: Iterable[Position]) -> dict[Position, Record]:
        """The records at these positions of several topics; positions without a record are left out.

        Raises:
            DataError: see ``records``.
        """
        by_topic: dict[str, list[tuple[int, int]]] = {}
        for topic, *place in positions:
            by_topic.setdefault(topic, []).append((place[0], place[1]))
        found: dict[Position, Record] = {}
        for topic, places in by_topic.items():
            found |= {Position(topic, *place): record for place, record in (await self.fetch(topic, places)).items()}
        return found

    async def close(self) -> None:
        """Does nothing: no file stays open."""

    def _topic(self, topic: str) -> ExportedTopic:
        return self.manifest.topics.get(topic) or ExportedTopic(extents={}, files=())

    def _read(self, topic: str, file: SegmentFile) -> list[Record]:
        path = self.directory / file.path
        # A manifest may come from a stranger, and must not make us read files outside the export.
        if not path.resolve().is_relative_to(self.directory.resolve()):
            raise DataError(f"expected segments inside {self.directory}, its manifest names {file.path}")
        try:
            # Once per file: a checksum costs as much as reading.
            if file.path not in self._verified:
                self._verify(path, file)
            return read_segment(path, topic, self.manifest.encoding)
        except (OSError, ValueError) as error:
            raise DataError(f"expected the segment {path} unchanged since the export, got: {error}") from error

    def _verify(self, path: Path, file: SegmentFile) -> None:
        if sha256_of(path) != file.sha256:
            raise DataError(f"expected {path} with sha256 {file.sha256}, got another; export the run again")
        self._verified.add(file.path)


def _check_parquet(encoding: Format) -> None:
    if encoding == "parquet":
        require_extra("inspect", "an export in parquet (--format jsonl needs none)", "pyarrow")


def _holds(extent: Extent | None, offset: int) -> bool:
    return extent is not None and extent.first <= offset < extent.end


def _overlap(one: Extent, other: Extent | None) -> bool:
    return other is not None and max(one.first, other.first) < min(one.end, other.end)


def write_segment(
    path: Path, records: Sequence[Record], encoding: Format, trained: "Mapping[Place, Trained] | None" = None
) -> None:
    """Write records in order. ``trained``: of trajectories, whose columns are added then, with nulls for a record that
    does not decode.
    """
    if encoding == "jsonl":
        path.write_text("".join(_line(record) for record in records))
    else:
        _write_parquet(path, records, trained)


def read_segment(path: Path, topic: str, encoding: Format) -> list[Record]:
    """The records of a segment.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not a segment.
    """
    # ``splitlines`` also splits at characters such as U+2028, but ``json.dumps`` has escaped all non-ASCII characters.
    if encoding == "jsonl":
        return [_from_line(topic, line) for line in path.read_text().splitlines()]
    return _read_parquet(path, topic)


def _line(record: Record) -> str:
    fields = {
        "partition": record.partition,
        "offset": record.offset,
        "timestamp": record.timestamp,
        "key": record.key,
        "headers": [[name, _packed(content)] for name, content in record.headers],
        "value": _packed(record.value),
    }
    return json.dumps(fields) + "\n"


def _from_line(topic: str, line: str) -> Record:
    fields = json.loads(line)
    try:
        headers = tuple((name, _unpacked(content)) for name, content in fields["headers"])
        return Record(
            topic,
            fields["partition"],
            fields["offset"],
            fields["key"],
            _unpacked(fields["value"]),
            headers,  # type: ignore[arg-type]  # Kafka allows a header without content
            fields["timestamp"],
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"expected a record, got a line that lacks {error}") from error


def _packed(content: bytes | None) -> str | None:
    # JSON has no type for bytes.
    return None if content is None else base64.b64encode(content).decode()


def _unpacked(text: str | None) -> bytes | None:
    return None if text is None else base64.b64decode(text, validate=True)


def _write_parquet(path: Path, records: Sequence[Record], trained: "Mapping[Place, Trained] | None") -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    # A list of pairs rather than a map: Kafka allows a header's name twice.
    header = pa.struct([("name", pa.string()), ("content", pa.binary())])
    columns: dict[str, Any] = {
        "partition": pa.array([record.partition for record in records], pa.int32()),
        "offset": pa.array([record.offset for record in records], pa.int64()),
        "timestamp": pa.array([record.timestamp for record in records], pa.float64()),
        "key": pa.array([record.key for record in records], pa.string()),
        "headers": pa.array([_named(record.headers) for record in records], pa.list_(header)),
        # 64-bit offsets: a column of plain ``binary`` holds 2 GiB at most.
        "value": pa.array([record.value for record in records], pa.large_binary()),
    }
    if trained is not None:
        from streamrl.inspection.trajectory_columns import readable_columns

        columns |= readable_columns(records, trained)
    # Texts and log-probs compress to about a fifth.
    pq.write_table(pa.table(columns), path, compression="zstd")


def _named(headers: Iterable[tuple[str, bytes]]) -> list[dict[str, Any]]:
    return [{"name": name, "content": content} for name, content in headers]


def _read_parquet(path: Path, topic: str) -> list[Record]:
    import pyarrow.parquet as pq

    # The readable columns are not read. ``select`` puts the others into the order in which they are unpacked below.
    names = ["partition", "offset", "timestamp", "key", "headers", "value"]
    columns = [column.to_pylist() for column in pq.read_table(path, columns=names).select(names).columns]
    return [
        Record(topic, partition, offset, key, value, tuple((h["name"], h["content"]) for h in headers), timestamp)
        for partition, offset, timestamp, key, headers, value in zip(*columns, strict=True)
    ]
