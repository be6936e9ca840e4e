"""What stands on a run's topics, read without taking part: for audits, replays and displays."""

from collections.abc import AsyncIterator, Iterable, Mapping
from typing import NamedTuple, Protocol

from schemas.ports.bus import Record, TopicPartition


class Extent(NamedTuple):
    """Offsets of a partition: the first that is held and the one after the last."""

    first: int
    end: int


class History(Protocol):
    """Reads topics of one run by offset, up to the ends they had when asked. Writes nothing and commits nothing."""

    async def extents(self, *topics: str) -> dict[TopicPartition, Extent]:
        """What is held of each partition of these topics (full names), asked in this order; none of a missing one."""
        ...

    def records(self, topic: str, ranges: Mapping[int, Extent] | None = None) -> AsyncIterator[Record]:
        """All records of the topic, or only those within the offsets named by partition; ascending per partition."""
        ...

    def within(self, ranges: Mapping[TopicPartition, Extent]) -> AsyncIterator[Record]:
        """The records of several topics within these offsets; ascending per partition, partitions in any order."""
        ...

    async def fetch(self, topic: str, places: Iterable[tuple[int, int]]) -> dict[tuple[int, int], Record]:
        """The records at these partitions and offsets; places that hold none are left out."""
        ...

    async def close(self) -> None:
        """Release; idempotent."""
        ...
