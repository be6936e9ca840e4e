"""Indexes the topics of a run, record by record and in any order, keeping only what the balance needs.

A run may hold tens of millions of trajectories, so of a trajectory only the id in its header is read, and what is kept
are columns of plain numbers and one text buffer: about 100 bytes a record.

Repeats count once: of a step report by its version, of a skip row by its lineage and sequence. A repeat with other
contents is kept as a conflict.

Only the chain of surviving lineages counts: the newest and its ancestors by parent. A lineage starts with a step report
without groups that names its parent. Of an ancestor, what counts is what the checkpoint held from which its child went
on: steps up to the parent's number, skip rows up to ``parent_skips``. A lineage that went on with another cluster's
topic is the first of its chain: it says itself which records were finished before; older ones speak of other offsets.
"""

import struct
from array import array
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgpack
import numpy as np
import xxhash
from numpy.typing import NDArray

from bus.history import Extent
from bus.port import Record
from schemas.codec import MAX_HEADER_BYTES, named_error
from schemas.errors import DataError
from schemas.identifiers import PolicyVersion
from schemas.reports import CarriedOver, RecordRef, RefusedStep, SkipReason, SkipRecord, StepReport

Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]

PARTITION_SHIFT = 44
"""A position as one number: partition × 2⁴⁴ + offset. Leaves 19 bits for partitions; 2⁴⁴ offsets last for decades."""

TRAINED = 0
REASONS = tuple(SkipReason)
CODE_OF = {reason: code for code, reason in enumerate(REASONS, start=1)}
"""Codes of ``RecordEntries``: 0 is trained, the others are skip reasons as they are declared, and then ``CARRIED``."""
CARRIED = len(REASONS) + 1
"""Finished on another cluster, before the lineage that says so."""

_PREFIX = struct.Struct("<I")
"""A frame begins with the length of its msgpack header."""
_NAME_LIMIT = 256
"""Longer than any id that the producers make: what is longer stands in damaged bytes."""
_ORDER_LIMIT = 4 << 20
"""A work order's header holds its prompt, which may be long; a trajectory's own limit is the codec's."""


def trajectory_id_of(record: Record) -> str | None:
    """The trajectory's id; None if the bytes do not begin as a trajectory's do.

    The rest is not decoded, so an id may be found in a record that the reader refuses.
    """
    name = _fields(record, b"trajectory", ("trajectory_id",), MAX_HEADER_BYTES).get("trajectory_id")
    return name if isinstance(name, str) and 0 < len(name) <= _NAME_LIMIT else None


def ordered_ids_of(record: Record) -> list[str]:
    """Ids of the trajectories that a work order asks for; none if it is no work order."""
    fields = _fields(record, b"work-order", ("group_id", "sample_indices"), _ORDER_LIMIT)
    group, indices = fields.get("group_id"), fields.get("sample_indices")
    if not isinstance(group, str) or not isinstance(indices, list):
        return []
    return [f"{group}/{index}" for index in indices]


def _fields(record: Record, schema: bytes, wanted: Collection[str], limit: int) -> dict[str, Any]:
    value = record.value
    if value is None or len(value) < _PREFIX.size or ("schema", schema) not in record.headers:
        return {}
    (size,) = _PREFIX.unpack_from(value)
    # In damaged bytes the length may be anything up to 4 GiB; nothing is allocated on its word.
    if size > min(limit, len(value) - _PREFIX.size):
        return {}
    unpacker = msgpack.Unpacker(max_buffer_size=limit, strict_map_key=True)
    unpacker.feed(memoryview(value)[_PREFIX.size : _PREFIX.size + size])
    found: dict[str, Any] = {}
    # The header is one map; reading it key by key skips the long values, and stops at the last field wanted.
    try:
        for _ in range(unpacker.read_map_header()):
            if (name := unpacker.unpack()) in wanted:
                found[name] = unpacker.unpack()
                if len(found) == len(wanted):
                    break
            else:
                unpacker.skip()
    # All that damaged bytes make msgpack raise: such a record counts as undecodable, and the audit goes on.
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError, OverflowError):
        return {}
    return found


