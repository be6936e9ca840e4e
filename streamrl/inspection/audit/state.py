"""The state of a following audit in one file: its positions, the unsettled records, and the packed segments.

The file is an SQLite database, so that only changed parts are written, in one transaction. Every part has a checksum.
If one fails, the whole file is discarded, because the topics may no longer hold the records that it describes.
"""

import sqlite3
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import xxhash

from streamrl.bus.history import Extent
from streamrl.bus.port import TopicPartition
from streamrl.inspection.audit.columns import RecordEntries, RecordPositions, as_hashes
from streamrl.inspection.audit.index import (
    AlgorithmIndex,
    AuditIndex,
    CarriedRecords,
    Conflict,
    ConflictTally,
    OrderIndex,
    TrajectoryIndex,
)
from streamrl.inspection.audit.rows import SkipRows
from streamrl.inspection.audit.settled import HashSet, SettledRecords, dumped_segment, loaded_segment
from streamrl.schemas.errors import DataError
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.lineage import LineageStart
from streamrl.schemas.reports import RecordRef

FORMAT = 3
_TABLE = "CREATE TABLE IF NOT EXISTS part (name TEXT PRIMARY KEY, content BLOB NOT NULL, checksum BLOB NOT NULL)"
Mark = tuple[int, bytes]


@dataclass
class FollowedRun:
    """The state of a following audit.

    ``positions``: the offset to read next, by partition; ``marks``: the offset and checksum of the last record read,
    for some topics, to recognise a recreated topic; ``since``: notes on records that were deleted unread.
    """

    run: str
    index: AuditIndex = field(default_factory=AuditIndex)
    settled: SettledRecords = field(default_factory=SettledRecords)
    positions: dict[TopicPartition, int] = field(default_factory=dict)
    marks: dict[TopicPartition, Mark] = field(default_factory=dict)
    since: list[str] = field(default_factory=list)


class AuditStateFile:
    """The file, held by one process at a time."""

    def __init__(self, path: Path) -> None:
        """Lock the file, and create it if it does not exist.

        Raises:
            StateInUse: another process holds it.
            DataError: it is not a file of this kind, or cannot be created.
        """
        self.path = path
        self._written: dict[str, object] = {}
        self._database = sqlite3.connect(path, timeout=0, isolation_level=None)
        try:
            # The lock lasts until the process ends for any reason. Other processes get an error at once.
            self._database.execute("PRAGMA locking_mode=EXCLUSIVE")
            self._database.execute("BEGIN EXCLUSIVE")
            self._database.execute(_TABLE)
            self._database.execute("COMMIT")
        except sqlite3.Error as error:
            self._database.close()
            if "locked" in str(error):
                raise StateInUse(f"expected to keep the audit's state in {path}, another audit uses it") from error
            raise DataError(f"expected the state of an audit in {path}, got: {error}") from error

    def load(self, run: str) -> FollowedRun | None:
        """The state that was saved last; None if there is none.

        Raises:
            DataError: the file is damaged, or of another run or format.
        """
        try:
            parts = {name: _sound(name, *rest) for name, *rest in self._database.execute("SELECT * FROM part")}
            if not parts:
                return None
            followed = _loaded(parts)
        # Every error that msgpack, numpy and our own code raise for damaged bytes.
        except (sqlite3.Error, ValueError, TypeError, KeyError, IndexError, msgpack.UnpackException) as error:
            raise DataError(f"expected the state of an audit in {self.path}, got: {error!r}") from error
        if followed.run != run:
            raise DataError(f"expected the state of an audit of run {run} in {self.path}, got that of {followed.run}")
        self._written = {name: kept for name, kept, _ in _parts(followed) if kept is not None}
        return followed

    def save(self, followed: FollowedRun) -> None:
        """Write the changed parts, all or none.

        Raises:
            DataError: the file cannot be written.
        """
        try:
            # Commits at the end, or rolls back.
            with self._database:
                self._database.execute("BEGIN")
                self._write(followed)
        except sqlite3.Error as error:
            self._written = {}  # the contents of the file are unknown now: the next save writes all parts
            raise DataError(f"expected to write the audit's state to {self.path}, got: {error}") from error

    def _write(self, followed: FollowedRun) -> None:
        there = set()
        for name, kept, content in _parts(followed):
            there.add(name)
            if kept is None or self._written.get(name) is not kept:
                data = content()
                row = name, data, xxhash.xxh3_128_digest(data)
                self._database.execute("INSERT OR REPLACE INTO part VALUES (?, ?, ?)", row)
                self._written[name] = kept
        known = [name for (name,) in self._database.execute("SELECT name FROM part")]
        for name in known:
            if name not in there:
                self._database.execute("DELETE FROM part WHERE name = ?", (name,))
        self._written = {name: kept for name, kept in self._written.items() if name in there}

    def clear(self) -> None:
        """Delete all parts."""
        self._database.execute("DELETE FROM part")
        self._written = {}

    def close(self) -> None:
        """Release the file."""
        self._database.close()


