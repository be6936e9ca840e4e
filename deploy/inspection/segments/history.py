"""A run's topics read from an export, without a broker. Trusts no file whose checksum differs from the manifest's."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterable, Mapping
from pathlib import Path

from deploy.inspection.segments.formats import read_segment
from deploy.inspection.segments.manifest import ExportedTopic, ExportManifest, SegmentFile, read_manifest
from schemas.errors import DataError
from schemas.ports.bus import Record, TopicPartition
from schemas.ports.history import Extent


class SegmentHistory:
    """``schemas.ports.history.History`` over an export.

    Raises:
        DataError: there is no complete export in the directory.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.manifest: ExportManifest = read_manifest(directory)
        self._verified: set[str] = set()

    async def extents(self, *topics: str) -> dict[TopicPartition, Extent]:
        """What was held of each partition of these topics (full names) when exported; none of one that was not."""
        return {
            TopicPartition(topic, partition): extent
            for topic in topics
            for partition, extent in sorted(self._topic(topic).extents.items())
        }

    async def records(self, topic: str, ranges: Mapping[int, Extent] | None = None) -> AsyncIterator[Record]:
        """All records of the topic, or only those within the offsets named by partition; ascending per partition.

        Raises:
            DataError: a file is missing, or not as it was written.
        """
        for file in self._topic(topic).files:
            if ranges is None or any(_overlap(extent, ranges.get(p)) for p, extent in file.extents.items()):
                for record in await asyncio.to_thread(self._read, topic, file):
                    if ranges is None or _holds(ranges.get(record.partition), record.offset):
                        yield record

    async def within(self, ranges: Mapping[TopicPartition, Extent]) -> AsyncIterator[Record]:
        """The records of several topics within these offsets, topic by topic.

        Raises:
            DataError: see ``records``.
        """
        for topic in dict.fromkeys(tp.topic for tp in ranges):
            async for record in self.records(topic, {tp.partition: ranges[tp] for tp in ranges if tp.topic == topic}):
                yield record

    async def fetch(self, topic: str, places: Iterable[tuple[int, int]]) -> dict[tuple[int, int], Record]:
        """The records at these partitions and offsets; places that hold none are left out.

        Raises:
            DataError: see ``records``.
        """
        wanted = set(places)
        found: dict[tuple[int, int], Record] = {}
        for file in self._topic(topic).files:
            if any(_holds(file.extents.get(partition), offset) for partition, offset in wanted):
                for record in await asyncio.to_thread(self._read, topic, file):
                    if (record.partition, record.offset) in wanted:
                        found[record.partition, record.offset] = record
        return found

    async def close(self) -> None:
        """Nothing is held."""

    def _topic(self, topic: str) -> ExportedTopic:
        return self.manifest.topics.get(topic) or ExportedTopic(extents={}, files=())

    def _read(self, topic: str, file: SegmentFile) -> list[Record]:
        path = self.directory / file.path
        if not path.resolve().is_relative_to(self.directory.resolve()):
            raise DataError(f"expected segments inside {self.directory}, its manifest names {file.path}")
        try:
            if file.path not in self._verified:
                self._verify(path, file)
            return read_segment(path, topic, self.manifest.encoding)
        except (OSError, ValueError) as error:
            raise DataError(f"expected the segment {path} as it was exported, got: {error}") from error

    def _verify(self, path: Path, file: SegmentFile) -> None:
        with path.open("rb") as content:
            if hashlib.file_digest(content, "sha256").hexdigest() != file.sha256:
                raise DataError(f"expected {path} with sha256 {file.sha256}, got another; export the run again")
        self._verified.add(file.path)


def _holds(extent: Extent | None, offset: int) -> bool:
    return extent is not None and extent.first <= offset < extent.end


def _overlap(one: Extent, other: Extent | None) -> bool:
    return other is not None and max(one.first, other.first) < min(one.end, other.end)
