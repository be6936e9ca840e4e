"""Indexes the topics of a run, record by record and in any order. It keeps only the fields that the balance needs.

A run may hold tens of millions of trajectories. So only the id in a trajectory's header is read, and the index is made
of columns (``columns.py``).

Repeats count once. A step report is recognised by its version, a skip row by its lineage and sequence. A repeat with
other contents is kept as a conflict.

Only the chain of surviving lineages counts: see ``schemas/lineage.py``.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import xxhash

from streamrl.bus.history import Extent
from streamrl.bus.port import Record
from streamrl.inspection.audit.columns import Hashes, Ints, Mask, RecordEntries, RecordPositions, as_hashes, hash_of
from streamrl.inspection.audit.rows import RowContent, RowSum, SkipRows
from streamrl.schemas.codec import CONTINUATIONS_HEADER, TURNS_HEADER, dead_letter_error_class, peek, peek_trajectory_id
from streamrl.schemas.errors import DataError, MalformedFrame
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.lineage import LineageChain, LineageStart
from streamrl.schemas.reports import CarriedOver, RecordRef, RefusedStep, SkipReason, SkipRecord, StepReport
from streamrl.schemas.trajectories import UngradedTrajectory, WorkOrder

TRAINED = 0
REASONS: tuple[SkipReason, ...] = tuple(reason for reason in SkipReason if reason is not SkipReason.OTHER)
CODE_OF = {reason: code for code, reason in enumerate(REASONS, start=1)}
"""Codes of ``RecordEntries``: 0 is trained, then the skip reasons in the order of their declaration, then
``CARRIED``."""
RANGES = (CODE_OF[SkipReason.RETENTION_EXPIRED], CODE_OF[SkipReason.BEFORE_ATTACH])
"""Codes of rows that cover all records of a range of offsets without naming them."""
CARRIED = len(REASONS) + 1
"""Code of a record that was finished on another cluster, before the lineage that reports it."""


def ordered_ids_of(record: Record) -> list[str]:
    """Ids of the trajectories that a work order asks for; empty if the record is not a work order."""
    fields = peek(record.value, record.headers, WorkOrder.SCHEMA, ("group_id", "sample_indices"))
    group, indices = fields.get("group_id"), fields.get("sample_indices")
    if not isinstance(group, str) or not isinstance(indices, list):
        return []
    return [f"{group}/{index}" for index in indices]


def _sample_of(name: str) -> str:
    index = name.rpartition("/")[2]
    # No group has so many samples that an index needs more digits. A damaged order must not make us look for billions.
    return index if index.isdecimal() and len(index) <= 4 else ""


def counted_by(chain: LineageChain, codes: Ints, lineages: Ints, numbers: Ints) -> Mask:
    """Which entries a chain contains. A link bounds steps by step number, and all other entries by row number."""
    counted = np.zeros(len(codes), dtype=np.bool_)
    trained = codes == TRAINED
    for link in chain.links:
        steps, rows = trained.copy(), ~trained
        if link.after is not None:
            steps &= numbers > link.after
        if link.until is not None:
            steps &= numbers <= link.until
        if link.rows is not None:
            rows &= numbers <= link.rows
        counted |= (lineages == link.lineage) & (steps | rows)
    return counted


class Conflict(NamedTuple):
    """One version or row that was written with two contents. ``ref``: one of its records."""

    lineage: int
    number: int
    detail: str
    ref: RecordRef | None


@dataclass
class ConflictTally:
    """The number of conflicts, and the one with the lowest lineage and number, in any order of finding them."""

    count: int = 0
    first: Conflict | None = None

    def note(self, conflict: Conflict) -> None:
        """Count a conflict."""
        self.count += 1
        if self.first is None or conflict[:3] < self.first[:3]:
            self.first = conflict


@dataclass
class CarriedRecords:
    """A lineage's summary of the records that were finished on another cluster; see ``CarriedOver``.

    The records themselves are entries. ``parts``: the parts of the summary that were read.
    """

    absent: int
    skips_hash: str
    skips_by_reason: dict[str, int]
    parts: set[int] = field(default_factory=set)


@dataclass
class AlgorithmIndex:
    """All reports and rows of one algorithm's trainer.

    ``steps``: fingerprints of the reports with groups, by version; ``last_steps``: versions whose reports say that the
    run reached its end; ``row_sums``: sums of rows that checks have computed, by the chain of lineages up to there;
    ``carried``: records finished on another cluster, by lineage.
    """

    entries: RecordEntries = field(default_factory=RecordEntries)
    lineage_starts: dict[int, LineageStart] = field(default_factory=dict)
    steps: dict[PolicyVersion, bytes] = field(default_factory=dict)
    rows: SkipRows = field(default_factory=SkipRows)
    refused_steps: int = 0
    conflicts: ConflictTally = field(default_factory=ConflictTally)
    last_steps: set[PolicyVersion] = field(default_factory=set)
    row_sums: dict[tuple[int, ...], RowSum] = field(default_factory=dict)
    carried: dict[int, CarriedRecords] = field(default_factory=dict)

    def take(self, which: Mask) -> RecordEntries:
        """Remove these entries and return them."""
        taken, self.entries = self.entries.chosen(which), self.entries.chosen(~which)
        return taken

    def add_carried(self, message: CarriedOver) -> None:
        """Add records that were finished on another cluster. A part that was sent again is ignored."""
        fresh = CarriedRecords(message.absent, message.skips_hash, message.skips_by_reason)
        known = self.carried.setdefault(message.lineage, fresh)
        if message.part in known.parts:
            return
        known.parts.add(message.part)
        for ref in message.records:
            position = (ref.partition, ref.offset)
            self.entries.append(CARRIED, message.lineage, 0, position, ref.offset + 1, ref.trajectory_id)

    def add_report(self, report: StepReport) -> None:
        """Add a step, or the start of a lineage."""
        version = report.version
        if report.finished:
            self.last_steps.add(version)
        # A lineage announces itself by a report without groups. A repeat of it is equal, and no conflict.
        if not report.group_ids and not report.micro_batches:
            start = LineageStart.of(report)
            if self.lineage_starts.setdefault(version.lineage, start) != start:
                detail = f"lineage {version.lineage} was started by two different reports"
                self.conflicts.note(Conflict(version.lineage, version.number, detail, None))
            return
        refs = report.trained_refs
        # Keep only a fingerprint of 16 bytes, of the fields that the balance needs: groups and records.
        fingerprint = xxhash.xxh3_128_digest(repr((report.group_ids, refs)).encode(errors="replace"))
        if version in self.steps:
            if self.steps[version] != fingerprint:
                detail = f"step {version} was reported twice, with other records"
                self.conflicts.note(Conflict(version.lineage, version.number, detail, refs[0] if refs else None))
            return
        self.steps[version] = fingerprint
        for ref in refs:
            position = (ref.partition, ref.offset)
            self.entries.append(TRAINED, version.lineage, version.number, position, ref.offset + 1, ref.trajectory_id)

    def add_row(self, row: SkipRecord) -> None:
        """Add a skip row."""
        content = RowContent(CODE_OF[row.reason], row.partition, row.offset, row.end_offset or row.offset + 1)
        known = self.rows.keep(row.lineage, row.sequence, content)
        if known is None:
            position = row.partition, row.offset
            self.entries.append(content.code, row.lineage, row.sequence, position, content.end, row.trajectory_id)
        elif known != content:
            ref = RecordRef(row.trajectory_id or "", row.partition, row.offset)
            detail = f"row {row.sequence} of lineage {row.lineage} was written twice with different contents"
            self.conflicts.note(Conflict(row.lineage, row.sequence, detail, ref))


def _count(value: bytes) -> int:
    """The count in a header. A header that holds no count counts as 1: another program wrote it."""
    return int(value) if value.isdigit() and len(value) <= 4 else 1


@dataclass
class TrajectoryIndex:
    """The index of the trajectories topic.

    ``held``: extents of its partitions; ``missed``: offsets within them that were deleted unread. ``continued``:
    records of trajectories that another worker continued; ``continuations``: how often workers did so. ``sessions``:
    records of trajectories of several turns; ``turns``: the number of turns in them.
    """

    held: dict[int, Extent] = field(default_factory=dict)
    missed: dict[int, list[Extent]] = field(default_factory=dict)
    records: RecordPositions = field(default_factory=RecordPositions)
    undecodable: int = 0
    continued: int = 0
    continuations: int = 0
    sessions: int = 0
    turns: int = 0

    def add_record(self, record: Record) -> None:
        """Add a record of the topic, which need not decode."""
        name = peek_trajectory_id(record.value, record.headers)
        self.undecodable += name is None
        self.records.add_position(record.partition, record.offset, name)
        for header, value in record.headers:
            if header == CONTINUATIONS_HEADER:
                self.continued += 1
                self.continuations += _count(value)
            elif header == TURNS_HEADER:
                self.sessions += 1
                self.turns += _count(value)

    def set_extents(self, extents: Mapping[int, Extent]) -> None:
        """Note which offsets the topic holds. A later call notes what retention has deleted in the meantime."""
        for partition, extent in extents.items():
            known = self.held.get(partition, extent)
            # Retention only moves the first offset up. The end stays as fixed by the first call: later records are not
            # audited.
            self.held[partition] = Extent(max(known.first, extent.first), known.end)

    def extend(self, partition: int, extent: Extent) -> None:
        """Note a partition's new end. Its first offset stays: records that retention deletes from now on were read."""
        self.held[partition] = Extent(self.held.get(partition, extent).first, extent.end)

    def note_unread(self, partition: int, extent: Extent) -> None:
        """Note records that were deleted before they were read."""
        self.missed.setdefault(partition, []).append(extent)

    def take(self, keys: Ints) -> RecordPositions:
        """Remove the records at these positions and return them."""
        moved = np.isin(self.records.keys(), keys)
        taken, self.records = self.records.chosen(moved), self.records.chosen(~moved)
        return taken

    @property
    def expired(self) -> int:
        """Number of offsets below the first held ones, or deleted unread."""
        below = sum(extent.first for extent in self.held.values())
        return below + sum(extent.end - extent.first for missed in self.missed.values() for extent in missed)


