"""Where a run stands, from the last records of its topics: read once, quickly, however long the run is."""

import asyncio
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from deploy.bus.cluster.times import offsets_since
from deploy.inspection.bus_history import BusHistory
from deploy.observation.progress import LAG_PREFIX
from deploy.observation.state import NO_VERSION, SILENT_AFTER_S, RunState
from deploy.surveys.attachment import CLIENT_ID, Attachment
from deploy.surveys.standing.lags import GroupLag, measure_lags
from deploy.surveys.tailing.following import newest_records
from schemas.errors import WireError
from schemas.identifiers import PolicyVersion
from schemas.messages.base import Message
from schemas.messages.control import FlowControl, RunFinished, WeightsReady
from schemas.messages.reports import Heartbeat, WorkerState
from schemas.ports.bus import Record
from schemas.ports.history import Extent
from schemas.wire.topics import CONTROL, DEAD_LETTERS, HEARTBEATS, STEPS, TRAJECTORIES

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
