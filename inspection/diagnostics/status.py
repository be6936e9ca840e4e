"""A feed of the run that a command is attached to: which partitions are which bucket, and the trainer's offsets."""

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import uvloop

from bus.history import BusHistory, Extent
from bus.kafka.cluster import GroupOffsets, offsets_since
from bus.port import Record, TopicPartition
from inspection.diagnostics.connect import CLIENT_ID, Attachment
from inspection.diagnostics.lag import GroupLag, PartitionLag, measure_lags
from inspection.diagnostics.tail import newest_records
from observability.run_state.feed import LiveFeed
from observability.run_state.observer import LAG_PREFIX, NO_VERSION, SILENT_AFTER_S, RunState
from observability.run_state.state import LiveState
from schemas.control import FlowControl, RunFinished, WeightsReady
from schemas.errors import WireError
from schemas.identifiers import PolicyVersion
from schemas.messages import Message
from schemas.reports import Heartbeat, WorkerState
from schemas.topics import CONTROL, DEAD_LETTERS, HEARTBEATS, STEPS, TRAJECTORIES

# Where a run stands, from the last records of its topics: read once, quickly, however long the run is.

STEPS_READ = 20
HEARD_WITHIN_S = 60.0
SKIPPED_PREFIX = "ledger/skipped/"


@dataclass(frozen=True)
class Orders:
    """What the coordinator said last: the weights to use, whether to work, and whether the run is over."""

    announced: PolicyVersion | None = None
    mode: str = "run"
    finished: bool = False


@dataclass(frozen=True)
class Standing:
    """``at``: when it was read (epoch seconds). ``workers``: last heartbeats of the last minute, by id."""

    run: str
    address: str
    at: float
    state: RunState
    orders: Orders
    lags: tuple[GroupLag, ...]
    dead_letters: int
    workers: dict[str, Heartbeat] = field(default_factory=dict)

    @property
    def version(self) -> PolicyVersion:
        """Of the newest step, or as announced when its report is no longer kept."""
        return max(self.state.version, self.orders.announced or NO_VERSION)

    @property
    def metrics(self) -> Mapping[str, float]:
        """Of the newest step that was taken."""
        return self.state.steps[-1].metrics if self.state.steps else {}

    @property
    def generating(self) -> int:
        """Completions that living workers hold."""
        return sum(beat.running + beat.waiting for beat in self.workers.values() if self.is_alive(beat))

    def is_alive(self, beat: Heartbeat) -> bool:
        """Whether this worker has neither left nor fallen silent."""
        return beat.state is not WorkerState.STOPPED and self.at - beat.sent_at <= SILENT_AFTER_S

    @property
    def trained_groups(self) -> int | None:
        """Groups trained since the run began, over all lives of the trainer: every step takes equally many."""
        per_step = self.metrics.get("ledger/groups")
        return None if per_step is None else int(per_step) * self.version.number

    @property
    def skipped(self) -> dict[str, int]:
        """Trajectories skipped by reason, as of the newest step."""
        return {
            name.removeprefix(SKIPPED_PREFIX): int(count)
            for name, count in sorted(self.metrics.items())
            if name.startswith(SKIPPED_PREFIX)
        }


async def read_standing(attachment: Attachment) -> Standing:
    """Read the ends of the topics.

    Raises:
        BusUnavailable: no broker answers.
    """
    history, now = BusHistory(attachment.bus, CLIENT_ID), time.time()
    steps, beats, orders, letters = await asyncio.gather(
        _newest_steps(history, attachment),
        _recent_heartbeats(history, attachment, now),
        _orders(history, attachment),
        history.extents(attachment.name_of(DEAD_LETTERS)),
    )
    state = RunState()
    for message in steps:
        state.observe(message)
    partitions = len(await history.extents(attachment.name_of(TRAJECTORIES)))
    metrics = state.steps[-1].metrics if state.steps else {}
    shards = shards_of(attachment, partitions, metrics)
    return Standing(
        run=attachment.run,
        address=attachment.address,
        at=now,
        state=state,
        orders=orders,
        lags=tuple(await measure_lags(attachment, shards)),
        dead_letters=max(
            int(metrics.get("kafka/dead_letters", 0)), sum(held.end - held.first for held in letters.values())
        ),
        workers=beats,
    )


def shards_of(attachment: Attachment, partitions: int, metrics: Mapping[str, float]) -> int | None:
    """Partitions per length bucket: from the settings, else from the buckets that the trainer reported."""
    if attachment.settings is not None:
        return attachment.settings.loop.shards
    buckets = sum(name.startswith(LAG_PREFIX) for name in metrics)
    return partitions // buckets if buckets and partitions % buckets == 0 else None


