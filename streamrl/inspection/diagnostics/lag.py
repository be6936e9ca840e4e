"""`streamrl lag`: shows the trainer's lag, and the consumer lag of each consumer group of the trajectories.

The two differ if groups end out of order. The lag, as in every display, counts trajectories on the topic that the
trainer has not finished. A group's consumer lag is Kafka's: it counts records at or above its committed offset. About
once a second, the trainer commits the offset below which all trajectories are finished. A trajectory that waits for the
rest of its group holds this offset back. Until then, all records after it count, even if they are trained already.
"""

import asyncio
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import uvloop

from streamrl.bus.history import BusHistory, Extent
from streamrl.bus.kafka.cluster import committed_offsets
from streamrl.bus.port import TopicPartition
from streamrl.inspection.diagnostics.connect import CLIENT_ID, RunConnection
from streamrl.inspection.diagnostics.tail import newest_records
from streamrl.observability.run_state.feed import ends_by_bucket
from streamrl.observability.run_state.state import RunState, lag_by_bucket
from streamrl.schemas.plain_text import plain_lines
from streamrl.schemas.topics import STEPS, TRAJECTORIES, UNGRADED, Topic

NEXT_WITHIN = 50
"""Offsets in which the next record is searched: some of them may be transaction markers."""
NEWEST_STEPS = 2
"""Step reports that are read. A resumed trainer's first report has no metrics, but the one before it has."""
WIDTHS = (11, 8, 11, 11, 9, 9, 9, 10)
"""Widths of the columns of a lag table."""


def show_lag(connection: RunConnection, interval_s: float, *, as_json: bool) -> int:
    """Print the trainer's lag and every consumer group's, and return the exit code.

    Raises:
        UserError: there is no such run, or no broker.
    """
    lag, groups, grading = uvloop.run(_lags(connection, interval_s))
    if as_json:
        found = {"lag": sum(lag.values()), "lag_by_bucket": lag, "groups": [lag_json(each) for each in groups]}
        print(json.dumps(found | {"grading": [lag_json(each) for each in grading]}))
    else:
        lines = [lag_line(lag), *(line for each in groups for line in lag_lines(each))]
        # If workers call all rewards, there are no graders and no lines.
        lines += [line for each in grading for line in ("", "waiting for graders", *lag_lines(each))]
        print(plain_lines(lines))
    return 0


async def _lags(
    connection: RunConnection, interval_s: float
) -> "tuple[dict[int, int], list[GroupLag], list[GroupLag]]":
    """The trainer's lag by bucket, and the lags of the groups of the trajectories and of the ungraded samples."""
    connection = await connection.with_run()
    history, topic = BusHistory(connection.bus, CLIENT_ID), connection.name_of(TRAJECTORIES)
    state = await newest_steps(connection)
    shards = shards_of(connection, len(await history.extents(topic)), state.metrics)
    groups = await measure_lags(connection, shards, interval_s)
    if shards is not None:
        ends = {tp: held.end for tp, held in (await history.extents(topic)).items()}
        state.note_ends(ends_by_bucket(ends, shards))
    ungraded = await history.extents(connection.name_of(UNGRADED))
    is_graded = any(held.end for held in ungraded.values())
    grading = await measure_lags(connection, shards, interval_s, UNGRADED) if is_graded else []
    return state.lag, groups, grading


def shards_of(connection: RunConnection, partitions: int, metrics: Mapping[str, float]) -> int | None:
    """Partitions per length bucket: from the settings, else from the buckets that the trainer reported."""
    if connection.settings is not None:
        return connection.settings.loop.shards
    # Each bucket has a block of partitions, all of equal size.
    buckets = len(lag_by_bucket(metrics))
    return partitions // buckets if buckets and partitions % buckets == 0 else None


async def newest_steps(connection: RunConnection) -> RunState:
    """A state from the newest step reports only; an empty one if there is none."""
    history, topic, state = BusHistory(connection.bus, CLIENT_ID), connection.name_of(STEPS), RunState(connection.run)
    state.observe_records(await newest_records(history, topic, await history.extents(topic), NEWEST_STEPS))
    return state


@dataclass(frozen=True)
class PartitionLag:
    """One partition of a topic. ``next_offset``: the committed offset, below which all records are finished.

    Rates are in records a second; None: not measured. ``behind_s``: age of the oldest unfinished record, in seconds.
    ``bucket`` None: the number of shards is not known.
    """

    partition: int
    bucket: int | None
    next_offset: int
    end: int
    produced_per_s: float | None = None
    consumed_per_s: float | None = None
    behind_s: float | None = None

    @property
    def consumer_lag(self) -> int:
        """Records at or above the committed offset."""
        return max(0, self.end - self.next_offset)


@dataclass(frozen=True)
class GroupLag:
    """The lag of a consumer group. ``group`` None: no group has committed an offset yet."""

    group: str | None
    partitions: tuple[PartitionLag, ...]

    @property
    def consumer_lag(self) -> int:
        """Records at or above the committed offsets."""
        return sum(each.consumer_lag for each in self.partitions)

    @property
    def behind_s(self) -> float | None:
        """Age in seconds of the oldest unfinished record of all partitions."""
        return max((each.behind_s for each in self.partitions if each.behind_s is not None), default=None)


@dataclass(frozen=True)
class _Sample:
    at: float
    extents: Mapping[TopicPartition, Extent]
    committed: Mapping[str, Mapping[TopicPartition, int]]


