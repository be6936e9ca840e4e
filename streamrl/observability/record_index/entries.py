"""The rows that a record adds to the index: names and positions, without texts, arrays or rewards. Pure.

From a trajectory only the id is read, the first field of its frame; from a work order only the record's key.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

import xxhash

from streamrl.bus.port import Record, message_of
from streamrl.schemas.codec import Headers, peek_trajectory_id
from streamrl.schemas.control import WeightsReady
from streamrl.schemas.identifiers import group_id_of
from streamrl.schemas.reports import CarriedOver, Heartbeat, RecordRef, RefusedStep, SkipRecord, StepReport
from streamrl.schemas.topics import CONTROL, DEAD_LETTERS, HEARTBEATS, SKIPS, STEPS, TRAJECTORIES, WORK_ORDERS, Topic

RETRY_OF = "dlq-retry-of"
"""Header of a record that was sent again: partition and offset of the refused one on the same topic."""
WHOLE_GROUP = -1
"""Number that means all samples of a group, and the number of a name that has none."""
_SAMPLE_DIGITS = 9
_MARKED_BYTES = 256
"""Bytes of a value that enter its record's mark. A frame starts with its id, so they distinguish records."""


class Kind(IntEnum):
    """The kind of record that a named row is about. The numbers are stored in the file."""

    TRAJECTORY = 0
    ORDER = 1
    STEP = 2
    SKIP = 3


class RefKind(IntEnum):
    """The kind of a row that refers to a position on the trajectories topic instead of a name."""

    UNNAMED_SKIP = 0
    DEAD_LETTER = 1
    RETRY = 2


class StepKind(IntEnum):
    """The kind of a report on the steps topic."""

    LINEAGE_START = 0
    STEP = 1
    REFUSED = 2


class NamedRow(NamedTuple):
    """A record that belongs to a group, or to one sample of it."""

    group: str
    kind: Kind
    sample: int
    partition: int
    offset: int


class RefRow(NamedTuple):
    """A record about a trajectory.

    ``of_partition``, ``of_offset``: the position on the trajectories topic; then the position of the record about it.
    """

    kind: RefKind
    of_partition: int
    of_offset: int
    partition: int
    offset: int


class StepRow(NamedTuple):
    """A step report without its trajectories: enough to decide which steps survive."""

    offset: int
    algorithm: str
    kind: StepKind
    lineage: int
    number: int
    step: int
    parent_lineage: int | None
    parent_number: int | None
    parent_skips: int
    finished: bool
    carried_parts: int


class WeightsRow(NamedTuple):
    """The first mention of a version: in a worker's heartbeat, or with an empty ``worker`` in its announcement."""

    worker: str
    lineage: int
    number: int
    sent_at: float


@dataclass
class Rows:
    """The rows of some records."""

    named: list[NamedRow] = field(default_factory=list)
    refs: list[RefRow] = field(default_factory=list)
    steps: list[StepRow] = field(default_factory=list)
    weights: list[WeightsRow] = field(default_factory=list)


def split_name(name: str) -> tuple[str, int]:
    """Group and sample of a trajectory id. Any other text counts as a group."""
    group, _, sample = name.rpartition("/")
    # Only the canonical form of an id counts: "a/07" is not the name of sample 7.
    if group and sample.isascii() and sample.isdigit() and len(sample) <= _SAMPLE_DIGITS and str(int(sample)) == sample:
        return group, int(sample)
    return name, WHOLE_GROUP


def joined_name(group: str, sample: int) -> str:
    """The inverse of ``split_name``."""
    return group if sample == WHOLE_GROUP else f"{group}/{sample}"


def mark_of(record: Record) -> int:
    """A hash that identifies a record, as a signed number, which SQLite can store."""
    value = record.value or b""
    content = repr((record.key, record.timestamp, len(value))).encode(errors="replace") + value[:_MARKED_BYTES]
    return xxhash.xxh3_64_intdigest(content) - (1 << 63)


def position_in(content: bytes | None) -> tuple[int, int] | None:
    """Partition and offset from a retry's header; None if it is malformed: headers come from outside."""
    partition, _, offset = (content or b"").decode(errors="replace").partition("@")
    numbers = (number(partition), number(offset))
    return None if numbers[0] is None or numbers[1] is None else (numbers[0], numbers[1])


