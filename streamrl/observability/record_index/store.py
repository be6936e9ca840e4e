"""The index in an SQLite file: the position of each record, and how far each partition was read.

Invariants, each with a test of its name:
- rows_and_positions_move_together: both are written in one transaction, so a killed process leaves an index of all it
  had read, and the next one continues from there;
- two_writers_do_not_disturb_each_other: a writer that finds another one ahead writes nothing, and continues from there;
- a_damaged_file_is_rebuilt: the file holds nothing that the topics do not hold;
- queries_over_all_steps_are_cached until any process writes, so that a look-up costs the same in a long run.

The file has about 45 bytes per trajectory: each group's name once, and rows of small numbers.
"""

import sqlite3
from collections.abc import Iterable, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, NamedTuple, Self

import structlog

from streamrl.bus.port import TopicPartition
from streamrl.observability.record_index.entries import Kind, RefKind, RefRow, Rows, StepKind, StepRow, WeightsRow
from streamrl.schemas.identifiers import PolicyVersion

FORMAT = 2
"""Version of the file's format. A file of another format is rebuilt."""
BUSY_S = 20.0
"""Seconds to wait for another writer; its transactions take milliseconds."""
CACHE_KIB = 32 << 10
JOURNAL_BYTES = 4 << 20
"""Largest size of the file's journal after it was written back."""
KNOWN_GROUPS = 100_000
"""Most groups whose numbers are cached while records are added."""
_SCHEMA = (
    "CREATE TABLE reading(topic TEXT, number INT, next INT NOT NULL, anchor INT, mark INT, PRIMARY KEY(topic, number)) "
    "WITHOUT ROWID",
    "CREATE TABLE groups(number INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE)",
    "CREATE TABLE named(grp INT, kind INT, sample INT, number INT, position INT, "
    "PRIMARY KEY(grp, kind, sample, number, position)) WITHOUT ROWID",
    "CREATE TABLE refs(kind INT, of_number INT, of_position INT, number INT, position INT, "
    "PRIMARY KEY(kind, of_number, of_position, number, position)) WITHOUT ROWID",
    "CREATE TABLE steps(position INTEGER PRIMARY KEY, algorithm TEXT, kind INT, lineage INT, version INT, step INT, "
    "parent_lineage INT, parent_version INT, parent_skips INT, finished INT, carried_parts INT)",
    "CREATE TABLE weights(is_beat INT, lineage INT, version INT, sent_at REAL, worker TEXT, "
    "PRIMARY KEY(is_beat, lineage, version)) WITHOUT ROWID",
)
_LEAST, _MOST = -(1 << 62), 1 << 62
_TABLES = ("reading", "groups", "named", "refs", "steps", "weights")

log = structlog.get_logger()


class ReadPosition(NamedTuple):
    """How far a partition was read: the next offset, and the offset and mark of the last record read."""

    next: int
    anchor: int | None = None
    mark: int | None = None


class Place(NamedTuple):
    """A record of a group: its sample, and its position on the topic of its kind."""

    sample: int
    partition: int
    offset: int