async def last_metrics(attachment: Attachment) -> Mapping[str, float]:
    """Metrics of the newest step, empty if there is none."""
    state = RunState()
    for message in await _newest_steps(BusHistory(attachment.bus, CLIENT_ID), attachment, 2):
        state.observe(message)
    return state.steps[-1].metrics if state.steps else {}


async def _newest_steps(history: BusHistory, attachment: Attachment, count: int = STEPS_READ) -> list[Message]:
    topic = attachment.name_of(STEPS)
    return _decoded(await newest_records(history, topic, await history.extents(topic), count))


async def _recent_heartbeats(history: BusHistory, attachment: Attachment, now: float) -> dict[str, Heartbeat]:
    topic = attachment.name_of(HEARTBEATS)
    extents = await history.extents(topic)
    first = await offsets_since(attachment.kafka, extents, now - HEARD_WITHIN_S)
    ranges = {tp.partition: Extent(first[tp], held.end) for tp, held in extents.items()}
    messages = _decoded([record async for record in history.records(topic, ranges)])
    last = {message.worker_id: message for message in messages if isinstance(message, Heartbeat)}
    return dict(sorted(last.items()))


async def _orders(history: BusHistory, attachment: Attachment) -> Orders:
    announced, mode, finished = None, "run", False
    for message in _decoded([record async for record in history.records(attachment.name_of(CONTROL))]):
        match message:
            case WeightsReady():
                announced, finished = message.version, False  # a finished run may be continued
            case FlowControl():
                mode = message.mode
            case RunFinished():
                finished = True
    return Orders(announced, mode, finished)


def _decoded(records: list[Record]) -> list[Message]:
    messages = []
    for record in records:
        with suppress(WireError):
            messages.append(record.message())
    return messages


# A run's standing and its lags as text for people and as JSON for programs. Pure.

WIDTHS = (11, 8, 11, 11, 9, 9, 9, 10)
"""Of the columns of a lag table."""


def status_lines(standing: Standing) -> Iterator[str]:
    """The run in a dozen lines."""
    state, metrics = standing.state, standing.metrics
    step = state.steps[-1].step if state.steps else standing.version.number
    yield f"run       {standing.run} at {standing.address}: {activity(standing)}"
    yield f"version   {standing.version}, announced {standing.orders.announced or 'none yet'}"
    since = f", {standing.at - state.steps[-1].sent_at:.0f} s ago" if state.steps else ""
    rate = f"{state.trajectories_per_s():.1f} trajectories/s"
    yield f"step      {step}{since}, reward {_figure(metrics.get('reward'))}, {rate}"
    mean, most = metrics.get("off_policy/mean"), metrics.get("off_policy/max")
    yield f"staleness {_figure(mean)} mean, {_figure(most)} max (optimizer steps)"
    groups = standing.trained_groups
    yield f"trained   {'-' if groups is None else f'{groups:,}'} groups, {int(metrics.get('num_tokens', 0)):,} tokens"
    skipped = ", ".join(f"{count:,} {reason}" for reason, count in standing.skipped.items() if count)
    yield f"skipped   {skipped or 'none'}; {standing.dead_letters:,} dead letters"
    waiting = f"{unread(standing):,} trajectories not finished by trainers"
    yield f"in flight {standing.generating:,} completions at workers, {waiting}"
    for lag in standing.lags:
        buckets = "  ".join(f"{_bucket(bucket)} {count:,}" for bucket, count in lag.by_bucket().items())
        late = f"{_seconds(lag.behind_s)} behind  ({buckets})"
        yield f"lag       {lag.group or 'no consumer group yet'}: {lag.lag:,}, {late}"
    yield f"workers   {len(standing.workers)} heard of in the last minute"
    for beat in standing.workers.values():
        yield f"  {_worker(beat, standing)}"


def activity(standing: Standing) -> str:
    """What the run is doing, in a word or two."""
    if standing.orders.finished:
        return "finished"
    if standing.orders.mode != "run":
        return {"pause": "paused", "drain": "draining"}.get(standing.orders.mode, standing.orders.mode)
    return "running" if any(standing.is_alive(beat) for beat in standing.workers.values()) else "no worker alive"


def unread(standing: Standing) -> int:
    """Trajectories not finished by the consumer that is furthest behind."""
    return max((lag.lag for lag in standing.lags), default=0)


def _worker(beat: Heartbeat, standing: Standing) -> str:
    state = beat.state.value
    if beat.state is not WorkerState.STOPPED and not standing.is_alive(beat):
        state = f"silent for {standing.at - beat.sent_at:.0f} s"
    return (
        f"{beat.worker_id:<16} {state:<10} v{beat.version!s:<8} {beat.running:>4} running {beat.waiting:>4} waiting "
        f"of {beat.capacity:<4} {beat.tokens_per_s:>8.0f} tokens/s  {beat.engine}"
    )


