"""The state of every record: pending, trained, or skipped with a reason. Decides nothing and waits for nothing.

Invariants, each with a test of its name:
- every_record_has_one_outcome: read = trained + skipped + pending, and an outcome is final;
- records_of_a_group_are_finished_together: rows of rejected siblings wait until the group ends, so that a restart never
  finds a part of it;
- every_sample_of_a_closed_group_is_recognised, whether the group is finished or not, and however long ago it closed;
- the_end_of_an_untrained_group_is_reported: if samples never arrived, a row says that the whole group ended.

``FinishedGroups`` recognises a repeat, however late it arrives. A group named ``<data set>/<index>/<pass>`` takes one
bit, so no group must be forgotten: a million groups take 125 kB. All records of a group are finished together, so the
samples of a complete group need no bits. If a group ended without some samples, the indices of the others are stored.
- a_finished_sample_is_never_forgotten, however many groups end after it, also through JSON;
- a_copy_does_not_change: what a checkpoint holds does not change with the reader.
"""

import base64
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from pydantic import Field

from streamrl.bus.port import Record
from streamrl.consumers.batching.micro_batches import Group
from streamrl.consumers.ingest.frontier import Frontier
from streamrl.consumers.ingest.groups import ClosedGroup, Rejection
from streamrl.consumers.ingest.limits import LIMITS
from streamrl.consumers.ingest.rejections import RejectionWriter
from streamrl.consumers.ingest.skip_streak import SkipStreak
from streamrl.schemas.errors import LifecycleError
from streamrl.schemas.identifiers import group_id_of, sample_index_of
from streamrl.schemas.reports import ENDS_GROUP, RecordRef, SkipReason
from streamrl.schemas.trajectories import Part

WHOLE_GROUP = ENDS_GROUP | {SkipReason.GROUP_INCOMPLETE}
"""Reasons that tell readers that a group has ended, even if they know nothing about its other samples."""
CHUNK = 4096
"""Groups that share an integer: half a kilobyte is copied when one of them ends."""
_NUMBERED = re.compile(r"(.*)/(0|[1-9]\d{0,17})/(0|[1-9]\d{0,17})", re.DOTALL)
"""Data set, index and pass, with numbers in the form in which we write them: two names never share a bit."""
_Place = tuple[str, int, int]
"""Data set, pass, and number of the chunk of ``CHUNK`` indices."""