def keys_of(partitions: Ints, offsets: Ints) -> Ints:
    """Positions as single numbers that sort by partition, then offset."""
    return (partitions << PARTITION_SHIFT) | offsets


def position_of(key: int) -> tuple[int, int]:
    """Partition and offset of such a number."""
    return int(key) >> PARTITION_SHIFT, int(key) & ((1 << PARTITION_SHIFT) - 1)


def as_ints(column: "array[int]") -> Ints:
    """A copy of a column as numpy array."""
    return np.array(column, dtype=np.int64)


class NameTable:
    """A list of texts, None among them; ``hashes`` (8 bytes each) compare them without decoding."""

    def __init__(self) -> None:
        # All texts in one buffer, text i at [ends[i - 1], ends[i]): a str each would cost tens of bytes more.
        self._text = bytearray()
        self._ends: array[int] = array("Q")
        self._hashes: array[int] = array("Q")

    def append(self, name: str | None) -> None:
        """Add a text; an empty one counts as None."""
        # A lone surrogate has no UTF-8 form: replaced, it still tells names apart well enough, and does not raise.
        content = (name or "").encode(errors="replace")
        self._text += content
        self._ends.append(len(self._text))
        # 0 stands for None; that a text hashes to it has a chance of 2⁻⁶⁴.
        self._hashes.append(xxhash.xxh3_64_intdigest(content) if content else 0)

    def __getitem__(self, index: int) -> str | None:
        begin = self._ends[index - 1] if index else 0
        return self._text[begin : self._ends[index]].decode() or None

    def hashes(self) -> NDArray[np.uint64]:
        """One number a text, 0 for None."""
        return np.array(self._hashes, dtype=np.uint64)


def _column() -> "array[int]":
    # 8 bytes a value in one block; a list would hold a pointer and an object of 28 bytes for each.
    return array("q")


@dataclass
class RecordPositions:
    """Records of the trajectories topic: partition, offset and trajectory id of each."""

    partitions: "array[int]" = field(default_factory=_column)
    offsets: "array[int]" = field(default_factory=_column)
    names: NameTable = field(default_factory=NameTable)

    def add_position(self, partition: int, offset: int, name: str | None) -> None:
        """Add a row."""
        self.partitions.append(partition)
        self.offsets.append(offset)
        self.names.append(name)

    def __len__(self) -> int:
        return len(self.offsets)

    def keys(self) -> Ints:
        """The positions as single numbers, in the order of the rows."""
        return keys_of(as_ints(self.partitions), as_ints(self.offsets))


@dataclass
class RecordEntries(RecordPositions):
    """What became of records: code 0 is trained, others name a skip reason, or that it was finished elsewhere.

    ``numbers``: the step of a trained record, the sequence of a skip row; ``ends``: the offset after the last record
    that a row stands for.
    """

    codes: "array[int]" = field(default_factory=_column)
    lineages: "array[int]" = field(default_factory=_column)
    numbers: "array[int]" = field(default_factory=_column)
    ends: "array[int]" = field(default_factory=_column)

    def add(self, code: int, lineage: int, number: int, position: Sequence[int], end: int, name: str | None) -> None:
        """Add a row; ``position`` is partition and offset."""
        self.add_position(position[0], position[1], name)
        self.codes.append(code)
        self.lineages.append(lineage)
        self.numbers.append(number)
        self.ends.append(end)


class LineageStart(NamedTuple):
    """The first report of a lineage: at which step it began, and from which version it went on.

    ``undoes`` and ``carried_parts``: see ``StepReport``.
    """

    lineage: int
    step: int
    parent: PolicyVersion | None
    parent_skips: int
    undoes: int = 0
    carried_parts: int = 0


