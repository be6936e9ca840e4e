"""`streamrl lag`: how far each consumer of the trajectories is behind, in records, in time, and how fast.

Lag means one thing everywhere: records at or above the offset that the consumer committed as finished, whether it has
read them or not. A trajectory that waits for the rest of its group, or for its step to be kept, is not finished; those
behind it in its partition count too until it is, even if they were trained before it.
"""

import asyncio
import json
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import uvloop

from bus.history import BusHistory, Extent
from bus.kafka.cluster import committed_offsets
from bus.port import TopicPartition
from inspection.diagnostics.connect import CLIENT_ID, RunConnection
from inspection.diagnostics.tail import newest_records
from observability.run_state.state import LAG_PREFIX, RunState
from schemas.plain_text import plain_lines
from schemas.topics import STEPS, TRAJECTORIES

NEXT_WITHIN = 50
"""Offsets in which the next record is looked for; between them may be ends of transactions."""
NEWEST_STEPS = 2
"""A resumed trainer's first report has no metrics; the one before it has."""
WIDTHS = (11, 8, 11, 11, 9, 9, 9, 10)
"""Of the columns of a lag table."""


def show_lag(connection: RunConnection, interval_s: float, *, as_json: bool) -> int:
    """Print the lag of every consumer group; the exit code.

    Raises:
        UserError: no such run, or no broker.
    """
    lags = uvloop.run(_lags(connection, interval_s))
    if as_json:
        print(json.dumps([lag_json(lag) for lag in lags]))
    else:
        print(plain_lines(line for lag in lags for line in lag_lines(lag)))
    return 0


async def _lags(connection: RunConnection, interval_s: float) -> "list[GroupLag]":
    connection = await connection.with_run()
    partitions = len(await BusHistory(connection.bus, CLIENT_ID).extents(connection.name_of(TRAJECTORIES)))
    metrics = {} if connection.settings is not None else await last_metrics(connection)
    return await measure_lags(connection, shards_of(connection, partitions, metrics), interval_s)


def shards_of(connection: RunConnection, partitions: int, metrics: Mapping[str, float]) -> int | None:
    """Partitions per length bucket: from the settings, else from the buckets that the trainer reported."""
    if connection.settings is not None:
        return connection.settings.loop.shards
    # Partitions are dealt to buckets in blocks of equal size.
    buckets = sum(name.startswith(LAG_PREFIX) for name in metrics)
    return partitions // buckets if buckets and partitions % buckets == 0 else None


async def last_metrics(connection: RunConnection) -> Mapping[str, float]:
    """Metrics of the newest step, empty if there is none."""
    history, topic, state = BusHistory(connection.bus, CLIENT_ID), connection.name_of(STEPS), RunState(connection.run)
    state.observe_records(await newest_records(history, topic, await history.extents(topic), NEWEST_STEPS))
    return state.metrics


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


async def measure_lags(connection: RunConnection, shards: int | None, interval_s: float = 0.0) -> list[GroupLag]:
    """The lag of every group, with rates if there is an interval to measure them in.

    Raises:
        BusUnavailable: no broker answers.
    """
    topic = connection.name_of(TRAJECTORIES)
    # Two samples, or one twice: without an interval there are no rates, and nothing is waited for.
    before = await _sample(connection, topic)
    after = before
    if interval_s:
        await asyncio.sleep(interval_s)
        after = await _sample(connection, topic)
    # Before the first commit there is no group, and still a lag: all that is held.
    groups: Sequence[str | None] = sorted(after.committed) or [None]
    return [GroupLag(group, await _partitions(connection, topic, group, shards, (before, after))) for group in groups]


async def _sample(connection: RunConnection, topic: str) -> _Sample:
    # Commits before ends: the other way round a consumer could have passed the end by the time it is asked.
    committed = await committed_offsets(connection.kafka, {topic})
    extents = await BusHistory(connection.bus, CLIENT_ID).extents(topic)
    return _Sample(time.monotonic(), extents, committed)


