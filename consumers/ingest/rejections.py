"""Writes down each record that is not trained: a row on the skips topic, undecodable bytes on the dead-letters topic.

A row is counted at once, without waiting, so that no record is ever half finished. It is sent to the broker afterwards.
Invariants:
- no_row_is_lost: ``flush`` returns only when the broker has every row written before; rows of unknown outcome are sent
  again (readers recognise repeats by lineage and sequence);
- a_row_has_one_number: the rows of a lineage are numbered from 1 without gaps, in the order in which they are counted.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import structlog
import xxhash

from streamrl.bus.dead_letters import DETAIL_LIMIT, KEY_LIMIT, dead_letter, printable
from streamrl.bus.port import Bus, Outgoing, Position, Publisher, Record
from streamrl.schemas.errors import BusError, BusUnavailable, DeliveryUnknown, WireError
from streamrl.schemas.identifiers import policy_in
from streamrl.schemas.reports import RecordRef, SkipReason, SkipRecord
from streamrl.schemas.topics import DEAD_LETTERS, SKIPS

log = structlog.get_logger()

ATTEMPTS = 5
"""Unanswered attempts to send a row before ``flush`` fails; each has the producer's own delivery time-out."""


@dataclass
class SkipTally:
    """Numbers the rows of ``lineage``, and summarises rows for the manifest.

    ``count``: rows of this lineage. Since the start of the run: the rolling ``hash`` of all rows, and ``reasons``, the
    number of records by reason.
    """

    lineage: int
    count: int = 0
    hash: str = ""
    reasons: Counter[str] = field(default_factory=Counter)

    @property
    def next_sequence(self) -> int:
        """The number of the next row."""
        return self.count + 1

    def add(self, row: SkipRecord) -> None:
        """Count the next row."""
        assert (row.lineage, row.sequence) == (self.lineage, self.next_sequence), "rows are numbered without gaps"
        self.count += 1
        self.hash = next_row_hash(self.hash, row)
        self.reasons[row.reason.value] += row.end - row.offset

    def copy(self) -> "SkipTally":
        """An independent copy."""
        return replace(self, reasons=Counter(self.reasons))

    def for_next_lineage(self, lineage: int) -> "SkipTally":
        """The tally with which the next lineage starts."""
        return SkipTally(lineage, 0, self.hash, Counter(self.reasons))


def next_row_hash(before: str, row: SkipRecord) -> str:
    """The next rolling hash: xxh3-128, in hex, over the previous hash and the row's identity, not its encoding."""
    identity = f"{row.lineage}/{row.sequence} {row.reason.value} {row.partition}@{row.offset}-{row.end}"
    return xxhash.xxh3_128_hexdigest(f"{before}\n{identity}".encode())


# ``eq=False`` keeps the hash by identity: unsent rows are keys in ``flush``, and two may have the same record.
@dataclass(eq=False, slots=True)
class _Pending:
    """One record that the broker has not confirmed, and how often sending it failed."""

    record: Outgoing
    failures: int = 0