class StateInUse(DataError):
    """Another process keeps its state in this file."""


def open_state(path: Path, run: str) -> tuple[AuditStateFile | None, FollowedRun, str]:
    """The file if this process may write it, the state in it, and a notice to print ("" if there is none)."""
    try:
        file = AuditStateFile(path)
    except StateInUse as error:
        return None, FollowedRun(run), f"{error}; this one keeps no state, and reads the topics from their start"
    except DataError as error:
        path.unlink(missing_ok=True)
        return AuditStateFile(path), FollowedRun(run), _rebuilt(error)
    try:
        return file, file.load(run) or FollowedRun(run), ""
    except DataError as error:
        # Removed, not emptied: SQLite might read the damaged pages again.
        file.close()
        path.unlink(missing_ok=True)
        return AuditStateFile(path), FollowedRun(run), _rebuilt(error)


def _rebuilt(error: DataError) -> str:
    return f"{error}; rebuilt from the topics, as far back as they reach"


def _sound(name: str, content: bytes, checksum: bytes) -> bytes:
    if xxhash.xxh3_128_digest(content) != checksum:
        raise ValueError(f"the checksum of {name} differs")
    return content


def _parts(followed: FollowedRun) -> "Iterator[tuple[str, object | None, Any]]":
    """The name of each part, an object that identifies its contents (None: they may change), and their bytes."""
    settled = followed.settled
    yield "live", None, lambda: _dumped(followed)
    for number, segment in settled.segments.items():
        yield f"segment/{number}", segment, lambda segment=segment: dumped_segment(segment)
    for kind, names in (("produced", settled.produced), ("ordered", settled.ordered)):
        for number, run in enumerate(names.runs):
            yield f"{kind}/{number}", run, run.tobytes


def _loaded(parts: Mapping[str, bytes]) -> FollowedRun:
    content = msgpack.unpackb(parts["live"], strict_map_key=False)
    if content["format"] != FORMAT:
        raise ValueError(f"format {content['format']}, expected {FORMAT}")
    numbers = sorted(int(name.partition("/")[2]) for name in parts if name.startswith("segment/"))
    segments = {number: loaded_segment(parts[f"segment/{number}"]) for number in numbers}
    produced, ordered = (HashSet(list(_runs(parts, kind))) for kind in ("produced", "ordered"))
    settled = SettledRecords(segments, produced, ordered, tuple(content["algorithms"]), content["packed"])
    return FollowedRun(
        content["run"],
        _loaded_index(content["index"]),
        settled,
        {TopicPartition(topic, number): position for topic, number, position in content["positions"]},
        {TopicPartition(topic, number): (offset, digest) for topic, number, offset, digest in content["marks"]},
        content["since"],
    )


def _runs(parts: Mapping[str, bytes], kind: str) -> "Iterator[np.ndarray[tuple[int], np.dtype[np.uint64]]]":
    for number in range(sum(name.startswith(f"{kind}/") for name in parts)):
        yield np.frombuffer(parts[f"{kind}/{number}"], dtype=np.uint64)


def _dumped(followed: FollowedRun) -> bytes:
    content = {
        "format": FORMAT,
        "run": followed.run,
        "index": _dumped_index(followed.index),
        "algorithms": list(followed.settled.algorithms),
        "packed": followed.settled.packed_so_far,
        "positions": [[*tp, position] for tp, position in followed.positions.items()],
        "marks": [[*tp, *mark] for tp, mark in followed.marks.items()],
        "since": followed.since,
    }
    packed: bytes = msgpack.packb(content)
    return packed