async def measure_lags(
    connection: RunConnection, shards: int | None, interval_s: float = 0.0, of: Topic = TRAJECTORIES
) -> list[GroupLag]:
    """The lag of every group of a topic; with rates if ``interval_s`` is not 0.

    Raises:
        BusUnavailable: no broker answers.
    """
    topic = connection.name_of(of)
    # Two samples, or without an interval the same one twice, and no rates.
    before = await _sample(connection, topic)
    after = before
    if interval_s:
        await asyncio.sleep(interval_s)
        after = await _sample(connection, topic)
    # Before the first commit there is no group, but there is a lag: all held records.
    groups: Sequence[str | None] = sorted(after.committed) or [None]
    return [GroupLag(group, await _partitions(connection, topic, group, shards, (before, after))) for group in groups]


async def _sample(connection: RunConnection, topic: str) -> _Sample:
    # Commits before ends: otherwise a consumer might already have passed the end.
    committed = await committed_offsets(connection.kafka, {topic})
    extents = await BusHistory(connection.bus, CLIENT_ID).extents(topic)
    return _Sample(time.monotonic(), extents, committed)


async def _partitions(
    connection: RunConnection, topic: str, group: str | None, shards: int | None, samples: tuple[_Sample, _Sample]
) -> tuple[PartitionLag, ...]:
    before, after = samples
    then, now = (sample.committed.get(group or "", {}) for sample in samples)
    # Without a commit in a partition, all its records are unfinished.
    wanted = {tp: now.get(tp, held.first) for tp, held in after.extents.items()}
    # Only for partitions with a lag, because each age costs a read.
    ages = await _ages(
        connection, topic, {tp: offset for tp, offset in wanted.items() if offset < after.extents[tp].end}
    )
    seconds = after.at - before.at

    def rate(new: int, old: int | None) -> float | None:
        # A partition that was added between the samples has no rate.
        # A consumer that was set back to an earlier offset has a rate of 0.
        return None if before is after or old is None else max(0, new - old) / seconds

    return tuple(
        PartitionLag(
            partition=tp.partition,
            bucket=None if shards is None else tp.partition // shards,
            next_offset=wanted[tp],
            end=held.end,
            produced_per_s=rate(held.end, before.extents[tp].end if tp in before.extents else None),
            consumed_per_s=rate(wanted[tp], then.get(tp)),
            # 0 at the partition's end; None if the next record was not found.
            behind_s=ages.get(tp.partition, 0.0 if wanted[tp] >= held.end else None),
        )
        for tp, held in sorted(after.extents.items())
    )


async def _ages(connection: RunConnection, topic: str, offsets: Mapping[TopicPartition, int]) -> dict[int, float]:
    """Age in seconds of the record at each offset, or of the first one after it."""
    ranges = {tp.partition: Extent(offset, offset + NEXT_WITHIN) for tp, offset in offsets.items()}
    now, found = time.time(), dict[int, float]()
    async for record in BusHistory(connection.bus, CLIENT_ID).records(topic, ranges):
        # The first record at or after the offset: the offset itself may be a transaction marker.
        found.setdefault(record.partition, max(0.0, now - record.timestamp))
    return found


def lag_line(lag: Mapping[int, int]) -> str:
    """A line with the lag, in total and by length bucket."""
    return f"lag {sum(lag.values()):,} trajectories not finished{buckets_text(lag)}"


def buckets_text(lag: Mapping[int, int]) -> str:
    """The lag by length bucket in brackets, to follow a total; empty without buckets."""
    buckets = "  ".join(f"bucket {bucket}: {count:,}" for bucket, count in lag.items())
    return f"  ({buckets})" if buckets else ""


def consumer_lag_text(lag: GroupLag) -> str:
    """A line with the lag of one group."""
    name = lag.group or "no consumer group has committed offsets yet"
    return f"{name}: consumer lag {lag.consumer_lag:,}, {seconds_text(lag.behind_s)} behind"


def lag_lines(lag: GroupLag) -> Iterator[str]:
    """Lines for one group: its total, then a line per partition."""
    yield consumer_lag_text(lag)
    yield _row("partition", "bucket", "next", "end", "lag", "in/s", "out/s", "behind")
    for each in lag.partitions:
        bucket = "-" if each.bucket is None else each.bucket
        rates = (figure_text(each.produced_per_s), figure_text(each.consumed_per_s))
        lag_and_rates = (each.consumer_lag, *rates)
        yield _row(each.partition, bucket, each.next_offset, each.end, *lag_and_rates, seconds_text(each.behind_s))


def _row(*cells: object) -> str:
    return "".join(f"{cell!s:>{width}}" for cell, width in zip(cells, WIDTHS, strict=True))


def lag_json(lag: GroupLag) -> dict[str, Any]:
    """The lag of one group as JSON-safe data."""
    return {
        "group": lag.group,
        "consumer_lag": lag.consumer_lag,
        "behind_s": lag.behind_s,
        "partitions": [_partition_json(each) for each in lag.partitions],
    }


def _partition_json(each: PartitionLag) -> dict[str, Any]:
    return {
        "partition": each.partition,
        "bucket": each.bucket,
        "next_offset": each.next_offset,
        "end": each.end,
        "consumer_lag": each.consumer_lag,
        "produced_per_s": each.produced_per_s,
        "consumed_per_s": each.consumed_per_s,
        "behind_s": each.behind_s,
    }


def figure_text(value: float | None) -> str:
    """A number with three digits, which are enough for people; ``-`` for None."""
    return "-" if value is None else f"{value:.3g}"


def seconds_text(value: float | None) -> str:
    """Seconds with their unit; ``-`` for None."""
    return "-" if value is None else f"{value:.1f} s"