@dataclass
class FinishedGroups:
    """The groups that have ended.

    ``_whole``: bits of the groups whose samples all arrived; ``_partial``: for all others, the indices of the samples
    that arrived. All values are immutable, so a copy shares them.
    """

    _whole: dict[_Place, int] = field(default_factory=dict)
    _partial: dict[str, frozenset[int]] = field(default_factory=dict)

    def finish(self, group_id: str, samples: Iterable[int], wanted: int) -> None:
        """Record that a group has ended; ``samples``: indices of those that arrived, of ``wanted``."""
        came, found = frozenset(samples), _place_of(group_id)
        if found is None or len(came) != wanted:
            self._partial[group_id] = came
        else:
            place, bit = found
            self._whole[place] = self._whole.get(place, 0) | 1 << bit

    def add_sample(self, group_id: str, index: int) -> None:
        """Record a sample that arrived after its group had ended."""
        if group_id in self._partial:
            self._partial[group_id] |= {index}

    def __contains__(self, group_id: str) -> bool:
        return group_id in self._partial or self._is_whole(group_id)

    def has_sample(self, group_id: str, index: int) -> bool:
        """Whether the group has ended and this sample had arrived."""
        came = self._partial.get(group_id)
        return self._is_whole(group_id) if came is None else index in came

    def _is_whole(self, group_id: str) -> bool:
        found = _place_of(group_id)
        return found is not None and bool(self._whole.get(found[0], 0) >> found[1] & 1)

    def copy(self) -> "FinishedGroups":
        """An independent copy, for a checkpoint, while this one changes."""
        return FinishedGroups(dict(self._whole), dict(self._partial))

    def to_json(self) -> dict[str, Any]:
        """``{"whole": [["gsm8k", 0, {"0": "Bw=="}]], "partial": {"gsm8k/7/0": [0, 2]}}``, bits in base64."""
        chunks: dict[tuple[str, int], dict[str, str]] = {}
        for (dataset, data_pass, number), bits in self._whole.items():
            packed = bits.to_bytes((bits.bit_length() + 7) // 8, "little")
            chunks.setdefault((dataset, data_pass), {})[str(number)] = base64.b64encode(packed).decode()
        return {
            "whole": [[dataset, data_pass, found] for (dataset, data_pass), found in chunks.items()],
            "partial": {group_id: sorted(came) for group_id, came in self._partial.items()},
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "FinishedGroups":
        """The groups that ``to_json`` wrote."""
        whole = {
            (str(dataset), int(data_pass), int(number)): int.from_bytes(base64.b64decode(packed), "little")
            for dataset, data_pass, found in data["whole"]
            for number, packed in found.items()
        }
        return cls(whole, {str(group_id): frozenset(map(int, came)) for group_id, came in data["partial"].items()})


def _place_of(group_id: str) -> tuple[_Place, int] | None:
    """Where a group's bit is; None for a name of another form."""
    if (match := _NUMBERED.fullmatch(group_id)) is None:
        return None
    number, bit = divmod(int(match[2]), CHUNK)
    return (match[1], int(match[3]), number), bit


class KnownRecord(Part):
    """The highest finished record of a partition: if the topic holds another one there, it was created again."""

    offset: Annotated[int, Field(ge=0)]
    trajectory_id: str


@dataclass(frozen=True, slots=True)
class RecordCounts:
    """Numbers of records read by this process, by state."""

    read: int
    trained: int
    skipped: int
    pending: int


@dataclass(slots=True)
class _UnfinishedGroup:
    """A closed group that is not finished.

    ``remaining``: number of usable samples that are not finished; ``withheld``: rows that wait until all are;
    ``delivered``: indices of the samples that arrived.
    """

    closed: ClosedGroup
    remaining: int
    withheld: list[Rejection]
    delivered: set[int]
    is_trained: bool = False

    def rows(self, last: list[Rejection]) -> list[Rejection]:
        """The rows to write when the last usable samples were skipped; ``last``: the rows of these."""
        rows = last + self.withheld
        missing = self.closed.missing
        if self.is_trained or missing <= 0 or not rows or any(row.reason in WHOLE_GROUP for row in rows):
            return rows
        # Otherwise no row would say that the missing samples have ended too, and the dispatcher would wait for them. So
        # the first row gets the reason that says so, and keeps its own reason in the detail.
        first = rows[0]
        detail = f"{first.reason.value}: {first.detail}; {missing} of {self.closed.wanted} samples never arrived"
        return [replace(first, reason=SkipReason.GROUP_INCOMPLETE, detail=detail), *rows[1:]]


class Ledger:
    """One reader's records and their states. ``current_step``: gives the trainer's step, for the rows.

    ``frontier`` is live: it covers records in the weights in memory, and skipped ones; copy it to store it.
    ``pending_bytes``: bytes of held trajectories, in groups that are incomplete, ready, or handed out and unfinished.
    ``finished_groups``: all groups that have ended; a checkpoint stores it and the frontier of the same moment.
    ``prompt_cursor``: the position in the prompt source after the last prompt whose group has ended. ``skip_streak``:
    the number of groups in a row without a trained trajectory.
    """

    def __init__(
        self,
        frontier: Frontier,
        rejections: RejectionWriter,
        current_step: Callable[[], int],
        known_records: Mapping[int, KnownRecord] | None = None,
        prompt_cursor: int = 0,
        finished_groups: FinishedGroups | None = None,
        skip_streak: SkipStreak | None = None,
    ) -> None:
        self.finished_groups = finished_groups or FinishedGroups()
        self.skip_streak = skip_streak or SkipStreak(LIMITS.max_skipped_groups)
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
        """Whether the trajectory's group has ended and the trajectory had arrived."""
        index = sample_index_of(trajectory_id)
        return index is not None and self.finished_groups.has_sample(group_id_of(trajectory_id), index)

    def move(self, frontier: Frontier, known_records: Mapping[int, KnownRecord]) -> None:
        """Continue with another topic, before any record was read."""
        assert not self._read, "move the ledger before reading"
        self.frontier = frontier
        self.known_records = dict(known_records)

    def counts(self) -> RecordCounts:
        """The numbers of records so far."""
        return RecordCounts(self._read, self._trained, self._skipped, len(self._pending))

    def record_read(self, record: Record) -> bool:
        """Add a record as pending; false if it is finished or was read before."""
        if not self.frontier.mark_read(record.partition, record.offset):
            return False
        size = len(record.value or b"")
        self._pending[record.partition, record.offset] = size
        self.pending_bytes += size
        self._read += 1
        return True

    def release(self, ref: RecordRef) -> None:
        """Stop counting the bytes of a pending record, whose content is no longer held."""
        self.pending_bytes -= self._pending[ref.partition, ref.offset]
        self._pending[ref.partition, ref.offset] = 0  # not removed: the record has no outcome yet

    def skip(self, rejection: Rejection, group_id: str | None) -> None:
        """Write a row and finish the record."""
        # First, since it raises for a record that has an outcome, which must not get a second row.
        self._finish(rejection.ref)
        self.rejections.skip(rejection.ref, group_id, rejection.reason, rejection.detail, self._current_step())
        self._skipped += 1

    def record_loss(self, partition: int, first: int, end: int) -> None:
        """Write rows for unfinished records that the broker deleted before they were read."""
        detail = f"retention deleted offsets {first} to {end - 1} before they were trained; the loss was accepted"
        self._pass_over(partition, first, end, SkipReason.RETENTION_EXPIRED, detail)

    def record_start(self, partition: int, first: int, end: int) -> None:
        """Start reading at ``end``, with a row for the earlier records."""
        detail = f"attached after offset {end - 1}: earlier records are not for this instance"
        self._pass_over(partition, first, end, SkipReason.BEFORE_ATTACH, detail)

    def _pass_over(self, partition: int, first: int, end: int, reason: SkipReason, detail: str) -> None:
        # Before ``pass_over``, after which everything in the range counts as finished.
        for start, stop in self.frontier.partition(partition).unfinished_stretches(first, end):
            ref = RecordRef("", partition, start)
            self.rejections.skip(ref, None, reason, detail, self._current_step(), stop)
        self.frontier.partition(partition).pass_over(first, end)

    def hold(self, closed: ClosedGroup) -> None:
        """Hold a closed group until ``mark_trained`` and ``mark_skipped`` have finished its records."""
        group = closed.group
        refs = (*(sample.ref for sample in group.samples), *(rejection.ref for rejection in closed.rejections))
        delivered = {index for ref in refs if (index := sample_index_of(ref.trajectory_id)) is not None}
        held = _UnfinishedGroup(closed, len(group.samples), list(closed.rejections), delivered)
        self._unfinished[group.group_id] = held

    def is_closed(self, group_id: str) -> bool:
        """Whether the group is closed, so that further samples are late."""
        return group_id in self._unfinished or group_id in self.finished_groups

    def has_sample(self, group_id: str, index: int) -> bool:
        """Whether this sample of a closed group has already arrived."""
        held = self._unfinished.get(group_id)
        return self.finished_groups.has_sample(group_id, index) if held is None else index in held.delivered

    def skip_late(self, rejection: Rejection, group_id: str, index: int) -> None:
        """Skip a sample that arrived after its group was closed; its row waits for the end of the group."""
        if (held := self._unfinished.get(group_id)) is not None:
            self.release(rejection.ref)
            held.withheld.append(rejection)
            held.delivered.add(index)
        else:
            self.skip(rejection, group_id)
            self.finished_groups.add_sample(group_id, index)

    def mark_skipped(self, group: Group, reason: SkipReason, detail: str) -> None:
        """Finish samples of a held group that are not trained, and write their rows.

        Raises:
            LifecycleError: the samples are finished already.
            NothingToTrain: too many groups in a row were skipped; this group is finished.
        """
        held = self._held(group.group_id)
        held.remaining -= len(group.samples)
        rows = [Rejection(sample.ref, reason, detail) for sample in group.samples]
        if held.remaining == 0:
            rows = held.rows(rows)
            self._end(held)
        # No await here, so a snapshot sees all of these samples finished, or none.
        for row in rows:
            self.skip(row, group.group_id)
        if held.remaining == 0 and not held.is_trained:
            # The rejections of its samples say more than that the group was incomplete.
            first = next((row for row in held.withheld if reason is SkipReason.GROUP_INCOMPLETE), None)
            cause = (reason, detail) if first is None else (first.reason, first.detail)
            self.skip_streak.add(group.group_id, *cause)  # last, since it may raise

    def mark_trained(self, refs: Iterable[RecordRef]) -> None:
        """Finish samples of held groups that are now in the weights, and write the withheld rows of ended groups.

        Raises:
            LifecycleError: a sample is finished already.
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
                # Only now: if these were finished earlier, a restart could find the group without them.
                for rejection in held.withheld:
                    self.skip(rejection, group_id)

    def _end(self, held: _UnfinishedGroup) -> None:
        group_id = held.closed.group.group_id
        del self._unfinished[group_id]
        self.finished_groups.finish(group_id, held.delivered, held.closed.wanted)
        self.prompt_cursor = max(self.prompt_cursor, held.closed.position + 1)

    def _held(self, group_id: str) -> _UnfinishedGroup:
        held = self._unfinished.get(group_id)
        if held is None:
            raise LifecycleError(f"expected a group that was handed out and is not finished, got {group_id}")
        return held

    def _finish(self, ref: RecordRef) -> None:
        size = self._pending.pop((ref.partition, ref.offset), None)
        if size is None:
            raise LifecycleError(f"expected a pending record, got {ref}, which was not read or is already finished")
        self.pending_bytes -= size
        self.frontier.mark_done((ref,))
        known = self.known_records.get(ref.partition)
        # A record without a name did not decode, so it cannot be recognised later.
        if ref.trajectory_id and (known is None or ref.offset > known.offset):
            self.known_records[ref.partition] = KnownRecord(offset=ref.offset, trajectory_id=ref.trajectory_id)
