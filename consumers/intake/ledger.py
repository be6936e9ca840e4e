"""The fate of every record: pending, trained, or skipped with a reason. Decides nothing.

Invariants, each with a test of its name:
- every_record_meets_one_fate: read = trained + skipped + pending, and a fate is final;
- records_of_a_group_are_finished_together: refused siblings are withheld until the group ends, so that a restart
  never finds a part of it;
- the_end_of_an_untrained_group_is_told: with samples that never came, a row says that the whole group ended.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from consumers.batching.samples import Group
from consumers.intake.frontier import Frontier
from consumers.intake.judging.groups import Closed, Refusal
from consumers.intake.rejects import Rejects
from schemas.errors import LifecycleError
from schemas.messages.reports import RecordRef, SkipReason
from schemas.ports.bus import Record

WHOLE_GROUP = frozenset({SkipReason.GROUP_INCOMPLETE, SkipReason.ZERO_ADVANTAGE})
"""Reasons from which readers conclude that a group is over, whatever they know of its other samples."""


@dataclass(frozen=True, slots=True)
class Fates:
    """Records read by this process, and what became of them."""

    read: int
    trained: int
    skipped: int
    pending: int


@dataclass(slots=True)
class _Ending:
    """A closed group that is not finished: its usable samples still to be, and the rows withheld until then."""

    closed: Closed
    remaining: int
    withheld: list[Refusal]
    is_trained: bool = False

    def rows(self, last: list[Refusal]) -> list[Refusal]:
        """What is to be written now that the last usable samples were skipped."""
        rows = last + self.withheld
        missing = self.closed.missing
        if self.is_trained or missing <= 0 or not rows or any(row.reason in WHOLE_GROUP for row in rows):
            return rows
        first = rows[0]
        detail = f"{first.reason.value}: {first.detail}; {missing} of {self.closed.wanted} samples never came"
        return [replace(first, reason=SkipReason.GROUP_INCOMPLETE, detail=detail), *rows[1:]]


class Ledger:
    """Books of one intake. ``current_step``: of the trainer, for the rows."""

    def __init__(self, frontier: Frontier, rejects: Rejects, current_step: Callable[[], int]) -> None:
        self.frontier = frontier
        self.rejects = rejects
        self.pending_bytes = 0
        self._current_step = current_step
        self._pending: dict[tuple[int, int], int] = {}
        self._endings: dict[str, _Ending] = {}
        self._due: deque[tuple[str, Refusal]] = deque()
        self._writing = asyncio.Lock()
        self._read = 0
        self._trained = 0

    def fates(self) -> Fates:
        """The books so far."""
        return Fates(self._read, self._trained, self.rejects.counts.total(), len(self._pending))

    def read(self, record: Record) -> bool:
        """Take a record into the books; false if it is finished or was read before."""
        if not self.frontier.mark_read(record.partition, record.offset):
            return False
        size = len(record.value or b"")
        self._pending[record.partition, record.offset] = size
        self.pending_bytes += size
        self._read += 1
        return True

    def release(self, ref: RecordRef) -> None:
        """The record stays pending, but its content is not held any more."""
        self.pending_bytes -= self._pending[ref.partition, ref.offset]
        self._pending[ref.partition, ref.offset] = 0

    async def skip(self, refusal: Refusal, group_id: str | None) -> None:
        """Write a row and finish the record."""
        await self.rejects.skip(refusal.ref, group_id, refusal.reason, refusal.detail, self._current_step())
        self._finish(refusal.ref)

    def hold(self, closed: Closed) -> None:
        """A group was closed; its records are finished by ``mark_trained`` and ``skip_samples``."""
        self._endings[closed.group.group_id] = _Ending(closed, len(closed.group.samples), list(closed.refusals))

    async def skip_late(self, refusal: Refusal, group_id: str) -> None:
        """A sample came after its group was closed: its row waits for the end of the group if that is to come."""
        ending = self._endings.get(group_id)
        if ending is None:
            await self.skip(refusal, group_id)
        else:
            self.release(refusal.ref)
            ending.withheld.append(refusal)

    async def skip_samples(self, group: Group, reason: SkipReason, detail: str) -> None:
        """Finish samples of a held group without training them."""
        ending = self._ending_of(group.group_id)
        ending.remaining -= len(group.samples)
        rows = [Refusal(sample.ref, reason, detail) for sample in group.samples]
        if ending.remaining == 0:
            del self._endings[group.group_id]
            rows = ending.rows(rows)
        for row in rows:
            await self.skip(row, group.group_id)

    def mark_trained(self, refs: Iterable[RecordRef]) -> None:
        """Finish samples of held groups that are in the weights now. Rows withheld for them fall due."""
        for ref in refs:
            group_id = ref.trajectory_id.rpartition("/")[0]
            ending = self._ending_of(group_id)
            self._finish(ref)
            self._trained += 1
            ending.is_trained = True
            ending.remaining -= 1
            if ending.remaining == 0:
                del self._endings[group_id]
                self._due += [(group_id, refusal) for refusal in ending.withheld]

    async def write_due_rows(self) -> None:
        """Write the rows that ``mark_trained`` made due; returns when all are written, whoever writes them."""
        async with self._writing:
            while self._due:
                group_id, refusal = self._due[0]
                await self.skip(refusal, group_id)
                self._due.popleft()

    def _ending_of(self, group_id: str) -> _Ending:
        ending = self._endings.get(group_id)
        if ending is None:
            raise LifecycleError(f"expected a group that was handed out and is not finished, got {group_id}")
        return ending

    def _finish(self, ref: RecordRef) -> None:
        size = self._pending.pop((ref.partition, ref.offset), None)
        if size is None:
            raise LifecycleError(f"expected a pending record, got {ref}, which was never read or is finished")
        self.pending_bytes -= size
        self.frontier.mark_done((ref,))
