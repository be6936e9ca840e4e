"""Streams the trajectories of a running loop one by one: for another trainer, a filter or a notebook."""

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
from streamrl.schemas.errors import UserError, WireError
from streamrl.schemas.topics import TRAJECTORIES
from streamrl.schemas.trajectories import Trajectory

log = structlog.get_logger()

From = Literal["committed", "earliest", "latest"]
COMMIT_EVERY_S = 1.0
"""Seconds between two commits, as in the trainer: often enough for lag displays, rarely enough to cost nothing."""


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

    The run is not affected: this reader has its own positions, and the trainer's do not move. A record that does not
    decode is left out and logged. All members of a prompt's group come from one partition, but not necessarily one
    directly after another.

    Args:
        run: the run's directory, name or configuration; empty: the only run on the broker.
        start: ``earliest`` is the first record that retention has kept; ``committed`` continues after the last commit
            of ``group``, or at the earliest record if there is none.
        group: consumer group under which offsets are committed. Delivery is at least once: a record counts as read when
            the caller asks for the next one. None: nothing is committed.
        rank: number of this reader, from 0. Each reader reads the partitions that are ``rank`` modulo ``world_size``,
            so together they read every record once. Partitions are not rebalanced while the readers run.
        world_size: number of readers.
        bootstrap_servers: a broker to use instead of the run's own.

    Raises:
        UserError: the run or its broker does not exist, or the arguments contradict each other.
        BusError: the broker refuses, or retention deleted records before they were read.
    """
    if not 0 <= rank < world_size:
        raise UserError(f"expected 0 <= rank < world_size, got rank {rank} and world_size {world_size}")
    if start == "committed" and group is None:
        raise UserError('expected a group with start="committed", got none; give one, or another start')
    target = await connect(Path(run) if str(run) else None, bootstrap_servers).with_run()
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
    reading = _Reader(subscription, group is not None)
    try:
        async with aclosing(reading.trajectories()) as trajectories:
            async for trajectory in trajectories:
                yield trajectory
    finally:
        await reading.close()


@dataclass
class _Reader:
    """A subscription with the offsets that the caller has read and those that are committed."""

    subscription: Subscription
    commits: bool
    positions: dict[TopicPartition, int] = field(default_factory=dict)
    committed: Mapping[TopicPartition, int] = field(default_factory=dict)

    async def trajectories(self) -> AsyncGenerator[Trajectory, None]:
        due = asyncio.get_running_loop().time() + COMMIT_EVERY_S
        while True:
            for record in await self.subscription.poll():
                try:
                    message = record.message()
                except WireError as error:
                    log.warning("bad record left out", topic=record.topic, offset=record.offset, error=str(error))
                    continue
                if isinstance(message, Trajectory):
                    yield message
                self.positions[TopicPartition(record.topic, record.partition)] = record.offset + 1
            if (now := asyncio.get_running_loop().time()) >= due:
                await self.commit()
                due = now + COMMIT_EVERY_S

    async def commit(self) -> None:
        if self.commits and self.positions and self.positions != self.committed:
            positions = dict(self.positions)
            await self.subscription.commit(positions)
            self.committed = positions

    async def close(self) -> None:
        with suppress(Exception):  # the caller has gone; uncommitted records are read again
            await self.commit()
        await self.subscription.close()


async def _beginnings(bus: KafkaBus, topic: str) -> dict[TopicPartition, int]:
    """The first offset that each partition still holds."""
    subscription = await bus.subscribe([topic], client_id="stream-beginnings", start="latest")
    try:
        return await subscription.beginning_offsets()
    finally:
        await subscription.close()