@dataclass
class RejectionWriter:
    """Writes rows and dead letters.

    ``scope``: prefix of the topics that it writes. ``dead_letters``: number since this process started.
    ``refused_by``: the broker's error if it refused a row for good.
    """

    scope: str
    algorithm: str
    clock: Callable[[], float]
    tally: SkipTally
    publisher: Publisher | None = None
    dead_letters: int = 0
    refused_by: BusError | None = None
    _outbox: deque[_Pending] = field(default_factory=deque)
    _in_flight: "dict[asyncio.Future[Position], _Pending]" = field(default_factory=dict)
    _sending: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def open(self, bus: Bus, client_id: str) -> None:
        """Open the publisher; rows that were written before wait for it.

        Raises:
            BusUnavailable: no broker answers.
        """
        self.publisher = await bus.publisher(client_id)

    def skip(
        self,
        ref: RecordRef,
        group_id: str | None,
        reason: SkipReason,
        detail: str,
        step: int,
        end_offset: int | None = None,
    ) -> None:
        """Write one row; a ref without a trajectory id means that the bytes did not decode, or are missing."""
        row = SkipRecord(
            algorithm=self.algorithm,
            reason=reason,
            detail=printable(detail, DETAIL_LIMIT),
            trajectory_id=ref.trajectory_id or None,
            group_id=group_id and printable(group_id, KEY_LIMIT),
            partition=ref.partition,
            offset=ref.offset,
            end_offset=end_offset,
            step=step,
            lineage=self.tally.lineage,
            sequence=self.tally.next_sequence,
            policy=policy_in(self.scope),
            sent_at=self.clock(),
        )
        record = Outgoing.of(SKIPS.full_name(self.scope), row, key=ref.trajectory_id or None)
        # Counted when the record is finished, not when the row is sent; a checkpoint waits for it in ``flush``.
        self._outbox.append(_Pending(record))
        self.tally.add(row)

    def dead_letter(self, record: Record, error: WireError) -> None:
        """Write a record's unchanged bytes to the dead-letters topic, with the reason in the headers.

        See ``bus.dead_letters``.
        """
        topic = DEAD_LETTERS.full_name(self.scope)
        dead = dead_letter(record, topic, type(error).__name__, str(error), now=self.clock())
        self._outbox.append(_Pending(dead))
        self.dead_letters += 1

    async def send(self) -> None:
        """Pass the rows to the publisher, again for those of unknown outcome.

        Raises:
            BusError: the broker refused a row for good.
        """
        assert self.publisher is not None, "call open before send"
        # Reader and trainer both send: one at a time, so that rows are sent in the order of their numbers.
        async with self._sending:
            while self._outbox:
                if self.refused_by is not None:
                    raise self.refused_by
                # Removed only when the publisher has it: a cancellation while its buffer is full loses no row. The head
                # does not change in the meantime, since rows are added at the other end.
                row = self._outbox[0]
                future = await self.publisher.submit(row.record)
                self._outbox.popleft()
                self._in_flight[future] = row
                future.add_done_callback(partial(self._on_sent, row))
        if self.refused_by is not None:
            raise self.refused_by

    async def flush(self) -> None:
        """Wait until the broker has every row written so far, but not for rows that are written during the wait.

        Raises:
            BusError: the broker refused a row.
            DeliveryUnknown: the broker did not answer in ``ATTEMPTS`` attempts.
        """
        # Attempts count from now on: earlier failures of a row are not failures of this call.
        waited_for = {row: row.failures + ATTEMPTS for row in (*self._outbox, *self._in_flight.values())}
        while waited_for := self._unsettled(waited_for):
            if overdue := sum(row.failures >= limit for row, limit in waited_for.items()):
                raise DeliveryUnknown(
                    f"expected the broker to accept {overdue} rows on skipped trajectories, got no answer in "
                    f"{ATTEMPTS} attempts; check the broker, then start again: a checkpoint needs these rows on the "
                    "topic"
                )
            await self.send()
            if mine := [future for future, row in self._in_flight.items() if row in waited_for]:
                # Callbacks run in the order of registration, so ``_on_sent`` has run for these when this returns.
                await asyncio.wait(mine)
        if self.refused_by is not None:
            raise self.refused_by

    async def close(self) -> None:
        """Send the remaining rows, which may explain why reading ended, then close the publisher."""
        if self.publisher is None:
            return
        try:
            await self.send()
        except BusError as error:
            log.warning("rows on skipped trajectories not sent", rows=len(self._outbox), error=str(error))
        await self.publisher.close()

    def _unsettled(self, rows: dict[_Pending, int]) -> dict[_Pending, int]:
        missing = {*self._outbox, *self._in_flight.values()}
        return {row: limit for row, limit in rows.items() if row in missing}

    def _on_sent(self, row: _Pending, future: "asyncio.Future[Position]") -> None:
        self._in_flight.pop(future, None)
        # ``exception`` raises on a cancelled future.
        error = None if future.cancelled() else future.exception()
        if future.cancelled() or isinstance(error, DeliveryUnknown | BusUnavailable):
            log.warning("a row on a skipped trajectory is sent again", error=str(error))
            row.failures += 1
            # Only queued, because a callback cannot wait. If the first row did arrive, readers recognise the repeat by
            # its number.
            self._outbox.append(row)
        elif error is not None:
            self.refused_by = error if isinstance(error, BusError) else BusError(f"a row was refused: {error!r}")