def status_json(standing: Standing) -> dict[str, Any]:
    """The same, and all metrics of the newest step."""
    state = standing.state
    return {
        "run": standing.run,
        "bootstrap_servers": standing.address,
        "activity": activity(standing),
        "version": str(standing.version),
        "announced": None if standing.orders.announced is None else str(standing.orders.announced),
        "mode": standing.orders.mode,
        "finished": standing.orders.finished,
        "step": state.steps[-1].step if state.steps else standing.version.number,
        "step_age_s": standing.at - state.steps[-1].sent_at if state.steps else None,
        "trajectories_per_s": state.trajectories_per_s(),
        "trained_groups": standing.trained_groups,
        "skipped": standing.skipped,
        "dead_letters": standing.dead_letters,
        "in_flight": {"generating": standing.generating, "unread": unread(standing)},
        "lag": [lag_json(lag) for lag in standing.lags],
        "workers": [
            {**beat.model_dump(mode="json"), "version": str(beat.version), "alive": standing.is_alive(beat)}
            for beat in standing.workers.values()
        ],
        "metrics": dict(standing.metrics),
    }


def lag_lines(lag: GroupLag) -> Iterator[str]:
    """One group: its sum, then a line a partition."""
    name = lag.group or "no consumer group has committed offsets yet"
    yield f"{name}: lag {lag.lag:,}, {_seconds(lag.behind_s)} behind"
    yield _row("partition", "bucket", "next", "end", "lag", "in/s", "out/s", "behind")
    for each in lag.partitions:
        bucket = "-" if each.bucket is None else each.bucket
        rates = (_figure(each.produced_per_s), _figure(each.consumed_per_s))
        yield _row(each.partition, bucket, each.next_offset, each.end, each.lag, *rates, _seconds(each.behind_s))
    if lag.partitions and lag.partitions[0].bucket is not None:
        yield "  by bucket  " + "  ".join(f"{_bucket(bucket)} {count:,}" for bucket, count in lag.by_bucket().items())


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


def _bucket(bucket: int | None) -> str:
    return "all buckets" if bucket is None else f"bucket {bucket}:"


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} s"


async def feed_of(attached: Attachment, state: LiveState, client_id: str, pace_s: Callable[[], float]) -> LiveFeed:
    """Of an attachment that names its run. ``pace_s``: see ``LiveFeed``.

    Raises:
        BusUnavailable: no broker answers.
    """
    partitions = len(await BusHistory(attached.bus, client_id).extents(attached.name_of(TRAJECTORIES)))
    metrics = {} if attached.settings is not None else await last_metrics(attached)
    shards, bus = shards_of(attached, partitions, metrics), attached.bus
    return LiveFeed(bus, state, shards, _TrainersOffsets(attached), client_id, bus.outage, bus.unhurried, pace_s)


class _TrainersOffsets:
    """Of the group that trains the run, which is named after it."""

    def __init__(self, attached: Attachment) -> None:
        self._group = f"{attached.run}."
        self._asked = GroupOffsets(attached.kafka, {attached.name_of(TRAJECTORIES)})

    async def ask(self) -> Mapping[TopicPartition, int]:
        groups = await self._asked.ask()
        return next((offsets for group, offsets in groups.items() if group.startswith(self._group)), {})

    async def close(self) -> None:
        await self._asked.close()


# What `streamrl status` and `streamrl lag` do: attach, read, print, and end with a code.


def show_status(attachment: Attachment, *, as_json: bool) -> int:
    """Print where the run stands; the exit code.

    Raises:
        UserError: no such run, or no broker.
    """
    standing = uvloop.run(_standing(attachment))
    print(json.dumps(status_json(standing)) if as_json else "\n".join(status_lines(standing)))
    return 0


async def _standing(attachment: Attachment) -> Standing:
    return await read_standing(await attachment.with_run())


def show_lag(attachment: Attachment, interval_s: float, *, as_json: bool) -> int:
    """Print the lag of every consumer group; the exit code.

    Raises:
        UserError: no such run, or no broker.
    """
    lags = uvloop.run(_lags(attachment, interval_s))
    if as_json:
        print(json.dumps([lag_json(lag) for lag in lags]))
    else:
        print("\n".join(line for lag in lags for line in lag_lines(lag)))
    return 0


async def _lags(attachment: Attachment, interval_s: float) -> list[GroupLag]:
    attached = await attachment.with_run()
    partitions = len(await BusHistory(attached.bus, CLIENT_ID).extents(attached.name_of(TRAJECTORIES)))
    metrics = {} if attached.settings is not None else await last_metrics(attached)
    return await measure_lags(attached, shards_of(attached, partitions, metrics), interval_s)
