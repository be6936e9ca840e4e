"""Takes in what the topics of a run say, record by record, in any order, and keeps only what the balance needs.

Repeats count once: of a step report by its version, of a skip row by its lineage and sequence. A repeat that says
something else is kept as a conflict.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import xxhash

from consumers.audit.books.chain import Birth
from consumers.audit.books.columns import Entries, Places
from consumers.audit.books.peek import ordered_ids_of, trajectory_id_of
from schemas.errors import DataError
from schemas.identifiers import PolicyVersion
from schemas.messages.reports import RecordRef, RefusedStep, SkipReason, SkipRecord, StepReport
from schemas.ports.bus import Record
from schemas.ports.history import Extent

TRAINED = 0
REASONS = tuple(SkipReason)
CODE_OF = {reason: code for code, reason in enumerate(REASONS, start=1)}
UNNAMED = "(none)"


@dataclass
class AlgorithmBooks:
    """What one algorithm's trainer reported. ``steps``: fingerprints of the reports with groups, by version."""

    entries: Entries = field(default_factory=Entries)
    births: dict[int, Birth] = field(default_factory=dict)
    steps: dict[PolicyVersion, str] = field(default_factory=dict)
    rows: dict[tuple[int, int], int] = field(default_factory=dict)
    refused_steps: int = 0
    conflicts: list[tuple[str, RecordRef | None]] = field(default_factory=list)

    def add_report(self, report: StepReport) -> None:
        """Take in a step, or the beginning of a lineage."""
        version = report.version
        if not report.group_ids and not report.micro_batches:
            birth = Birth(version.lineage, version.number, report.parent, report.parent_skips)
            if self.births.setdefault(version.lineage, birth) != birth:
                self.conflicts.append((f"lineage {version.lineage} began twice, differently", None))
            return
        refs = [ref for batch in report.micro_batches for ref in batch]
        fingerprint = xxhash.xxh3_128_hexdigest(repr((report.group_ids, refs)).encode(errors="replace"))
        if version in self.steps:
            if self.steps[version] != fingerprint:
                first = refs[0] if refs else None
                self.conflicts.append((f"step {version} was reported twice, with other records", first))
            return
        self.steps[version] = fingerprint
        for ref in refs:
            place = (ref.partition, ref.offset)
            self.entries.add(TRAINED, version.lineage, version.number, place, ref.offset + 1, ref.trajectory_id)

    def add_row(self, row: SkipRecord) -> None:
        """Take in a skip row."""
        code, end = CODE_OF[row.reason], row.end_offset or row.offset + 1
        known = self.rows.setdefault((row.lineage, row.sequence), len(self.entries))
        entries = self.entries
        if known == len(entries):
            entries.add(code, row.lineage, row.sequence, (row.partition, row.offset), end, row.trajectory_id)
            return
        before = entries.codes[known], entries.partitions[known], entries.offsets[known], entries.ends[known]
        if before != (code, row.partition, row.offset, end):
            ref = RecordRef(row.trajectory_id or "", row.partition, row.offset)
            self.conflicts.append((f"row {row.sequence} of lineage {row.lineage} was written twice, differently", ref))


@dataclass
class Books:
    """All of a run. ``held``: extents of the trajectories topic; the flags say whether a topic still holds its first
    record, so that what is missing cannot have expired.
    """

    held: dict[int, Extent] = field(default_factory=dict)
    steps_begin: bool = True
    skips_begin: bool = True
    produced: Places = field(default_factory=Places)
    undecodable: int = 0
    algorithms: dict[str, AlgorithmBooks] = field(default_factory=dict)
    ordered: set[int] = field(default_factory=set)
    orders: int = 0
    dead_letters: Counter[str] = field(default_factory=Counter)

    def of(self, algorithm: str) -> AlgorithmBooks:
        """The books of one algorithm."""
        return self.algorithms.setdefault(algorithm, AlgorithmBooks())

    def add_trajectory(self, record: Record) -> None:
        """A record of the trajectories topic, whatever is in it."""
        name = trajectory_id_of(record)
        self.undecodable += name is None
        self.produced.add_place(record.partition, record.offset, name)

    def add_step(self, record: Record) -> None:
        """A record of the steps topic.

        Raises:
            WireError: it does not decode.
        """
        message = record.message()
        if isinstance(message, StepReport):
            self.of(message.algorithm).add_report(message)
        elif isinstance(message, RefusedStep):
            self.of(message.algorithm).refused_steps += 1

    def add_skip(self, record: Record) -> None:
        """A record of the skips topic.

        Raises:
            DataError: the row has no number, by which repeats are told.
            WireError: it does not decode.
        """
        message = record.message()
        if isinstance(message, SkipRecord):
            if message.sequence == 0:
                raise DataError(
                    f"expected numbered skip rows, got one without a number at {record.topic}@{record.offset}: the run "
                    "was recorded by a version that did not number them, and cannot be audited"
                )
            self.of(message.algorithm).add_row(message)

    def add_order(self, record: Record) -> None:
        """A record of the work-orders topic."""
        self.orders += 1
        self.ordered.update(xxhash.xxh3_64_intdigest(name.encode()) for name in ordered_ids_of(record))

    def add_dead_letter(self, record: Record) -> None:
        """A record of the dead-letters topic."""
        self.dead_letters[named_error(record.headers)] += 1

    def hold(self, extents: Mapping[int, Extent]) -> None:
        """Note what the trajectories topic holds; called again, retention may have taken more away."""
        for partition, extent in extents.items():
            known = self.held.get(partition, extent)
            self.held[partition] = Extent(max(known.first, extent.first), known.end)


def named_error(headers: Iterable[tuple[str, bytes]]) -> str:
    """The class of the error for which a record became a dead letter."""
    return (dict(headers).get("dlq-error-class") or UNNAMED.encode()).decode(errors="replace")
