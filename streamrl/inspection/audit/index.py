"""Indexes the topics of a run, record by record and in any order, keeping only what the balance needs.

A run may hold tens of millions of trajectories, so of a trajectory only the id in its header is read, and what is kept
are columns (``columns.py``).

Repeats count once: of a step report by its version, of a skip row by its lineage and sequence. A repeat with other
contents is kept as a conflict.

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
from streamrl.schemas.codec import CONTINUATIONS_HEADER, TURNS_HEADER, named_error, peek, peek_trajectory_id
from streamrl.schemas.errors import DataError, MalformedFrame
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.lineage import LineageChain, LineageStart
from streamrl.schemas.reports import CarriedOver, RecordRef, RefusedStep, SkipReason, SkipRecord, StepReport
from streamrl.schemas.trajectories import UngradedTrajectory, WorkOrder

TRAINED = 0
REASONS: tuple[SkipReason, ...] = tuple(reason for reason in SkipReason if reason is not SkipReason.OTHER)
CODE_OF = {reason: code for code, reason in enumerate(REASONS, start=1)}
"""Codes of ``RecordEntries``: 0 is trained, the others are skip reasons as they are declared, and then ``CARRIED``."""
RANGES = (CODE_OF[SkipReason.RETENTION_EXPIRED], CODE_OF[SkipReason.BEFORE_ATTACH])
"""Codes of rows that stand for all records of a stretch, and name none of them."""
CARRIED = len(REASONS) + 1
"""Finished on another cluster, before the lineage that says so."""


def ordered_ids_of(record: Record) -> list[str]:
    """Ids of the trajectories that a work order asks for; none if it is no work order."""
    fields = peek(record.value, record.headers, WorkOrder.SCHEMA, ("group_id", "sample_indices"))
    group, indices = fields.get("group_id"), fields.get("sample_indices")
    if not isinstance(group, str) or not isinstance(indices, list):
        return []
    return [f"{group}/{index}" for index in indices]


def _sample_of(name: str) -> str:
    index = name.rpartition("/")[2]
    # More digits than any group has samples: an order with damaged fields must not make us look for billions.
    return index if index.isdecimal() and len(index) <= 4 else ""


def counted_by(chain: LineageChain, codes: Ints, lineages: Ints, numbers: Ints) -> Mask:
    """Which entries a chain contains. Steps are bounded by their number, all others by that of a row."""
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
    """One version or row that was written with two contents: of which lineage and number, and a record of it."""

    lineage: int
    number: int
    detail: str
    ref: RecordRef | None


@dataclass
class ConflictTally:
    """How many there are, and the one of the lowest lineage and number, whatever order they were found in."""

    count: int = 0
    first: Conflict | None = None

    def note(self, conflict: Conflict) -> None:
        """Count one more."""
        self.count += 1
        if self.first is None or conflict[:3] < self.first[:3]:
            self.first = conflict


@dataclass
class CarriedRecords:
    """What a lineage says of the records that were finished on another cluster; see ``CarriedOver``.

    They themselves are among the entries; ``parts``: those that were read.
    """

    absent: int
    skips_hash: str
    skips_by_reason: dict[str, int]
    parts: set[int] = field(default_factory=set)


@dataclass
class AlgorithmIndex:
    """What one algorithm's trainer reported.

    ``steps``: fingerprints of the reports with groups, by version; ``last_steps``: versions whose reports say that the
    run reached its end with them; ``row_sums``: what checks have summed up of the rows, by the lineages before;
    ``carried``: what lineages say of another cluster.
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
        """Hand these entries over: they are kept here no more."""
        taken, self.entries = self.entries.chosen(which), self.entries.chosen(~which)
        return taken

    def add_carried(self, message: CarriedOver) -> None:
        """Add records that were finished on another cluster; a part that was sent again is the same."""
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
        # A lineage announces itself by a report without groups; sent again it is equal, and no conflict.
        if not report.group_ids and not report.micro_batches:
            start = LineageStart.of(report)
            if self.lineage_starts.setdefault(version.lineage, start) != start:
                detail = f"lineage {version.lineage} began twice, differently"
                self.conflicts.note(Conflict(version.lineage, version.number, detail, None))
            return
        refs = report.trained_refs
        # Only what the balance is about, groups and records; 16 bytes are kept rather than the report.
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
            detail = f"row {row.sequence} of lineage {row.lineage} was written twice, differently"
            self.conflicts.note(Conflict(row.lineage, row.sequence, detail, ref))


