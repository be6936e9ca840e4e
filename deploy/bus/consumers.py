"""Makes the consumers of one subscription, and asks the broker what it holds. Reads nothing."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field

from aiokafka import AIOKafkaConsumer
from aiokafka import TopicPartition as KafkaPartition

from deploy.bus.client import record_batches
from deploy.bus.client.outage import Outage
from deploy.bus.connection import client_options, our_errors, started
from deploy.bus.settings import KafkaSettings
from schemas.errors import DataLossRefused
from schemas.ports.bus import Start, TopicPartition

AskOffsets = Callable[[list[KafkaPartition]], Awaitable[dict[KafkaPartition, int]]]
Positions = Mapping[TopicPartition, int]

FETCHER_LOOKS_MS, UNHURRIED_LOOKS_MS = 200, 10_000
"""aiokafka's fetcher looks at every partition so often even if nothing happens."""


@dataclass(frozen=True, slots=True)
class Reader:
    """How consumers of one subscription are made. ``ahead``: they fetch more while the last records are dealt with."""

    settings: KafkaSettings
    client_id: str
    group_id: str | None
    outage: Outage = field(default_factory=Outage)
    ahead: bool = True

    async def assigned(self, partitions: Iterable[TopicPartition]) -> AIOKafkaConsumer:
        """A started consumer of these partitions, all paused at offset 0 so that it reads nothing yet."""
        settings = self.settings
        record_batches.install()
        consumer = AIOKafkaConsumer(
            **client_options(settings, self.client_id),
            group_id=self.group_id,
            enable_auto_commit=False,
            auto_offset_reset="none",
            isolation_level="read_committed",
            fetch_max_wait_ms=settings.fetch_max_wait_ms,
            consumer_timeout_ms=FETCHER_LOOKS_MS if self.ahead else UNHURRIED_LOOKS_MS,
            fetch_min_bytes=settings.fetch_min_bytes,
            fetch_max_bytes=settings.fetch_max_bytes,
            max_partition_fetch_bytes=settings.max_partition_fetch_bytes,
        )
        await started(consumer, settings)
        names = [KafkaPartition(*tp) for tp in partitions]
        consumer.assign(names)
        for name in names:
            consumer.seek(name, 0)
        consumer.pause(*names)
        return consumer

    async def offsets(self, ask: AskOffsets, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """The answer of ``beginning_offsets`` or ``end_offsets``, in time."""
        with our_errors(f"reading offsets as {self.client_id}"):
            async with asyncio.timeout(self.settings.connect_timeout_ms / 1000):
                found = await ask([KafkaPartition(*tp) for tp in partitions])
        return {TopicPartition(*tp): offset for tp, offset in found.items()}

    async def extents(
        self, consumer: AIOKafkaConsumer, partitions: Iterable[TopicPartition]
    ) -> tuple[Positions, Positions]:
        """The oldest offsets held and the ones after the last, by partition."""
        wanted = tuple(partitions)
        first = await self.offsets(consumer.beginning_offsets, wanted)
        return first, await self.offsets(consumer.end_offsets, wanted)


def starting_positions(start: Start, first: Positions, end: Positions) -> Positions:
    """Where reading begins.

    Raises:
        DataLossRefused: named offsets are not on the broker (any more); it lists every one.
    """
    if start == "earliest":
        return first
    if start == "latest":
        return end
    positions = {tp: start.get(tp, oldest) for tp, oldest in first.items()}
    refuse_holes(positions, first, end)
    return positions


def refuse_holes(positions: Positions, first: Positions, end: Positions) -> None:
    """Refuse positions that the broker does not hold.

    Raises:
        DataLossRefused: it names the missing offsets: up to the oldest held; or, where the end is before the
            position, those between, which were on another broker or in a topic that was deleted and made again.
    """
    holes, told = [], []
    for tp, position in sorted(positions.items()):
        if not first[tp] <= position <= end[tp]:
            hole = (position, first[tp]) if position < first[tp] else (end[tp], position)
            holes.append((*tp, *hole))
            told.append(f"offset {position} of {tp.topic}/{tp.partition}, the broker holds {first[tp]} to {end[tp]}")
    if holes:
        raise DataLossRefused(
            f"expected to go on at {'; '.join(told)}: records were deleted before they were read (retention), or the "
            "topic was deleted and made again, or this is not the broker that they were written to",
            holes,
        )
