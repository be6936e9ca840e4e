"""Trajectories of a running loop, one by one: for a trainer of somebody else's, a filter, a notebook."""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import structlog

from streamrl.bus.kafka.bus import KafkaBus
from streamrl.bus.kafka.cluster import committed_offsets
from streamrl.bus.port import Subscription, TopicPartition
from streamrl.inspection.diagnostics.connect import connect
from streamrl.inspection.source import RUNS
from streamrl.schemas.errors import UserError, WireError
from streamrl.schemas.topics import TRAJECTORIES
from streamrl.schemas.trajectories import Trajectory

log = structlog.get_logger()

From = Literal["committed", "earliest", "latest"]
COMMIT_EVERY_S = 1.0
"""As often as the trainer commits its own offsets: often enough for lag displays, seldom enough to cost nothing."""


async def stream(
    run: str | Path = "",
    *,
    start: From = "latest",
    group: str | None = None,
    rank: int = 0,
    world_size: int = 1,
    bootstrap_servers: str | None = None,
) -> AsyncGenerator[Trajectory, None]:
    """Every trajectory that workers publish, in order within each partition, until the iterator is closed.

    The run is not disturbed: positions are this reader's own, the trainer's stay where they are. Records that do not
    decode are left out with a log line. A prompt's group comes
    from one partition, its members not necessarily one after another.

    Args:
        run: its directory, its name, or its configuration; empty: the one run that the broker has.
        start: ``earliest`` is what retention still holds; ``committed`` goes on where ``group`` left off, from the
            earliest record the first time.
        group: consumer group under which offsets are committed, at least once: a record counts as read when the next
            one is asked for. None: nothing is committed.
        rank: which reader of ``world_size`` this is; each reads the partitions that are ``rank`` modulo
            ``world_size``, so together they read every record once. Static, as a training framework's ranks are:
            nothing is rebalanced while they run.
        world_size: how many readers there are.
        bootstrap_servers: a broker, instead of the one that belongs to ``run``.

    Raises:
        UserError: there is no such run, no broker, or the arguments contradict each other.
        BusError: the broker refuses, or retention deleted records before they were read.
    """
    if not 0 <= rank < world_size:
        raise UserError(f"expected 0 <= rank < world_size, got rank {rank} and world_size {world_size}")
    if start == "committed" and group is None:
        raise UserError('expected a group with start="committed", got none')
    where = _path_of(run)
    target = connect(where, "" if where else str(run), bootstrap_servers)
    target = await target.with_run()
    topic = target.name_of(TRAJECTORIES)
    first = {
        tp: offset for tp, offset in (await _beginnings(target.bus, topic)).items() if tp.partition % world_size == rank
    }
    if not first:
        return  # more readers than partitions
    known = (await committed_offsets(target.kafka, {topic})).get(group or "", {}) if start == "committed" else {}
    subscription = await target.bus.subscribe(
        [topic],
        client_id=f"stream-{rank}",
        start="latest" if start == "latest" else {tp: known.get(tp, offset) for tp, offset in first.items()},
        partitions=[tp.partition for tp in first],
        group_id=group,
    )
    reading = _Reading(subscription, group is not None)
    try:
        async with aclosing(reading.trajectories()) as trajectories:
            async for trajectory in trajectories:
                yield trajectory
    finally:
        await reading.close()


@dataclass
class _Reading:
    """One subscription, and how far what it delivered was taken."""

    subscription: Subscription
    commits: bool
    taken: dict[TopicPartition, int] = field(default_factory=dict)
    committed: Mapping[TopicPartition, int] = field(default_factory=dict)

    async def trajectories(self) -> AsyncGenerator[Trajectory, None]:
        due = asyncio.get_running_loop().time() + COMMIT_EVERY_S
        while True:
            for record in await self.subscription.poll():
                try:
                    message = record.message()
                except WireError as error:
                    log.warning("a record was left out", topic=record.topic, offset=record.offset, error=str(error))
                    continue
                if isinstance(message, Trajectory):
                    yield message
                self.taken[TopicPartition(record.topic, record.partition)] = record.offset + 1
            if (now := asyncio.get_running_loop().time()) >= due:
                await self.commit()
                due = now + COMMIT_EVERY_S

    async def commit(self) -> None:
        if self.commits and self.taken and self.taken != self.committed:
            taken = dict(self.taken)
            await self.subscription.commit(taken)
            self.committed = taken

    async def close(self) -> None:
        with suppress(Exception):  # the reader is gone; what was not committed is read again
            await self.commit()
        await self.subscription.close()


def _path_of(run: str | Path) -> Path | None:
    path = Path(run)
    return path if str(run) and (path.exists() or (RUNS / path).exists()) else None


async def _beginnings(bus: KafkaBus, topic: str) -> dict[TopicPartition, int]:
    """The first offset that is held of each partition."""
    subscription = await bus.subscribe([topic], client_id="stream-beginnings", start="latest")
    try:
        return await subscription.beginning_offsets()
    finally:
        await subscription.close()
