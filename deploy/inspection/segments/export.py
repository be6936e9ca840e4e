"""Copies a run's topics from its history into segment files of bounded size.

Invariant an_export_is_a_moment_of_the_run: checkpoints are taken before the ends of the topics are fixed, and ends in
the order in which reports refer to records, so that what an export refers to is in it.
"""

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from consumers.training.persistence.manifest import CheckpointManifest
from deploy.inspection.segments.formats import write_segment
from deploy.inspection.segments.manifest import (
    MANIFEST,
    ExportedTopic,
    ExportManifest,
    Format,
    SegmentFile,
    write_manifest,
)
from schemas.errors import DataError
from schemas.ports.bus import Record
from schemas.ports.history import Extent, History
from schemas.wire.topics import (
    COMMANDS,
    CONTROL,
    DEAD_LETTERS,
    HEARTBEATS,
    SKIPS,
    STEPS,
    TOKENS,
    TRAJECTORIES,
    WORK_ORDERS,
    Topic,
)

USUAL = (STEPS, SKIPS, TRAJECTORIES, DEAD_LETTERS, CONTROL, COMMANDS, WORK_ORDERS)
ALL = (*USUAL, HEARTBEATS, TOKENS)
SEGMENT_BYTES = 32 << 20
SEGMENT_RECORDS = 20_000
Progress = Callable[[str, int, int], None]


@dataclass
class _Segment:
    """Records on their way to the next file."""

    records: list[Record] = field(default_factory=list)
    size: int = 0

    def add(self, record: Record) -> bool:
        """Take a record; true once the file should be written."""
        self.records.append(record)
        self.size += len(record.value or b"")
        return self.size >= SEGMENT_BYTES or len(self.records) >= SEGMENT_RECORDS


@dataclass(frozen=True)
class Exporter:
    """``to``: a directory that is empty or does not exist yet. ``config``: of the run, to be named in the manifest."""

    history: History
    run: str
    config: Path
    to: Path
    encoding: Format = "parquet"
    progress: Progress = lambda topic, done, total: None

    async def export(self, topics: Sequence[Topic], checkpoints: Sequence[CheckpointManifest]) -> ExportManifest:
        """Write the topics; those that do not exist are left out.

        Raises:
            DataError: the directory is not empty or cannot be written, or there is no such run.
            BusUnavailable: the topics cannot be read.
        """
        self._check_empty()
        wanted = sorted(topics, key=ALL.index)
        held = {topic: await self._extents(topic) for topic in wanted}
        if not any(held.values()):
            raise DataError(f"expected the topics of run {self.run!r}, found none: check its name and the broker")
        exported = {}
        for topic in wanted:
            if held[topic]:
                exported[topic.full_name(self.run)] = ExportedTopic(
                    extents=held[topic], files=tuple([file async for file in self._files(topic, held[topic])])
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
        if occupied is not None:
            what = "a complete export" if (self.to / MANIFEST).exists() else occupied.name
            raise DataError(f"expected an empty directory, {self.to} holds {what}; name another with --to")

    async def _extents(self, topic: Topic) -> dict[int, Extent]:
        found = await self.history.extents(topic.full_name(self.run))
        return {tp.partition: extent for tp, extent in found.items()}

    async def _files(self, topic: Topic, extents: dict[int, Extent]) -> AsyncIterator[SegmentFile]:
        name, total = topic.full_name(self.run), sum(extent.end - extent.first for extent in extents.values())
        segment, number, done = _Segment(), 0, 0
        self.progress(name, 0, total)
        async for record in self.history.records(name, extents):
            if segment.add(record):
                yield await asyncio.to_thread(self._write, topic, number, segment.records)
                done += len(segment.records)
                self.progress(name, done, total)
                segment, number = _Segment(), number + 1
        if segment.records:
            yield await asyncio.to_thread(self._write, topic, number, segment.records)
        self.progress(name, total, total)

    def _write(self, topic: Topic, number: int, records: Sequence[Record]) -> SegmentFile:
        folder = self.to / topic.name
        path = folder / f"{number:05d}.{self.encoding}"
        try:
            folder.mkdir(exist_ok=True)
            write_segment(path, records, self.encoding, readable=topic is TRAJECTORIES)
            content = path.read_bytes()
        except OSError as error:
            raise DataError(f"expected to write {path}, got: {error.strerror or error}") from error
        extents: dict[int, Extent] = {}
        for record in records:
            known = extents.get(record.partition, Extent(record.offset, record.offset))
            extents[record.partition] = Extent(known.first, record.offset + 1)
        return SegmentFile(
            path=path.relative_to(self.to).as_posix(),
            records=len(records),
            size=len(content),
            sha256=hashlib.sha256(content).hexdigest(),
            extents=extents,
        )
