"""Where every record stands: pending, trained, or skipped with a reason. Decides nothing and waits for nothing.

Invariants, each with a test of its name:
- every_record_has_one_outcome: read = trained + skipped + pending, and an outcome is final;
- records_of_a_group_are_finished_together: rejected siblings are withheld until the group ends, so that a restart
  never finds a part of it;
- every_sample_is_known_again: of a group that was closed, whether it is finished or not, and however long ago;
- the_end_of_an_untrained_group_is_reported: with samples that never came, a row says that the whole group ended.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated

from pydantic import Field

from streamrl.bus.port import Record
from streamrl.consumers.batching.micro_batches import Group
from streamrl.consumers.ingest.finished_groups import FinishedGroups
from streamrl.consumers.ingest.frontier import Frontier
from streamrl.consumers.ingest.groups import ClosedGroup, Rejection
from streamrl.consumers.ingest.rejections import RejectionWriter
from streamrl.schemas.errors import LifecycleError
from streamrl.schemas.identifiers import group_id_of, sample_index_of
from streamrl.schemas.reports import RecordRef, SkipReason
from streamrl.schemas.trajectories import Part

WHOLE_GROUP = frozenset({SkipReason.GROUP_INCOMPLETE, SkipReason.ZERO_ADVANTAGE})
"""Reasons from which readers conclude that a group is over, whatever they know of its other samples."""


class KnownRecord(Part):
    """The highest finished record of a partition: if the topic shows another one there, it was created anew."""

    offset: Annotated[int, Field(ge=0)]
    trajectory_id: str


@dataclass(frozen=True, slots=True)
class RecordCounts:
    """Records read by this process, by where they stand."""

    read: int
    trained: int
    skipped: int
    pending: int


@dataclass(slots=True)
class _UnfinishedGroup:
    """A closed group: how many of its usable samples are not finished, and the rows withheld until all are.

    ``delivered``: indices of the samples that came.
    """

    closed: ClosedGroup
    remaining: int
    withheld: list[Rejection]
    delivered: set[int]
    is_trained: bool = False

    def rows(self, last: list[Rejection]) -> list[Rejection]:
        """What is to be written now that the last usable samples were skipped."""
        rows = last + self.withheld
        missing = self.closed.missing
        if self.is_trained or missing <= 0 or not rows or any(row.reason in WHOLE_GROUP for row in rows):
            return rows
        # No row tells yet that samples which never came are over too, and the dispatcher would wait for them: the
        # first row is given the reason that says so, and keeps its own in the detail.
        first = rows[0]
        detail = f"{first.reason.value}: {first.detail}; {missing} of {self.closed.wanted} samples never came"
        return [replace(first, reason=SkipReason.GROUP_INCOMPLETE, detail=detail), *rows[1:]]


class Ledger:
    """The accounts of one reader. ``current_step``: of the trainer, for the rows.

    ``frontier`` is the live one: what the weights in memory contain, and what was skipped; copy it to keep it.
    ``pending_bytes``: of trajectories held, in groups that are incomplete, ready, or handed out and not finished.
    ``finished_groups``: all that have ended, as the frontier's companion: a checkpoint keeps both of one moment.
    ``prompt_cursor``: all prompts whose groups ended lie below this position of the prompt source.
    """

    def __init__(
        self,
        frontier: Frontier,
        rejections: RejectionWriter,
        current_step: Callable[[], int],
        known_records: Mapping[int, KnownRecord] | None = None,
        prompt_cursor: int = 0,
        finished_groups: FinishedGroups | None = None,
    ) -> None:
        self.finished_groups = finished_groups or FinishedGroups()
        self.frontier = frontier
        self.rejections = rejections
        self.known_records = dict(known_records or {})
        self.prompt_cursor = prompt_cursor
        self.pending_bytes = 0
        self._current_step = current_step
        self._pending: dict[tuple[int, int], int] = {}  # bytes held, by partition and offset
        self._unfinished: dict[str, _UnfinishedGroup] = {}
        self._read = 0
        self._trained = 0
        self._skipped = 0

    def is_finished(self, trajectory_id: str) -> bool:
        """Whether the trajectory is known as one of a group that has ended."""
        index = sample_index_of(trajectory_id)
        return index is not None and self.finished_groups.has_sample(group_id_of(trajectory_id), index)

    def move(self, frontier: Frontier, known_records: Mapping[int, KnownRecord]) -> None:
        """Go on with another topic, before any record was read."""
        assert not self._read, "records that were read keep their offsets"
        self.frontier = frontier
        self.known_records = dict(known_records)

    def counts(self) -> RecordCounts:
        """The sums so far."""
        return RecordCounts(self._read, self._trained, self._skipped, len(self._pending))

    def record_read(self, record: Record) -> bool:
        """Enter a record as pending; false if it is finished or was read before."""
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
        self._pending[ref.partition, ref.offset] = 0  # not taken out: the record has no outcome yet

    def skip(self, rejection: Rejection, group_id: str | None) -> None:
        """Write a row and finish the record."""
        # First, since it raises for a record that has an outcome: that must not get a second row.
        self._finish(rejection.ref)
        self.rejections.skip(rejection.ref, group_id, rejection.reason, rejection.detail, self._current_step())
        self._skipped += 1

    def record_loss(self, partition: int, first: int, end: int) -> None:
        """The broker deleted these records before they were read: rows for those that were not finished."""
        detail = f"retention deleted offsets {first} to {end - 1} before they were trained; the loss was accepted"
        self._pass_over(partition, first, end, SkipReason.RETENTION_EXPIRED, detail)

    def record_start(self, partition: int, first: int, end: int) -> None:
        """Reading begins at ``end``: a row for what was there before."""
        detail = f"attached behind offset {end - 1}: what came before is not for this instance"
        self._pass_over(partition, first, end, SkipReason.BEFORE_ATTACH, detail)

    def _pass_over(self, partition: int, first: int, end: int, reason: SkipReason, detail: str) -> None:
        # Before the frontier passes over it, after which nothing in the range counts as unfinished.
        for start, stop in self.frontier.partition(partition).unfinished_stretches(first, end):
            ref = RecordRef("", partition, start)
            self.rejections.skip(ref, None, reason, detail, self._current_step(), stop)
        self.frontier.partition(partition).pass_over(first, end)

    def hold(self, closed: ClosedGroup) -> None:
        """A group was closed; its records are finished by ``mark_trained`` and ``mark_skipped``."""
        group = closed.group
        refs = (*(sample.ref for sample in group.samples), *(rejection.ref for rejection in closed.rejections))
        delivered = {index for ref in refs if (index := sample_index_of(ref.trajectory_id)) is not None}
        held = _UnfinishedGroup(closed, len(group.samples), list(closed.rejections), delivered)
        self._unfinished[group.group_id] = held

    def is_closed(self, group_id: str) -> bool:
        """Whether the group is over, so that a sample of it comes late."""
        return group_id in self._unfinished or group_id in self.finished_groups

    def has_sample(self, group_id: str, index: int) -> bool:
        """Whether this sample of a closed group came before."""
        held = self._unfinished.get(group_id)
        return self.finished_groups.has_sample(group_id, index) if held is None else index in held.delivered

    def skip_late(self, rejection: Rejection, group_id: str, index: int) -> None:
        """A sample came after its group was closed: its row waits for the end of the group if that is to come."""
        if (held := self._unfinished.get(group_id)) is not None:
            self.release(rejection.ref)
            held.withheld.append(rejection)
            held.delivered.add(index)
        else:
            self.skip(rejection, group_id)
            self.finished_groups.add_sample(group_id, index)

    def mark_skipped(self, group: Group, reason: SkipReason, detail: str) -> None:
        """Finish samples of a held group that are not trained: rows are written.

        Raises:
            LifecycleError: they are finished already.
        """
        held = self._held(group.group_id)
        held.remaining -= len(group.samples)
        rows = [Rejection(sample.ref, reason, detail) for sample in group.samples]
        if held.remaining == 0:
            rows = held.rows(rows)
            self._end(held)
        # Nothing here awaits, so a snapshot finds all of the group finished, or none of it.
        for row in rows:
            self.skip(row, group.group_id)

    def mark_trained(self, refs: Iterable[RecordRef]) -> None:
        """Finish samples of held groups that are in the weights now, and write the rows withheld for them.

        Raises:
            LifecycleError: one of them is finished already.
        """
        for ref in refs:
            group_id = group_id_of(ref.trajectory_id)
            held = self._held(group_id)
            self._finish(ref)
            self._trained += 1
            held.is_trained = True
            held.remaining -= 1
            if held.remaining == 0:
                self._end(held)
                # Only now: were these finished before, a restart could find the group without them.
                for rejection in held.withheld:
                    self.skip(rejection, group_id)

    def _end(self, held: _UnfinishedGroup) -> None:
        group_id = held.closed.group.group_id
        del self._unfinished[group_id]
        self.finished_groups.add(group_id, held.delivered, held.closed.wanted)
        self.prompt_cursor = max(self.prompt_cursor, held.closed.position + 1)

    def _held(self, group_id: str) -> _UnfinishedGroup:
        held = self._unfinished.get(group_id)
        if held is None:
            raise LifecycleError(f"expected a group that was handed out and is not finished, got {group_id}")
        return held

    def _finish(self, ref: RecordRef) -> None:
        size = self._pending.pop((ref.partition, ref.offset), None)
        if size is None:
            raise LifecycleError(f"expected a pending record, got {ref}, which was never read or is finished")
        self.pending_bytes -= size
        self.frontier.mark_done((ref,))
        known = self.known_records.get(ref.partition)
        # A record without a name did not decode; there is nothing to know it again by.
        if ref.trajectory_id and (known is None or ref.offset > known.offset):
            self.known_records[ref.partition] = KnownRecord(offset=ref.offset, trajectory_id=ref.trajectory_id)
