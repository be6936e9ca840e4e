"""Records whose fate is settled, packed into segments of tallies and compressed columns.

A record is settled when every algorithm gave it exactly one fate, under its own name, that the newest checkpoint
contains (``settling.py`` decides). Settled records break no rule. So it is enough to judge the others and add the
tallies. Nothing is lost: if a crash, a checkpoint or a second fate affects a segment, the segment is unpacked again. A
record takes about 30 bytes: its name's hash up to three times, and its share of the columns.
"""

import zlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import msgpack
import numpy as np

from streamrl.inspection.audit.columns import (
    PARTITION_SHIFT,
    Hashes,
    Ints,
    Mask,
    RecordEntries,
    RecordPositions,
    as_ints,
)
from streamrl.inspection.audit.index import TRAINED, AuditIndex
from streamrl.schemas.errors import DataError
from streamrl.schemas.lineage import LineageLink

LEVEL = 1
"""Level of zlib: columns of nearly equal numbers compress well at any level, and this one is the fastest."""


@dataclass
class HashSet:
    """A growing set of hashes as sorted runs, each more than twice the next: eight bytes a hash."""

    runs: list[Hashes] = field(default_factory=list)

    def __len__(self) -> int:
        return sum(map(len, self.runs))

    def holds(self, hashes: Hashes) -> Mask:
        """Which of these hashes are in the set."""
        found: Mask = np.zeros(len(hashes), dtype=np.bool_)
        for run in self.runs:
            found |= in_sorted(run, hashes)
        return found

    def include(self, hashes: Hashes) -> None:
        """Add the hashes that are not in the set yet."""
        fresh = np.unique(hashes)
        fresh = fresh[~self.holds(fresh)]
        # Merged only with runs of similar size, so that a hash is copied a few times and not at every addition.
        while self.runs and len(self.runs[-1]) <= 2 * len(fresh):
            fresh = np.sort(np.concatenate((self.runs.pop(), fresh)))
        if len(fresh):
            self.runs.append(fresh)


def in_sorted(run: Hashes, hashes: Hashes) -> Mask:
    """Which hashes are in a sorted array."""
    if not len(run):
        return np.zeros(len(hashes), dtype=np.bool_)
    at = np.searchsorted(run, hashes)
    at[at == len(run)] = 0  # beyond the last one: any index will do, the comparison fails
    found: Mask = run[at] == hashes
    return found


class NumberBounds(NamedTuple):
    """The lowest and highest step, and the lowest and highest skip row, of one lineage; -1 where there is none."""

    first_step: int = -1
    last_step: int = -1
    first_row: int = -1
    last_row: int = -1

    def is_within(self, link: LineageLink | None) -> bool:
        """Whether the link contains all steps and rows within the bounds."""
        if link is None:
            return False
        begun = link.after is None or link.after < self.first_step
        steps = self.first_step < 0 or (begun and (link.until is None or self.last_step <= link.until))
        return steps and (self.first_row < 0 or link.rows is None or self.last_row <= link.rows)


def bounds_of(entries: RecordEntries, which: Mask) -> dict[int, NumberBounds]:
    """The bounds of the chosen entries, by lineage."""
    lineages, numbers, trained = as_ints(entries.lineages), as_ints(entries.numbers), as_ints(entries.codes) == TRAINED
    found = {}
    for lineage in np.unique(lineages[which]).tolist():
        own = which & (lineages == lineage)
        found[lineage] = NumberBounds(*_ends(numbers[own & trained]), *_ends(numbers[own & ~trained]))
    return found


def _ends(numbers: Ints) -> tuple[int, int]:
    return (int(numbers.min()), int(numbers.max())) if len(numbers) else (-1, -1)


@dataclass
class SettledFates:
    """The fates of a segment's records in one algorithm.

    ``codes``: number of records by fate, of those that the topic still held; ``expired``: the same of records that
    retention had deleted; ``counted``: bounds of the entries that count; ``undone`` [n, 4]: the other entries, as code,
    lineage, number, and how many entries have these three; ``trained``: hashes of trained names, sorted.
    """

    codes: Counter[int] = field(default_factory=Counter)
    expired: Counter[int] = field(default_factory=Counter)
    counted: dict[int, NumberBounds] = field(default_factory=dict)
    undone: Ints = field(default_factory=lambda: np.zeros((0, 4), dtype=np.int64))
    trained: Hashes = field(default_factory=lambda: np.zeros(0, dtype=np.uint64))


@dataclass
class SettledSegment:
    """Settled records at the positions ``begins[i]`` to ``ends[i]`` - 1.

    ``produced``: number of records that were read from the topic; ``nameless``: those of them that did not decode.
    """

    begins: Ints
    ends: Ints
    produced: int
    nameless: int
    fates: dict[str, SettledFates]
    packed: bytes

    def unpacked(self) -> tuple[RecordPositions, dict[str, RecordEntries]]:
        """The records, and their entries by algorithm."""
        content = msgpack.unpackb(zlib.decompress(self.packed))
        entries = {name: RecordEntries.loaded(columns) for name, columns in content["entries"].items()}
        return RecordPositions.loaded(content["produced"]), entries


def pack(produced: RecordPositions, entries: dict[str, RecordEntries]) -> bytes:
    """Bytes from which ``SettledSegment.unpacked`` restores these records and entries."""
    content = {
        "produced": produced.dumped(),
        "entries": {name: columns.dumped() for name, columns in entries.items()},
    }
    return zlib.compress(msgpack.packb(content), LEVEL)


def intervals_of(keys: Ints) -> tuple[Ints, Ints]:
    """Sorted positions as ranges of neighbours: their first positions, and the positions after their last ones."""
    gaps = np.flatnonzero(np.diff(keys) != 1)
    begins = keys[np.concatenate(([0], gaps + 1))] if len(keys) else keys
    ends = keys[np.append(gaps, len(keys) - 1)] + 1 if len(keys) else keys
    return begins, ends