def number(text: str | None) -> int | None:
    """A number from a header; None if it is malformed: headers come from outside."""
    # At most 18 digits, the range of an offset.
    return int(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 19 else None


def refused_position(headers: Headers, topic: str) -> tuple[int, int] | None:
    """The position of the record that became this dead letter; None if it is another topic's or headers are missing."""
    named = {name: (content or b"").decode(errors="replace") for name, content in headers}
    partition, offset = number(named.get("dlq-partition")), number(named.get("dlq-offset"))
    if named.get("dlq-topic") != topic or partition is None or offset is None:
        return None
    return partition, offset


class Fold:
    """Turns records of one run's topics into rows. ``topics``: full names of the topics that it takes."""

    def __init__(self, run: str) -> None:
        handlers: dict[Topic, Callable[[Record, Rows], None]] = {
            STEPS: self._step,
            SKIPS: self._skip,
            TRAJECTORIES: self._trajectory,
            WORK_ORDERS: self._order,
            DEAD_LETTERS: self._dead_letter,
            CONTROL: self._announcement,
            HEARTBEATS: self._heartbeat,
        }
        self._handlers = {topic.full_name(run): handler for topic, handler in handlers.items()}
        self._trajectories = TRAJECTORIES.full_name(run)
        self.topics: Sequence[str] = tuple(self._handlers)
        self.compacted = frozenset(t.full_name(run) for t in handlers if t.cleanup_policy == "compact")

    def add(self, record: Record, rows: Rows) -> None:
        """Add the rows of a record. A record that does not decode adds the rows that are known without decoding."""
        self._handlers[record.topic](record, rows)

    def _trajectory(self, record: Record, rows: Rows) -> None:
        if (name := peek_trajectory_id(record.value, record.headers)) is not None:
            group, sample = split_name(name)
            rows.named.append(NamedRow(group, Kind.TRAJECTORY, sample, record.partition, record.offset))
        for header, content in record.headers:
            if header == RETRY_OF and (of := position_in(content)) is not None:
                rows.refs.append(RefRow(RefKind.RETRY, *of, record.partition, record.offset))

    def _order(self, record: Record, rows: Rows) -> None:
        if record.key:
            rows.named.append(NamedRow(record.key, Kind.ORDER, WHOLE_GROUP, record.partition, record.offset))

    def _step(self, record: Record, rows: Rows) -> None:
        message = message_of(record)
        if isinstance(message, StepReport):
            is_start = not message.group_ids
            parent = message.parent
            rows.steps.append(
                StepRow(
                    record.offset,
                    message.algorithm,
                    StepKind.LINEAGE_START if is_start else StepKind.STEP,
                    *message.version,
                    message.step,
                    parent and parent.lineage,
                    parent and parent.number,
                    message.parent_skips,
                    message.finished,
                    message.carried_parts,
                )
            )
        elif isinstance(message, RefusedStep):
            rows.steps.append(
                StepRow(
                    record.offset,
                    message.algorithm,
                    StepKind.REFUSED,
                    *message.version,
                    message.step,
                    None,
                    None,
                    0,
                    False,
                    0,
                )
            )
        elif not isinstance(message, CarriedOver):
            return
        # One row per group, not per sample: the report itself says which record is in which micro-batch.
        for group in dict.fromkeys(_group_of(ref) for ref in _refs_of(message)):
            rows.named.append(NamedRow(group, Kind.STEP, WHOLE_GROUP, record.partition, record.offset))

    def _skip(self, record: Record, rows: Rows) -> None:
        message = message_of(record)
        if not isinstance(message, SkipRecord):
            return
        if message.trajectory_id:
            group, sample = split_name(message.trajectory_id)
            rows.named.append(NamedRow(group, Kind.SKIP, sample, record.partition, record.offset))
        else:
            of = (message.partition, message.offset)
            rows.refs.append(RefRow(RefKind.UNNAMED_SKIP, *of, record.partition, record.offset))

    def _dead_letter(self, record: Record, rows: Rows) -> None:
        if (of := refused_position(record.headers, self._trajectories)) is not None:
            rows.refs.append(RefRow(RefKind.DEAD_LETTER, *of, record.partition, record.offset))

    def _announcement(self, record: Record, rows: Rows) -> None:
        message = message_of(record)
        if isinstance(message, WeightsReady):
            rows.weights.append(WeightsRow("", *message.version, message.sent_at))

    def _heartbeat(self, record: Record, rows: Rows) -> None:
        message = message_of(record)
        # An arm's versions are its own, even if their numbers equal those of served versions.
        if isinstance(message, Heartbeat) and not message.policy:
            rows.weights.append(WeightsRow(message.worker_id, *message.version, message.sent_at))


def _refs_of(message: StepReport | RefusedStep | CarriedOver) -> list[RecordRef]:
    if isinstance(message, CarriedOver):
        return list(message.records)
    return [*(ref for batch in message.micro_batches for ref in batch), *message.left_out]


def _group_of(ref: RecordRef) -> str:
    return group_id_of(ref.trajectory_id) if split_name(ref.trajectory_id)[1] != WHOLE_GROUP else ref.trajectory_id
