"""Writes down what is not trained: rows on the skips topic, undecodable bytes on the dead-letters topic."""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog

from schemas.errors import BusError, WireError
from schemas.messages.reports import RecordRef, SkipReason, SkipRecord
from schemas.ports.bus import Outgoing, Position, Publisher, Record
from schemas.wire.topics import DEAD_LETTERS, SKIPS

log = structlog.get_logger()

DETAIL_LIMIT = 1000


@dataclass
class Rejects:
    """Counts by reason; rows are on their way until ``settled`` returns."""

    publisher: Publisher
    run_name: str
    algorithm: str
    clock: Callable[[], float]
    counts: Counter[str] = field(default_factory=Counter)
    dead_letters: int = 0
    under_way: "set[asyncio.Future[Position]]" = field(default_factory=set)

    async def skip(
        self, ref: RecordRef, group_id: str | None, reason: SkipReason, detail: str, step: int, *, known: bool = True
    ) -> None:
        """Write one row; ``known`` False: the bytes did not decode, so that no id is known."""
        self.counts[reason.value] += 1
        row = SkipRecord(
            algorithm=self.algorithm,
            reason=reason,
            detail=detail[:DETAIL_LIMIT],
            trajectory_id=ref.trajectory_id if known else None,
            group_id=group_id,
            partition=ref.partition,
            offset=ref.offset,
            step=step,
            sent_at=self.clock(),
        )
        await self._submit(Outgoing.of(SKIPS.full_name(self.run_name), row, key=ref.trajectory_id or None))

    async def dead_letter(self, record: Record, error: WireError) -> None:
        """Put a record's bytes, unchanged, on the dead-letters topic with the reason in the headers."""
        self.dead_letters += 1
        reason = (
            ("dlq-error-class", type(error).__name__.encode()),
            ("dlq-error", str(error)[:DETAIL_LIMIT].encode()),
            ("dlq-topic", record.topic.encode()),
            ("dlq-partition", str(record.partition).encode()),
            ("dlq-offset", str(record.offset).encode()),
            ("dlq-ts", f"{self.clock():.3f}".encode()),
        )
        topic = DEAD_LETTERS.full_name(self.run_name)
        await self._submit(Outgoing(topic, record.value, record.key, 0, (*record.headers, *reason)))

    async def settled(self) -> None:
        """Wait until the broker has every row.

        Raises:
            BusError: it refused one, or did not answer in time.
        """
        await asyncio.gather(*self.under_way)

    async def _submit(self, record: Outgoing) -> None:
        future = await self.publisher.submit(record)
        self.under_way.add(future)
        future.add_done_callback(self._landed)

    def _landed(self, future: "asyncio.Future[Position]") -> None:
        self.under_way.discard(future)
        if not future.cancelled() and isinstance(error := future.exception(), BusError):
            log.error("a row about a skipped trajectory may be lost", error=str(error))
