"""The counted entries of one algorithm, joined with the records that they refer to, as arrays.

An entry is counted if the surviving chain contains it. A skip row for a range of records that retention deleted unread
names no single record, so it is kept apart in ``ranges``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from streamrl.bus.history import Extent
from streamrl.inspection.audit.columns import PARTITION_SHIFT, Hashes, Ints, Mask, as_ints, position_of
from streamrl.inspection.audit.index import CARRIED, RANGES, TRAINED, AlgorithmIndex, TrajectoryIndex, counted_by
from streamrl.inspection.audit.report import Violation, ViolationKind
from streamrl.schemas.lineage import LineageChain

PENDING = -1
"""The fate of a record that no counted entry names."""


class ProducedRecords:
    """The records that the topic holds, sorted by position; ``keys`` [N], ``hashes`` of their ids [N]."""

    def __init__(self, index: TrajectoryIndex) -> None:
        keys = index.records.keys()
        # Partitions are read in any order; sorted, ``find`` is a binary search and a partition is a slice.
        order = np.argsort(keys, kind="stable")
        first = self._first_held(index.held)
        self.held = dict(index.held)
        # Without records that retention deleted during the reading: like all below ``first``, they count as expired.
        self.order = order[~self._below(first, keys[order])]
        self.keys = keys[self.order]
        self.names = index.records.names
        self.hashes = index.records.names.hashes()[self.order]
        self._first, self._missed = first, index.missed

    @staticmethod
    def _first_held(held: Mapping[int, Extent]) -> Ints:
        first = np.zeros(max(held, default=-1) + 1, dtype=np.int64)
        for partition, extent in held.items():
            first[partition] = extent.first
        return first

    @staticmethod
    def _below(first: Ints, keys: Ints) -> Mask:
        partitions = keys >> PARTITION_SHIFT
        known = partitions < len(first)
        # A partition that the topic lacks keeps the limit 0: a record that is named there is unknown, not expired.
        limit = np.zeros(len(keys), dtype=np.int64)
        limit[known] = first[partitions[known]]
        below: Mask = (keys & ((1 << PARTITION_SHIFT) - 1)) < limit
        return below

    def __len__(self) -> int:
        return len(self.keys)

    def expired(self, keys: Ints) -> Mask:
        """Which positions held records that retention deleted before they were read."""
        expired = self._below(self._first, keys)
        for partition, extents in self._missed.items():
            base = partition << PARTITION_SHIFT
            for extent in extents:
                expired |= (keys >= base + extent.first) & (keys < base + extent.end)
        return expired

    def find(self, keys: Ints) -> Ints:
        """Index of the record at each position, -1 where there is none."""
        if not len(self):
            return np.full(len(keys), -1, dtype=np.int64)
        found = np.searchsorted(self.keys, keys)
        found[found == len(self)] = 0  # beyond the last one: any index will do, the comparison below fails
        return np.where(self.keys[found] == keys, found, -1)

    def name(self, index: int) -> str | None:
        """Name of a record; None if it did not decode."""
        return self.names[int(self.order[index])]

    def violation(self, kind: ViolationKind, algorithm: str, which: Mask, detail: str = "") -> list[Violation]:
        """A list with the violation by these records; empty if there are none."""
        indices = np.flatnonzero(which)
        if not len(indices):
            return []
        partition, offset = position_of(self.keys[indices[0]])
        return [Violation(kind, algorithm, len(indices), self.name(int(indices[0])), partition, offset, detail)]


@dataclass(frozen=True)
class AuditTable:
    """One algorithm's entries and the records they name.

    ``all_*`` and ``counted`` have one element per entry [E]. ``chosen`` has the indices of counted entries that are not
    ranges [C]; ``codes``, ``keys``, ``at`` and ``expired`` are aligned with it. ``fates`` has one element per produced
    record [N].
    """

    algorithm: str
    index: AlgorithmIndex
    chain: LineageChain
    produced: ProducedRecords

    # ``cached_property`` writes into ``__dict__``, which a frozen dataclass does not prevent.
    @cached_property
    def all_codes(self) -> Ints:
        """Codes of all entries, counted or not."""
        return as_ints(self.index.entries.codes)

    @cached_property
    def all_lineages(self) -> Ints:
        """Lineages of all entries."""
        return as_ints(self.index.entries.lineages)

    @cached_property
    def all_numbers(self) -> Ints:
        """Step numbers or row numbers of all entries."""
        return as_ints(self.index.entries.numbers)

    @cached_property
    def all_hashes(self) -> Hashes:
        """Hashes of the names of all entries."""
        return self.index.entries.names.hashes()

    @cached_property
    def is_range(self) -> Mask:
        """Which of all entries cover all records of a range of offsets."""
        return np.isin(self.all_codes, RANGES)

    @cached_property
    def counted(self) -> Mask:
        """Which of all entries the surviving chain contains."""
        return counted_by(self.chain, self.all_codes, self.all_lineages, self.all_numbers)

    @cached_property
    def chosen(self) -> Ints:
        """Indices of counted entries that name one record each, sorted by the record's position, then by the rest."""
        found = np.flatnonzero(self.counted & ~self.is_range)
        # Sorted by contents, so that nothing depends on the order in which topics were read.
        columns = self.all_hashes, self.all_codes, self.all_numbers, self.all_lineages, self.index.entries.keys()
        return found[np.lexsort([column[found] for column in columns])]

    @cached_property
    def ranges(self) -> Ints:
        """Indices of counted rows that cover records lost to retention, or from before an instance was attached."""
        return np.flatnonzero(self.counted & self.is_range)

    @cached_property
    def codes(self) -> Ints:
        """The fate of the record: trained, or the skip reason's code."""
        return self.all_codes[self.chosen]

    @cached_property
    def keys(self) -> Ints:
        """The record's position."""
        return self.index.entries.keys()[self.chosen]

    @cached_property
    def lineages(self) -> Ints:
        """The lineage that reported the fate."""
        return self.all_lineages[self.chosen]

    @cached_property
    def numbers(self) -> Ints:
        """The step that trained the record, or the number of its skip row."""
        return self.all_numbers[self.chosen]

    @cached_property
    def chosen_hashes(self) -> Hashes:
        """Hash of the name under which the record was reported."""
        return self.all_hashes[self.chosen]

    @cached_property
    def at(self) -> Ints:
        """Index of the produced record, -1 if there is none."""
        return self.produced.find(self.keys)

    @cached_property
    def expired(self) -> Mask:
        """Whether retention has deleted the record."""
        return self.produced.expired(self.keys)

    @cached_property
    def fates(self) -> Ints:
        """The fate of each produced record: a code, or ``PENDING``."""
        fates = np.full(len(self.produced), PENDING, dtype=np.int64)
        known = self.at >= 0
        # Of two entries for one record the last wins. ``check_references`` reports that there are two.
        fates[self.at[known]] = self.codes[known]
        for index in self.ranges:
            # An entry that names its record has priority over a range, which names none.
            covered = self.covered_by(int(index)) & (fates == PENDING)
            fates[covered] = self.all_codes[index]
        return fates

    def covered_by(self, index: int) -> Mask:
        """Which produced records a range covers."""
        entries = self.index.entries
        base = entries.partitions[index] << PARTITION_SHIFT
        keys = self.produced.keys
        covered: Mask = (keys >= base + entries.offsets[index]) & (keys < base + entries.ends[index])
        return covered

    def name(self, position: int) -> str | None:
        """The name under which an entry of ``chosen`` was reported."""
        return self.index.entries.names[int(self.chosen[position])]

    def source(self, position: int) -> str:
        """Where an entry of ``chosen`` was reported."""
        index = int(self.chosen[position])
        lineage, number = int(self.all_lineages[index]), int(self.all_numbers[index])
        if self.all_codes[index] == TRAINED:
            return f"step {lineage}-{number}"
        if self.all_codes[index] == CARRIED:
            return f"the cluster before lineage {lineage}"
        return f"row {number} of lineage {lineage}"

    def violation(self, kind: ViolationKind, which: Mask, detail: str = "") -> list[Violation]:
        """A list with the violation by these entries of ``chosen``, naming the first by position; empty if none."""
        positions = np.flatnonzero(which)
        if not len(positions):
            return []
        first = int(positions[0])
        text = detail or f"by {self.source(first)}"
        partition, offset = position_of(self.keys[first])
        return [Violation(kind, self.algorithm, len(positions), self.name(first), partition, offset, text)]
