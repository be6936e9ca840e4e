"""The fate of every record: pending, trained, or skipped with a reason. Decides nothing and waits for nothing.

Invariants, each with a test of its name:
- every_record_meets_one_fate: read = trained + skipped + pending, and a fate is final;
- records_of_a_group_are_finished_together: refused siblings are withheld until the group ends, so that a restart
  never finds a part of it;
- the_end_of_an_untrained_group_is_told: with samples that never came, a row says that the whole group ended.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from bus.port import Record
from consumers.batching.micro_batches import Group
from consumers.ingest.frontier import Frontier
from consumers.ingest.groups import Closed, Refusal
from consumers.ingest.rejections import Rejects
from schemas.errors import LifecycleError
from schemas.reports import RecordRef, SkipReason

WHOLE_GROUP = frozenset({SkipReason.GROUP_INCOMPLETE, SkipReason.ZERO_ADVANTAGE})
"""Reasons from which readers conclude that a group is over, whatever they know of its other samples."""


class Anchor(NamedTuple):
    """A finished record by which a topic is known again: the highest of its partition."""

    offset: int
    trajectory_id: str


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
    """Books of one intake. ``current_step``: of the trainer, for the rows.

    ``prompt_cursor``: all prompts whose groups ended lie below this position of the prompt source.
    """

    def __init__(
        self,
        frontier: Frontier,
        rejects: Rejects,
        current_step: Callable[[], int],
        anchors: Mapping[int, Anchor] | None = None,
        prompt_cursor: int = 0,
    ) -> None:
        self.frontier = frontier
        self.rejects = rejects
        self.anchors = dict(anchors or {})
        self.prompt_cursor = prompt_cursor
        self.pending_bytes = 0
        self._current_step = current_step
        self._pending: dict[tuple[int, int], int] = {}
        self._endings: dict[str, _Ending] = {}
        self._read = 0
        self._trained = 0
        self._skipped = 0

    def fates(self) -> Fates:
        """The books so far."""
        return Fates(self._read, self._trained, self._skipped, len(self._pending))

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

    def skip(self, refusal: Refusal, group_id: str | None) -> None:
        """Write a row and finish the record."""
        self._finish(refusal.ref)
        self.rejects.skip(refusal.ref, group_id, refusal.reason, refusal.detail, self._current_step())
        self._skipped += 1

    def lose(self, partition: int, first: int, end: int) -> None:
        """The broker deleted these records before they were read: rows for those that were not finished."""
        detail = f"retention deleted offsets {first} to {end - 1} before they were trained; the loss was accepted"
        for start, stop in self.frontier.partition(partition).unfinished_stretches(first, end):
            ref = RecordRef("", partition, start)
            self.rejects.skip(ref, None, SkipReason.RETENTION_EXPIRED, detail, self._current_step(), stop)
        self.frontier.partition(partition).pass_over(first, end)

    def hold(self, closed: Closed) -> None:
        """A group was closed; its records are finished by ``mark_trained`` and ``skip_samples``."""
        self._endings[closed.group.group_id] = _Ending(closed, len(closed.group.samples), list(closed.refusals))

    def skip_late(self, refusal: Refusal, group_id: str) -> None:
        """A sample came after its group was closed: its row waits for the end of the group if that is to come."""
        if group_id in self._endings:
            self.release(refusal.ref)
            self._endings[group_id].withheld.append(refusal)
        else:
            self.skip(refusal, group_id)

    def refuse(self, group: Group, refusals: Sequence[Refusal]) -> bool:
        """Samples of a held group are not usable after all; whether enough of it is left. Their rows are withheld."""
        ending = self._ending_of(group.group_id)
        for refusal in refusals:
            self.release(refusal.ref)
        ending.withheld += refusals
        ending.remaining -= len(refusals)
        return ending.closed.would_be_usable(ending.remaining)

    def skip_samples(self, group: Group, reason: SkipReason, detail: str) -> None:
        """Finish samples of a held group without training them."""
        ending = self._ending_of(group.group_id)
        ending.remaining -= len(group.samples)
        rows = [Refusal(sample.ref, reason, detail) for sample in group.samples]
        if ending.remaining == 0:
            rows = ending.rows(rows)
            self._end(ending)
        for row in rows:
            self.skip(row, group.group_id)

    def mark_trained(self, refs: Iterable[RecordRef]) -> None:
        """Finish samples of held groups that are in the weights now, and write the rows withheld for them."""
        for ref in refs:
            group_id = ref.trajectory_id.rpartition("/")[0]
            ending = self._ending_of(group_id)
            self._finish(ref)
            self._trained += 1
            ending.is_trained = True
            ending.remaining -= 1
            if ending.remaining == 0:
                self._end(ending)
                for refusal in ending.withheld:
                    self.skip(refusal, group_id)

    def _end(self, ending: _Ending) -> None:
        del self._endings[ending.closed.group.group_id]
        self.prompt_cursor = max(self.prompt_cursor, ending.closed.position + 1)

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
        anchor = self.anchors.get(ref.partition)
        if ref.trajectory_id and (anchor is None or ref.offset > anchor.offset):
            self.anchors[ref.partition] = Anchor(ref.offset, ref.trajectory_id)