def _dumped_index(index: AuditIndex) -> dict[str, Any]:
    topic, orders = index.trajectories, index.orders
    return {
        "held": topic.held,
        "missed": topic.missed,
        "begins": [index.steps_begin, index.skips_begin],
        "produced": topic.records.dumped(),
        "undecodable": topic.undecodable,
        "algorithms": {name: _dumped_algorithm(own) for name, own in index.algorithms.items()},
        "ordered": orders.hashes.tobytes(),
        "orders": [orders.count, orders.samples],
        "dead_letters": dict(index.dead_letters),
        "continued": [topic.continued, topic.continuations],
        "sampled": as_hashes(index.sampled).tobytes(),
        "sessions": [topic.sessions, topic.turns],
    }


def _loaded_index(content: dict[str, Any]) -> AuditIndex:
    # Older files lack the figures of continued trajectories, sessions and graders.
    continued, sessions = content.get("continued", (0, 0)), content.get("sessions", (0, 0))
    topic = TrajectoryIndex(
        {partition: Extent(*extent) for partition, extent in content["held"].items()},
        {partition: [Extent(*each) for each in extents] for partition, extents in content["missed"].items()},
        RecordPositions.loaded(content["produced"]),
        content["undecodable"],
        *continued,
        *sessions,
    )
    steps_begin, skips_begin = content["begins"]
    return AuditIndex(
        steps_begin,
        skips_begin,
        topic,
        OrderIndex(_loaded_hashes(content["ordered"]), *content["orders"]),
        {name: _loaded_algorithm(own) for name, own in content["algorithms"].items()},
        Counter(content["dead_letters"]),
        _loaded_hashes(content.get("sampled", b"")),
    )


def _loaded_hashes(content: bytes) -> set[int]:
    return set(np.frombuffer(content, dtype=np.uint64).tolist())


def _dumped_algorithm(own: AlgorithmIndex) -> dict[str, Any]:
    versions = np.array(list(own.steps), dtype=np.int64).reshape(-1, 2)
    return {
        "entries": own.entries.dumped(),
        "starts": list(own.lineage_starts.values()),
        "steps": [versions.tobytes(), b"".join(own.steps.values())],
        "rows": own.rows.dumped(),
        "refused": own.refused_steps,
        "conflicts": [own.conflicts.count, own.conflicts.first],
        "last_steps": list(own.last_steps),
        "carried": {
            lineage: [each.absent, each.skips_hash, each.skips_by_reason, list(each.parts)]
            for lineage, each in own.carried.items()
        },
    }


def _loaded_algorithm(content: dict[str, Any]) -> AlgorithmIndex:
    starts = [LineageStart(each[0], each[1], _version(each[2]), *each[3:]) for each in content["starts"]]
    versions = np.frombuffer(content["steps"][0], dtype=np.int64).reshape(-1, 2).tolist()
    prints = content["steps"][1]
    count, first = content["conflicts"]
    conflict = None if first is None else _conflict(*first)
    return AlgorithmIndex(
        entries=RecordEntries.loaded(content["entries"]),
        lineage_starts={start.lineage: start for start in starts},
        steps={PolicyVersion(*each): prints[16 * at : 16 * at + 16] for at, each in enumerate(versions)},
        rows=SkipRows.loaded(content["rows"]),
        refused_steps=content["refused"],
        conflicts=ConflictTally(count, conflict),
        last_steps={PolicyVersion(*each) for each in content["last_steps"]},
        carried={
            lineage: CarriedRecords(absent, rolling, reasons, set(parts))
            for lineage, (absent, rolling, reasons, parts) in content["carried"].items()
        },
    )


def _conflict(lineage: int, number: int, detail: str, ref: list[Any] | None) -> Conflict:
    return Conflict(lineage, number, detail, None if ref is None else RecordRef(*ref))


def _version(content: list[int] | None) -> PolicyVersion | None:
    return None if content is None else PolicyVersion(*content)