def _count(value: bytes) -> int:
    """What a header counts; one that is no count is a stranger's, and whatever he says, it is one record."""
    return int(value) if value.isdigit() and len(value) <= 4 else 1


@dataclass
class TrajectoryIndex:
    """The trajectories topic. ``held``: its extents, and ``missed`` the offsets within them that were deleted unread.

    ``continued``: records of trajectories that another worker went on with, and ``continuations`` how often one did.
    ``sessions``: records of trajectories of several turns, and ``turns`` how many those have.
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
        """A record of the topic, whatever is in it."""
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

    def hold(self, extents: Mapping[int, Extent]) -> None:
        """Note what the topic holds; called again, retention may have taken more away."""
        for partition, extent in extents.items():
            known = self.held.get(partition, extent)
            # Retention only moves the first offset up; the end stays as it was fixed, what came later is not audited.
            self.held[partition] = Extent(max(known.first, extent.first), known.end)

    def follow(self, partition: int, extent: Extent) -> None:
        """Note what a partition holds by now, of which all is read that it held before."""
        self.held[partition] = Extent(self.held.get(partition, extent).first, extent.end)

    def miss(self, partition: int, extent: Extent) -> None:
        """Records that were deleted before they were read."""
        self.missed.setdefault(partition, []).append(extent)

    def take(self, keys: Ints) -> RecordPositions:
        """Hand the records at these positions over: they are kept here no more."""
        moved = np.isin(self.records.keys(), keys)
        taken, self.records = self.records.chosen(moved), self.records.chosen(~moved)
        return taken

    @property
    def expired(self) -> int:
        """Offsets below the first held ones, and within them deleted unread."""
        below = sum(extent.first for extent in self.held.values())
        return below + sum(extent.end - extent.first for missed in self.missed.values() for extent in missed)


@dataclass
class OrderIndex:
    """The work-orders topic. ``names``: of the samples, by hash; ``samples``: of the largest group that was ordered."""

    names: set[int] = field(default_factory=set)
    count: int = 0
    samples: int = 0

    def add_record(self, record: Record) -> None:
        """A record of the topic."""
        self.count += 1
        # A number a name instead of its text; the same hash as ``NameTable`` keeps, so that both can be compared.
        names = ordered_ids_of(record)
        self.names.update(hash_of(name) for name in names)
        self.samples = max([self.samples, *(int(index) + 1 for name in names if (index := _sample_of(name)))])

    @property
    def hashes(self) -> Hashes:
        """The names, in any order."""
        return as_hashes(self.names)

    def forget(self, hashes: Hashes) -> None:
        """Keep these names no more."""
        self.names = self.names.difference(hashes.tolist())


@dataclass
class AuditIndex:
    """The whole run. The flags say whether a topic was read from its first record on, so that what is missing cannot
    have expired. ``sampled``: names that went to graders, by hash.
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
        """A record of the steps topic.

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
        """A record of the skips topic.

        Raises:
            DataError: the row has no number, by which repeats are recognised.
            WireError: it does not decode.
        """
        message = record.message()
        if isinstance(message, SkipRecord):
            # The checkpoint's hash is over the word itself, which is not known here.
            if message.reason is SkipReason.OTHER:
                raise MalformedFrame("expected a reason to skip that is known here, got one of a newer StreamRL")
            if message.sequence == 0:
                raise DataError(
                    f"expected numbered skip rows, got one without a number at {record.topic}@{record.offset}: the run "
                    "was recorded by a version that did not number them, and cannot be audited"
                )
            self.of(message.account).add_row(message)

    def add_ungraded(self, record: Record) -> None:
        """A record of the ungraded topic."""
        if (name := peek_trajectory_id(record.value, record.headers, UngradedTrajectory.SCHEMA)) is not None:
            self.sampled.add(hash_of(name))

    def add_dead_letter(self, record: Record) -> None:
        """A record of the dead-letters topic."""
        self.dead_letters[named_error(record.headers)] += 1