@dataclass
class SettledRecords:
    """All segments.

    ``produced``, ``ordered``: names that were ever settled, even if they have been unpacked since; ``algorithms``: the
    algorithms that have settled the records.
    """

    segments: dict[int, SettledSegment] = field(default_factory=dict)
    produced: HashSet = field(default_factory=HashSet)
    ordered: HashSet = field(default_factory=HashSet)
    algorithms: tuple[str, ...] = ()
    packed_so_far: int = 0

    def __post_init__(self) -> None:
        self._index()

    def keep(self, segment: SettledSegment) -> None:
        """Add a segment."""
        self.packed_so_far += 1
        self.segments[self.packed_so_far] = segment
        self._index()

    def unpack(self, numbers: Iterable[int], index: AuditIndex) -> None:
        """Move the records of these segments back into the index."""
        for number in numbers:
            produced, entries = self.segments.pop(number).unpacked()
            index.trajectories.records.extend(produced)
            for name, columns in entries.items():
                index.of(name).entries.extend(columns)
        self._index()

    @property
    def records(self) -> int:
        """Number of settled records that were read from the topic."""
        return sum(segment.produced for segment in self.segments.values())

    @property
    def nameless(self) -> int:
        """Number of those records that did not decode."""
        return sum(segment.nameless for segment in self.segments.values())

    def fates(self, algorithm: str) -> SettledFates:
        """The sums over all segments, without bounds and names."""
        total = SettledFates()
        found = [segment.fates[algorithm] for segment in self.segments.values() if algorithm in segment.fates]
        for fates in found:
            total.codes.update(fates.codes)
            total.expired.update(fates.expired)
        total.undone = np.concatenate([total.undone, *(fates.undone for fates in found)])
        return total

    def trained(self, algorithm: str, hashes: Hashes) -> dict[int, Mask]:
        """Which of these names were trained, by segment. Segments without any are left out."""
        # ``self.produced`` lacks the names of records that were deleted unread.
        everywhere = any(segment.fates[algorithm].expired for segment in self.segments.values())
        likely = np.flatnonzero((hashes != 0) & (everywhere | self.produced.holds(hashes)))
        found: dict[int, Mask] = {}
        for number, segment in self.segments.items() if len(likely) else ():
            there = likely[in_sorted(segment.fates[algorithm].trained, hashes[likely])]
            if len(there):
                found[number] = np.isin(np.arange(len(hashes)), there)
        return found

    def holding(self, keys: Ints) -> set[int]:
        """Numbers of the segments that contain any of these positions."""
        found = set()
        if len(keys) and len(self._begins):
            at = np.maximum(np.searchsorted(self._begins, keys, side="right") - 1, 0)
            inside = (self._begins[at] <= keys) & (keys < self._ends[at])
            found = set(self._numbers[at[inside]].tolist())
        return found

    def last_keys(self) -> dict[int, int]:
        """The highest settled position of each partition."""
        # Sorted, so that the dictionary keeps the last range of each partition.
        return {last >> PARTITION_SHIFT: last for last in (self._ends - 1).tolist()}

    def _index(self) -> None:
        """Sort the ranges of all segments; no two of them overlap."""
        segments = self.segments.values()
        begins = np.concatenate([segment.begins for segment in segments] or [np.zeros(0, dtype=np.int64)])
        ends = np.concatenate([segment.ends for segment in segments] or [np.zeros(0, dtype=np.int64)])
        numbers = np.repeat(list(self.segments), [len(segment.begins) for segment in segments]).astype(np.int64)
        order = np.argsort(begins)
        self._begins, self._ends, self._numbers = begins[order], ends[order], numbers[order]

    def record_at(self, key: int) -> tuple[bool, str | None]:
        """Whether a settled record was read from this position, and its name."""
        for number in self.holding(np.array([key])):
            produced, entries = self.segments[number].unpacked()
            for table in (produced, *entries.values()):
                found = np.flatnonzero(table.keys() == key)
                if len(found):
                    return table is produced, table.names[int(found[0])]
        return False, None


def dumped_segment(segment: SettledSegment) -> bytes:
    """The segment as bytes."""
    fates = {name: _dumped_fates(each) for name, each in segment.fates.items()}
    content = [segment.begins.tobytes(), segment.ends.tobytes(), segment.produced, segment.nameless]
    content += [fates, segment.packed]
    packed: bytes = msgpack.packb(content)
    return packed


def loaded_segment(dumped: bytes) -> SettledSegment:
    """The segment that was dumped."""
    begins, ends, produced, nameless, fates, packed = msgpack.unpackb(dumped, strict_map_key=False)
    found = {name: _loaded_fates(values) for name, values in fates.items()}
    keys = np.frombuffer(begins, np.int64), np.frombuffer(ends, np.int64)
    return SettledSegment(*keys, produced, nameless, found, packed)


def _dumped_fates(fates: SettledFates) -> list[Any]:
    arrays = [fates.undone.tobytes(), fates.trained.tobytes()]
    return [dict(fates.codes), dict(fates.expired), fates.counted, *arrays]


def _loaded_fates(values: list[Any]) -> SettledFates:
    if len(values) != len(fields(SettledFates)):
        raise DataError(f"expected {len(fields(SettledFates))} figures of settled records, got {len(values)}")
    codes, expired, counted, undone, hashes = values
    bounds = {lineage: NumberBounds(*each) for lineage, each in counted.items()}
    lost = np.frombuffer(undone, np.int64).reshape(-1, 4)
    return SettledFates(Counter(codes), Counter(expired), bounds, lost, np.frombuffer(hashes, np.uint64))
