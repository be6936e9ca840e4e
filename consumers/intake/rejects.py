"""Writes down what is not trained: rows on the skips topic, undecodable bytes on the dead-letters topic.

Invariant no_row_is_lost: ``settled`` returns only when the broker has every row; one whose fate is unknown is sent
again (readers tell repeats by partition and offset).
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog

from schemas.errors import BusError, BusUnavailable, DeliveryUnknown, WireError
from schemas.messages.reports import RecordRef, SkipReason, SkipRecord
from schemas.messages.trajectories import Trajectory
from schemas.ports.bus import Outgoing, Position, Publisher, Record
from schemas.wire.codec import Headers
from schemas.wire.topics import DEAD_LETTERS, SKIPS

log = structlog.get_logger()

DETAIL_LIMIT = 1000
KEY_LIMIT = 256
HEADERS_LIMIT = 32 << 10
ATTEMPTS = 5


@dataclass
class Rejects:
    """Counts by reason; rows are on their way until ``settled`` returns. ``publisher`` is set once it is open."""

    run_name: str
    algorithm: str
    clock: Callable[[], float]
    publisher: Publisher | None = None
    counts: Counter[str] = field(default_factory=Counter)
    dead_letters: int = 0
    under_way: "dict[asyncio.Future[Position], Outgoing]" = field(default_factory=dict)
    unanswered: list[Outgoing] = field(default_factory=list)
    refused: BusError | None = None
    resending: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def skip(self, ref: RecordRef, group_id: str | None, reason: SkipReason, detail: str, step: int) -> None:
        """Write one row; a ref without a trajectory id means that the bytes did not decode."""
        row = SkipRecord(
            algorithm=self.algorithm,
            reason=reason,
            detail=_printable(detail, DETAIL_LIMIT),
            trajectory_id=ref.trajectory_id or None,
            group_id=group_id and _printable(group_id, KEY_LIMIT),
            partition=ref.partition,
            offset=ref.offset,
            step=step,
            sent_at=self.clock(),
        )
        await self._submit(Outgoing.of(SKIPS.full_name(self.run_name), row, key=ref.trajectory_id or None))
        self.counts[reason.value] += 1

    async def dead_letter(self, record: Record, error: WireError) -> None:
        """Put a record's bytes, unchanged, on the dead-letters topic with the reason in the headers.

        Only what is larger than any frame may be, and so cannot be written again, is cut; a header says so.
        """
        reason: Headers = (
            ("dlq-error-class", type(error).__name__.encode()),
            ("dlq-error", _printable(str(error), DETAIL_LIMIT).encode()),
            ("dlq-topic", record.topic.encode()),
            ("dlq-partition", str(record.partition).encode()),
            ("dlq-offset", str(record.offset).encode()),
            ("dlq-ts", f"{self.clock():.3f}".encode()),
        )
        value = record.value
        if value is not None and len(value) > Trajectory.MAX_BYTES:
            reason += (("dlq-cut-from", str(len(value)).encode()),)
            value = value[: Trajectory.MAX_BYTES]
        written = sum(len(name) + len(content or b"") for name, content in record.headers)
        kept = record.headers if written <= HEADERS_LIMIT else ()
        key = record.key and _printable(record.key, KEY_LIMIT)
        await self._submit(Outgoing(DEAD_LETTERS.full_name(self.run_name), value, key, 0, (*kept, *reason)))
        self.dead_letters += 1

    async def resend(self) -> None:
        """Send the rows again whose fate is unknown.

        Raises:
            BusError: the broker refused a row for good.
        """
        if self.refused is not None:
            raise self.refused
        async with self.resending:
            while self.unanswered:
                await self._submit(self.unanswered[0])
                del self.unanswered[0]

    async def settled(self) -> None:
        """Wait until the broker has every row.

        Raises:
            BusError: it refused one.
            DeliveryUnknown: it did not answer, however often it was asked.
        """
        for _ in range(ATTEMPTS):
            await self.resend()
            while self.under_way:
                await asyncio.wait(list(self.under_way))
            if not self.unanswered and self.refused is None:
                return
        raise self.refused or DeliveryUnknown(
            f"expected the broker to take {len(self.unanswered)} rows on skipped trajectories, got no answer "
            f"{ATTEMPTS} times; check the broker, then start again: a checkpoint must not go without them"
        )

    async def _submit(self, record: Outgoing) -> None:
        assert self.publisher is not None, "opened before anything can be rejected"
        future = await self.publisher.submit(record)
        self.under_way[future] = record
        future.add_done_callback(self._landed)

    def _landed(self, future: "asyncio.Future[Position]") -> None:
        record = self.under_way.pop(future)
        error = None if future.cancelled() else future.exception()
        if future.cancelled() or isinstance(error, DeliveryUnknown | BusUnavailable):
            log.warning("a row on a skipped trajectory is sent again", error=str(error))
            self.unanswered.append(record)
        elif error is not None:
            self.refused = error if isinstance(error, BusError) else BusError(f"a row was refused: {error!r}")


def _printable(text: str, limit: int) -> str:
    """Text cut to a length, and free of what UTF-8 cannot carry."""
    return text[:limit].encode(errors="replace").decode()