async def _partitions(
    connection: RunConnection, topic: str, group: str | None, shards: int | None, samples: tuple[_Sample, _Sample]
) -> tuple[PartitionLag, ...]:
    before, after = samples
    then, now = (sample.committed.get(group or "", {}) for sample in samples)
    # Who has committed nothing in a partition has yet to finish all that it holds.
    wanted = {tp: now.get(tp, held.first) for tp, held in after.extents.items()}
    # Only where something is behind, for each costs a read.
    ages = await _ages(
        connection, topic, {tp: offset for tp, offset in wanted.items() if offset < after.extents[tp].end}
    )
    seconds = after.at - before.at

    def rate(new: int, old: int | None) -> float | None:
        # A partition that came between the samples has no rate.
        # A consumer that was set back to an earlier offset counts as standing still.
        return None if before is after or old is None else max(0, new - old) / seconds

    return tuple(
        PartitionLag(
            partition=tp.partition,
            bucket=None if shards is None else tp.partition // shards,
            next_offset=wanted[tp],
            end=held.end,
            produced_per_s=rate(held.end, before.extents[tp].end if tp in before.extents else None),
            consumed_per_s=rate(wanted[tp], then.get(tp)),
            # At the end it is not behind at all; where the next record is gone, that is not known.
            behind_s=ages.get(tp.partition, 0.0 if wanted[tp] >= held.end else None),
        )
        for tp, held in sorted(after.extents.items())
    )


async def _ages(connection: RunConnection, topic: str, offsets: Mapping[TopicPartition, int]) -> dict[int, float]:
    """Seconds since the record at each offset, or the first one after it, was written."""
    ranges = {tp.partition: Extent(offset, offset + NEXT_WITHIN) for tp, offset in offsets.items()}
    now, found = time.time(), dict[int, float]()
    async for record in BusHistory(connection.bus, CLIENT_ID).records(topic, ranges):
        # The first at or after the offset: the offset itself may be the end of a transaction.
        found.setdefault(record.partition, max(0.0, now - record.timestamp))
    return found


def lag_lines(lag: GroupLag) -> Iterator[str]:
    """One group: its sum, then a line a partition."""
    name = lag.group or "no consumer group has committed offsets yet"
    yield f"{name}: lag {lag.lag:,}, {seconds_text(lag.behind_s)} behind"
    yield _row("partition", "bucket", "next", "end", "lag", "in/s", "out/s", "behind")
    for each in lag.partitions:
        bucket = "-" if each.bucket is None else each.bucket
        rates = (figure_text(each.produced_per_s), figure_text(each.consumed_per_s))
        yield _row(each.partition, bucket, each.next_offset, each.end, each.lag, *rates, seconds_text(each.behind_s))
    if lag.partitions and lag.partitions[0].bucket is not None:
        yield "  by bucket  " + "  ".join(
            f"{bucket_name(bucket)} {count:,}" for bucket, count in lag.by_bucket().items()
        )


def _row(*cells: object) -> str:
    return "".join(f"{cell!s:>{width}}" for cell, width in zip(cells, WIDTHS, strict=True))


def lag_json(lag: GroupLag) -> dict[str, Any]:
    """One group."""
    buckets = {str(bucket): count for bucket, count in lag.by_bucket().items() if bucket is not None}
    return {
        "group": lag.group,
        "lag": lag.lag,
        "behind_s": lag.behind_s,
        "by_bucket": buckets,
        "partitions": [_partition_json(each) for each in lag.partitions],
    }


def _partition_json(each: PartitionLag) -> dict[str, Any]:
    return {
        "partition": each.partition,
        "bucket": each.bucket,
        "next_offset": each.next_offset,
        "end": each.end,
        "lag": each.lag,
        "produced_per_s": each.produced_per_s,
        "consumed_per_s": each.consumed_per_s,
        "behind_s": each.behind_s,
    }


def bucket_name(bucket: int | None) -> str:
    """Before a figure; None: the buckets are not known."""
    return "all buckets" if bucket is None else f"bucket {bucket}:"


def figure_text(value: float | None) -> str:
    """Three digits are enough to read."""
    return "-" if value is None else f"{value:.3g}"


def seconds_text(value: float | None) -> str:
    """With their unit."""
    return "-" if value is None else f"{value:.1f} s"