class LineageLink(NamedTuple):
    """The part of a lineage that counts: steps ``after < step <= until``, rows up to ``rows``.

    ``after`` None: its start is not known. ``until``, ``rows`` None: it is the newest, and all of it counts.
    """

    lineage: int
    after: int | None
    until: int | None
    rows: int | None

    def holds_step(self, number: int) -> bool:
        """Whether this step of the lineage counts; the step that it started from does."""
        return (self.after is None or self.after <= number) and (self.until is None or number <= self.until)


class BrokenLineageLink(NamedTuple):
    """Why the chain cannot be followed, and at which lineage."""

    lineage: int
    problem: str


@dataclass(frozen=True)
class LineageChain:
    """Links from the oldest lineage to the newest."""

    links: tuple[LineageLink, ...]
    broken: tuple[BrokenLineageLink, ...]

    def link(self, lineage: int) -> LineageLink | None:
        """The counted part of a lineage, if any."""
        return next((link for link in self.links if link.lineage == lineage), None)

    @property
    def newest(self) -> int:
        """Number of the newest lineage; 0 if there is none."""
        return self.links[-1].lineage if self.links else 0


def surviving_chain(lineage_starts: Mapping[int, LineageStart], *, beginning_is_held: bool) -> LineageChain:
    """The chain of one algorithm.

    Args:
        lineage_starts: first reports by lineage.
        beginning_is_held: whether the topic still holds its first report; if not, a start may have expired.
    """
    # From the newest lineage to its parent, and so on. ``until`` and ``rows`` are where the child went on: they bound
    # the lineage looked at; of the newest there is no bound.
    links: list[LineageLink] = []
    broken: list[BrokenLineageLink] = []
    lineage, until, rows = max(lineage_starts, default=0), None, None
    # Lineages count from 1; 0 is that of the initial model, which has no reports.
    while lineage:
        start = lineage_starts.get(lineage)
        links.append(LineageLink(lineage, start.step if start else None, until, rows))
        if start is None:
            if beginning_is_held:
                broken.append(
                    BrokenLineageLink(lineage, f"lineage {lineage} went on to others and never announced itself")
                )
            break
        problem = _problem(start, until)
        if problem:
            broken.append(BrokenLineageLink(lineage, problem))
        # Only an older parent is followed, so that a wrong report cannot make this walk go round for ever; and none
        # whose records are of another cluster.
        if start.parent is None or start.parent.lineage >= lineage or start.carried_parts:
            break
        lineage, until, rows = start.parent.lineage, start.parent.number, start.parent_skips
    return LineageChain(tuple(reversed(links)), tuple(broken))


def _problem(start: LineageStart, until: int | None) -> str | None:
    number, step, parent = start.lineage, start.step, start.parent
    if parent is None and step:
        return f"lineage {number} began at step {step} without a parent, expected step 0"
    if parent is not None and parent.lineage >= number:
        return f"lineage {number} names {parent} as its parent, which is not older"
    if parent is not None and parent.number != step:
        return f"lineage {number} began at step {step}, its parent is {parent}"
    if until is not None and until < step:
        return f"lineage {number} began at step {step}, a later one went on from its step {until}"
    return None