@dataclass
class OrderIndex:
    """The index of the work-orders topic.

    ``names``: hashes of the ordered trajectories' names; ``count``: orders; ``samples``: samples in the largest group.
    """

    names: set[int] = field(default_factory=set)
    count: int = 0
    samples: int = 0

    def add_record(self, record: Record) -> None:
        """Add a record of the topic."""
        self.count += 1
        # The hash that ``NameTable`` has, so that both can be compared.
        names = ordered_ids_of(record)
        self.names.update(hash_of(name) for name in names)
        self.samples = max([self.samples, *(int(index) + 1 for name in names if (index := _sample_of(name)))])

    @property
    def hashes(self) -> Hashes:
        """Hashes of the names, in any order."""
        return as_hashes(self.names)

    def forget(self, hashes: Hashes) -> None:
        """Remove the names with these hashes."""
        self.names = self.names.difference(hashes.tolist())


@dataclass
class AuditIndex:
    """The index of a whole run.

    ``steps_begin``, ``skips_begin``: whether the topic was read from its first record, so that no missing record can
    have expired. ``sampled``: hashes of the names that went to graders.
    """

    steps_begin: bool = True
    skips_begin: bool = True
    trajectories: TrajectoryIndex = field(default_factory=TrajectoryIndex)
    orders: OrderIndex = field(default_factory=OrderIndex)
    algorithms: dict[str, AlgorithmIndex] = field(default_factory=dict)
    dead_letters: Counter[str] = field(default_factory=Counter)
    sampled: set[int] = field(default_factory=set)

    def of(self, algorithm: str) -> AlgorithmIndex:
        """The index of one algorithm."""
        return self.algorithms.setdefault(algorithm, AlgorithmIndex())

    def add_step(self, record: Record) -> None:
        """Add a record of the steps topic.

        Raises:
            WireError: it does not decode.
        """
        message = record.message()
        if isinstance(message, StepReport):
            self.of(message.account).add_report(message)
        elif isinstance(message, CarriedOver):
            self.of(message.account).add_carried(message)
        elif isinstance(message, RefusedStep):
            self.of(message.account).refused_steps += 1

    def add_skip(self, record: Record) -> None:
        """Add a record of the skips topic.

        Raises:
            DataError: the row has no sequence number, which is needed to recognise repeats.
            WireError: it does not decode.
        """
        message = record.message()
        if isinstance(message, SkipRecord):
            # The checkpoint's hash covers the reason's text, which this version does not know.
            if message.reason is SkipReason.OTHER:
                raise MalformedFrame("expected a skip reason that this version knows, got one of a newer StreamRL")
            if message.sequence == 0:
                raise DataError(
                    f"expected numbered skip rows, got one without a number at {record.topic}@{record.offset}: an old "
                    "version recorded the run without numbers, so it cannot be audited"
                )
            self.of(message.account).add_row(message)

    def add_ungraded(self, record: Record) -> None:
        """Add a record of the ungraded topic."""
        if (name := peek_trajectory_id(record.value, record.headers, UngradedTrajectory.SCHEMA)) is not None:
            self.sampled.add(hash_of(name))

    def add_dead_letter(self, record: Record) -> None:
        """Add a record of the dead-letters topic."""
        self.dead_letters[dead_letter_error_class(record.headers)] += 1
