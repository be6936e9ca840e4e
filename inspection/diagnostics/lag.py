"""How far each consumer of the trajectories is behind, by its committed offsets: in records, in time, and how fast."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bus.history import BusHistory, Extent
from bus.kafka.cluster import committed_offsets
from bus.port import TopicPartition
from inspection.diagnostics.connect import CLIENT_ID, Attachment
from schemas.topics import TRAJECTORIES

NEXT_WITHIN = 50
"""Offsets in which the next record is looked for; between them may be ends of transactions."""


@dataclass(frozen=True)
class PartitionLag:
    """One partition of the trajectories topic. ``next_offset``: the first one not finished, as committed.

    Rates are records a second; None: not measured. ``behind_s``: age of the oldest record not finished, in seconds.
    ``bucket`` None: the shards are not known.
    """

    partition: int
    bucket: int | None
    next_offset: int
    end: int
    produced_per_s: float | None = None
    consumed_per_s: float | None = None
    behind_s: float | None = None

    @property
    def lag(self) -> int:
        """Records that are not finished."""
        return max(0, self.end - self.next_offset)


@dataclass(frozen=True)
class GroupLag:
    """A consumer group, which is named after its run and its algorithm. None: nobody has committed an offset yet."""

    group: str | None
    partitions: tuple[PartitionLag, ...]

    @property
    def lag(self) -> int:
        """Records that are not finished."""
        return sum(each.lag for each in self.partitions)

    @property
    def behind_s(self) -> float | None:
        """Of the partition that is furthest behind."""
        return max((each.behind_s for each in self.partitions if each.behind_s is not None), default=None)

    def by_bucket(self) -> dict[int | None, int]:
        """Records that are not finished, by length bucket."""
        found: dict[int | None, int] = defaultdict(int)
        for each in self.partitions:
            found[each.bucket] += each.lag
        return dict(found)


@dataclass(frozen=True)
class _Sample:
    at: float
    extents: Mapping[TopicPartition, Extent]
    committed: Mapping[str, Mapping[TopicPartition, int]]


async def measure_lags(attachment: Attachment, shards: int | None, interval_s: float = 0.0) -> list[GroupLag]:
    """The lag of every group, with rates if there is an interval to measure them in.

    Raises:
        BusUnavailable: no broker answers.
    """
    topic = attachment.name_of(TRAJECTORIES)
    before = await _sample(attachment, topic)
    after = before
    if interval_s:
        await asyncio.sleep(interval_s)
        after = await _sample(attachment, topic)
    groups: Sequence[str | None] = sorted(after.committed) or [None]
    return [GroupLag(group, await _partitions(attachment, topic, group, shards, (before, after))) for group in groups]


async def _sample(attachment: Attachment, topic: str) -> _Sample:
    committed = await committed_offsets(attachment.kafka, {topic})
    extents = await BusHistory(attachment.bus, CLIENT_ID).extents(topic)
    return _Sample(time.monotonic(), extents, committed)


async def _partitions(
    attachment: Attachment, topic: str, group: str | None, shards: int | None, samples: tuple[_Sample, _Sample]
) -> tuple[PartitionLag, ...]:
    before, after = samples
    then, now = (sample.committed.get(group or "", {}) for sample in samples)
    wanted = {tp: now.get(tp, held.first) for tp, held in after.extents.items()}
    ages = await _ages(
        attachment, topic, {tp: offset for tp, offset in wanted.items() if offset < after.extents[tp].end}
    )
    seconds = after.at - before.at

    def rate(new: int, old: int | None) -> float | None:
        return None if before is after or old is None else max(0, new - old) / seconds

    return tuple(
        PartitionLag(
            partition=tp.partition,
            bucket=None if shards is None else tp.partition // shards,
            next_offset=wanted[tp],
            end=held.end,
            produced_per_s=rate(held.end, before.extents[tp].end if tp in before.extents else None),
            consumed_per_s=rate(wanted[tp], then.get(tp)),
            behind_s=ages.get(tp.partition, 0.0 if wanted[tp] >= held.end else None),
        )
        for tp, held in sorted(after.extents.items())
    )


async def _ages(attachment: Attachment, topic: str, offsets: Mapping[TopicPartition, int]) -> dict[int, float]:
    """Seconds since the record at each offset, or the first one after it, was written."""
    ranges = {tp.partition: Extent(offset, offset + NEXT_WITHIN) for tp, offset in offsets.items()}
    now, found = time.time(), dict[int, float]()
    async for record in BusHistory(attachment.bus, CLIENT_ID).records(topic, ranges):
        found.setdefault(record.partition, max(0.0, now - record.timestamp))
    return found