class RecordIndex:
    """One run's index. ``path``: None for an index in memory. Not thread-safe."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._numbers: dict[str, int] = {}
        self._of_all_steps: dict[tuple[str, str], tuple[tuple[int, int], list[tuple[Any, ...]]]] = {}
        self._database = self._open()

    def _open(self) -> sqlite3.Connection:
        try:
            return self._connect()
        except sqlite3.DatabaseError as error:
            # A busy file is not damaged, and the caller handles a folder that cannot be written.
            if self.path is None or isinstance(error, sqlite3.OperationalError):
                raise
            log.warning("the index of records is damaged and is rebuilt", path=str(self.path), error=str(error))
            self._delete()
            return self._connect()

    def _connect(self) -> sqlite3.Connection:
        database = sqlite3.connect(self.path or ":memory:", timeout=BUSY_S, isolation_level=None)
        try:
            # With WAL, readers and the writer do not wait for each other, and a power cut does not damage the file.
            database.execute("PRAGMA journal_mode = WAL")
            database.execute("PRAGMA synchronous = NORMAL")
            database.execute(f"PRAGMA journal_size_limit = {JOURNAL_BYTES}")
            database.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
            self._prepare(database)
        except BaseException:
            database.close()
            raise
        return database

    def _prepare(self, database: sqlite3.Connection) -> None:
        (found,) = database.execute("PRAGMA user_version").fetchone()
        if found == FORMAT:
            return
        database.execute("BEGIN IMMEDIATE")
        with _transaction(database):
            # Another process may have done it already.
            if database.execute("PRAGMA user_version").fetchone()[0] != FORMAT:
                _create_tables(database)

    def _delete(self) -> None:
        assert self.path is not None
        for suffix in ("", "-wal", "-shm"):
            with suppress(FileNotFoundError):
                Path(f"{self.path}{suffix}").unlink()

    def close(self) -> None:
        """Close the file; idempotent."""
        self._database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def clear(self) -> None:
        """Delete all rows and read positions."""
        self._numbers.clear()
        try:
            self._database.execute("BEGIN IMMEDIATE")
            with _transaction(self._database):
                _create_tables(self._database)
        except sqlite3.DatabaseError as error:
            if self.path is None or isinstance(error, sqlite3.OperationalError):
                raise
            self._database.close()
            self._delete()
            self._database = self._connect()
        # A new file may have the same two numbers in its stamp.
        self._of_all_steps.clear()

    def reading(self) -> dict[TopicPartition, ReadPosition]:
        """How far each partition was read."""
        rows = self._database.execute("SELECT topic, number, next, anchor, mark FROM reading")
        return {TopicPartition(topic, number): ReadPosition(*rest) for topic, number, *rest in rows}

    def add(
        self, rows: Rows, before: Mapping[TopicPartition, ReadPosition], after: Mapping[TopicPartition, ReadPosition]
    ) -> bool:
        """Write rows, and move the read positions of partitions from ``before`` to ``after``.

        Returns False, and writes nothing, if another process has moved one of the positions in the meantime.
        """
        database = self._database
        database.execute("BEGIN IMMEDIATE")
        with _transaction(database):
            for tp in after:
                found = database.execute(
                    "SELECT next, anchor, mark FROM reading WHERE topic = ? AND number = ?", tp
                ).fetchone()
                if (None if found is None else ReadPosition(*found)) != before.get(tp):
                    return False
            self._write(rows)
            database.executemany(
                "INSERT OR REPLACE INTO reading VALUES (?, ?, ?, ?, ?)", [(*tp, *read) for tp, read in after.items()]
            )
        return True

    def _write(self, rows: Rows) -> None:
        database, numbers = self._database, self._group_numbers({row.group for row in rows.named})
        # Sorted, so that neighbouring rows are written to one page together.
        named = sorted((numbers[group], kind, *place) for group, kind, *place in rows.named)
        database.executemany("INSERT OR IGNORE INTO named VALUES (?, ?, ?, ?, ?)", named)
        database.executemany("INSERT OR IGNORE INTO refs VALUES (?, ?, ?, ?, ?)", rows.refs)
        database.executemany("INSERT OR IGNORE INTO steps VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", rows.steps)
        for row in _only_newer(rows.weights):
            self._write_weights(row)

    def _group_numbers(self, names: set[str]) -> dict[str, int]:
        """The number of each group; new groups get one."""
        database, known = self._database, self._numbers
        if len(known) + len(names) > KNOWN_GROUPS:
            known.clear()
        new = sorted(names - known.keys())
        database.executemany("INSERT OR IGNORE INTO groups(name) VALUES (?)", [(name,) for name in new])
        for name in new:
            (known[name],) = database.execute("SELECT number FROM groups WHERE name = ?", (name,)).fetchone()
        return {name: known[name] for name in names}

    def _write_weights(self, row: WeightsRow) -> None:
        """Write the row if its version is newer than all before, so that each version's first mention is kept."""
        newest = self._database.execute(
            "SELECT lineage, version FROM weights WHERE is_beat = ? ORDER BY lineage DESC, version DESC LIMIT 1",
            (row.worker != "",),
        ).fetchone()
        if newest is None or (row.lineage, row.number) > newest:
            self._database.execute(
                "INSERT OR IGNORE INTO weights VALUES (?, ?, ?, ?, ?)",
                (row.worker != "", row.lineage, row.number, row.sent_at, row.worker),
            )

    def places(self, group: str, kind: Kind, sample: int | None = None) -> list[Place]:
        """Records of a group, or of one sample of it, by sample, partition and offset."""
        lowest, highest = (_LEAST, _MOST) if sample is None else (sample, sample)
        rows = self._database.execute(
            "SELECT sample, named.number, position FROM named JOIN groups ON groups.number = grp "
            "WHERE name = ? AND kind = ? AND sample BETWEEN ? AND ? ORDER BY sample, named.number, position",
            (group, kind, lowest, highest),
        )
        return [Place(*row) for row in rows]

    def groups_under(self, prefix: str, most: int) -> list[str]:
        """Names of groups that start with this and a slash, such as all passes of a prompt; at most ``most``."""
        # "0" comes right after "/" in sort order: all texts with the slash lie between the two.
        rows = self._database.execute(
            "SELECT name FROM groups WHERE name > ? AND name < ? ORDER BY name LIMIT ?",
            (f"{prefix}/", f"{prefix}0", most),
        )
        return [name for (name,) in rows]

    def refs(self, kind: RefKind, of: Iterable[tuple[int, int]]) -> list[RefRow]:
        """Records about these positions of the trajectories topic."""
        found = []
        for position in of:
            rows = self._database.execute(
                "SELECT number, position FROM refs WHERE kind = ? AND of_number = ? AND of_position = ? "
                "ORDER BY number, position",
                (kind, *position),
            )
            found += [RefRow(kind, *position, *row) for row in rows]
        return found

    def first_reports(self, algorithm: str) -> list[StepRow]:
        """The first report of each lineage: its start, or if that is gone, its first remaining step."""
        rows = self._over_all_steps(
            "SELECT * FROM steps WHERE position IN "
            "(SELECT min(position) FROM steps WHERE algorithm = ? AND kind != ? GROUP BY lineage)",
            algorithm,
            StepKind.REFUSED,
        )
        return [StepRow(*row) for row in rows]

    def last_steps(self, algorithm: str) -> dict[int, int]:
        """The last step of each lineage that took any."""
        rows = self._over_all_steps(
            "SELECT lineage, max(version) FROM steps WHERE algorithm = ? AND kind = ? GROUP BY lineage",
            algorithm,
            StepKind.STEP,
        )
        return dict(rows)

    def _over_all_steps(self, query: str, algorithm: str, kind: StepKind) -> list[tuple[Any, ...]]:
        """The result of a query over all steps, which takes milliseconds in a long run: cached until the next write."""
        database = self._database
        # The first number grows when another connection writes, the second when this one does.
        stamp = (database.execute("PRAGMA data_version").fetchone()[0], database.total_changes)
        known = self._of_all_steps.get((query, algorithm))
        if known is None or known[0] != stamp:
            known = self._of_all_steps[query, algorithm] = (
                stamp,
                database.execute(query, (algorithm, kind)).fetchall(),
            )
        return known[1]

    def is_finished(self, algorithm: str) -> bool:
        """Whether the last report says that the run is finished."""
        row = self._database.execute(
            "SELECT finished FROM steps WHERE algorithm = ? AND kind != ? ORDER BY position DESC LIMIT 1",
            (algorithm, StepKind.REFUSED),
        ).fetchone()
        return row is not None and bool(row[0])

    def first_weights(self, version: PolicyVersion, *, in_use: bool) -> WeightsRow | None:
        """The first announcement of these or newer weights; with ``in_use``, the first heartbeat with them."""
        row = self._database.execute(
            "SELECT worker, lineage, version, sent_at FROM weights WHERE is_beat = ? AND (lineage, version) >= (?, ?) "
            "ORDER BY lineage, version LIMIT 1",
            (in_use, *version),
        ).fetchone()
        return None if row is None else WeightsRow(*row)


class _transaction:
    """Commits the open transaction after the block, or rolls it back on an error."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database

    def __enter__(self) -> None:
        pass

    def __exit__(self, error: object, *_: object) -> None:
        self._database.execute("COMMIT" if error is None else "ROLLBACK")


def _create_tables(database: sqlite3.Connection) -> None:
    with closing(database.cursor()) as cursor:
        for name in _TABLES:
            cursor.execute(f"DROP TABLE IF EXISTS {name}")
        for statement in _SCHEMA:
            cursor.execute(statement)
        cursor.execute(f"PRAGMA user_version = {FORMAT}")


def _only_newer(rows: Iterable[WeightsRow]) -> list[WeightsRow]:
    """The rows that are newer than all rows of their kind before them: few of many heartbeats."""
    newest: dict[bool, tuple[int, int]] = {}
    found = []
    for row in rows:
        is_beat, version = row.worker != "", (row.lineage, row.number)
        if is_beat not in newest or version > newest[is_beat]:
            newest[is_beat] = version
            found.append(row)
    return found