@dataclass
class AlgorithmIndex:
    """What one algorithm's trainer reported. ``steps``: fingerprints of the reports with groups, by version."""

    entries: RecordEntries = field(default_factory=RecordEntries)
    lineage_starts: dict[int, LineageStart] = field(default_factory=dict)
    steps: dict[PolicyVersion, str] = field(default_factory=dict)
    rows: dict[tuple[int, int], int] = field(default_factory=dict)
    refused_steps: int = 0
    conflicts: list[tuple[str, RecordRef | None]] = field(default_factory=list)
    carried: dict[int, dict[int, CarriedOver]] = field(default_factory=dict)

    def add_carried(self, message: CarriedOver) -> None:
        """Add records that were finished on another cluster; a part that was sent again is the same."""
        parts = self.carried.setdefault(message.lineage, {})
        if message.part in parts:
            return
        # Without the records, which are among the entries from here on.
        parts[message.part] = message.replace(records=())
        for ref in message.records:
            position = (ref.partition, ref.offset)
            self.entries.add(CARRIED, message.lineage, 0, position, ref.offset + 1, ref.trajectory_id)

    def add_report(self, report: StepReport) -> None:
        """Add a step, or the start of a lineage."""
        version = report.version
        # A lineage announces itself by a report without groups; sent again it is equal, and no conflict.
        if not report.group_ids and not report.micro_batches:
            start = LineageStart(
                version.lineage,
                version.number,
                report.parent,
                report.parent_skips,
                report.undoes,
                report.carried_parts,
            )
            if self.lineage_starts.setdefault(version.lineage, start) != start:
                self.conflicts.append((f"lineage {version.lineage} began twice, differently", None))
            return
        refs = report.trained_refs
        # Only what the balance is about, groups and records; 16 bytes are kept rather than the report.
        fingerprint = xxhash.xxh3_128_hexdigest(repr((report.group_ids, refs)).encode(errors="replace"))
        if version in self.steps:
            if self.steps[version] != fingerprint:
                first = refs[0] if refs else None
                self.conflicts.append((f"step {version} was reported twice, with other records", first))
            return
        self.steps[version] = fingerprint
        for ref in refs:
            position = (ref.partition, ref.offset)
            self.entries.add(TRAINED, version.lineage, version.number, position, ref.offset + 1, ref.trajectory_id)

    def add_row(self, row: SkipRecord) -> None:
        """Add a skip row."""
        code, end = CODE_OF[row.reason], row.end_offset or row.offset + 1
        # Maps to the index of the row's entry, which is the next one to be added only if the row is new.
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
class AuditIndex:
    """The whole run. ``held``: extents of the trajectories topic; the flags say whether a topic still holds its first
    record, so that what is missing cannot have expired.
    """

    held: dict[int, Extent] = field(default_factory=dict)
    steps_begin: bool = True
    skips_begin: bool = True
    produced: RecordPositions = field(default_factory=RecordPositions)
    undecodable: int = 0
    algorithms: dict[str, AlgorithmIndex] = field(default_factory=dict)
    ordered: set[int] = field(default_factory=set)
    orders: int = 0
    dead_letters: Counter[str] = field(default_factory=Counter)

    def of(self, algorithm: str) -> AlgorithmIndex:
        """The index of one algorithm."""
        return self.algorithms.setdefault(algorithm, AlgorithmIndex())

    def add_trajectory(self, record: Record) -> None:
        """A record of the trajectories topic, whatever is in it."""
        name = trajectory_id_of(record)
        self.undecodable += name is None
        self.produced.add_position(record.partition, record.offset, name)

    def add_step(self, record: Record) -> None:
        """A record of the steps topic.

        Raises:
            WireError: it does not decode.
        """
        message = record.message()
        if isinstance(message, StepReport):
            self.of(message.algorithm).add_report(message)
        elif isinstance(message, CarriedOver):
            self.of(message.algorithm).add_carried(message)
        elif isinstance(message, RefusedStep):
            self.of(message.algorithm).refused_steps += 1

    def add_skip(self, record: Record) -> None:
        """A record of the skips topic.

        Raises:
            DataError: the row has no number, by which repeats are recognised.
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
        # A number a name instead of its text; the same hash as ``NameTable`` keeps, so that both can be compared.
        self.ordered.update(xxhash.xxh3_64_intdigest(name.encode()) for name in ordered_ids_of(record))

    def add_dead_letter(self, record: Record) -> None:
        """A record of the dead-letters topic."""
        self.dead_letters[named_error(record.headers)] += 1

    def hold(self, extents: Mapping[int, Extent]) -> None:
        """Note what the trajectories topic holds; called again, retention may have taken more away."""
        for partition, extent in extents.items():
            known = self.held.get(partition, extent)
            # Retention only moves the first offset up; the end stays as it was fixed, what came later is not audited.
            self.held[partition] = Extent(max(known.first, extent.first), known.end)
