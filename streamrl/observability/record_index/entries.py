"""What one record adds to the index: names and positions, and no text, array or reward. Pure.

Of a trajectory only the id is read, which is the first field of its frame, and of a work order only the key.
"""

import struct
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple

import msgpack
import xxhash

from streamrl.bus.port import Record, message_of
from streamrl.schemas.codec import MAX_HEADER_BYTES, Headers
from streamrl.schemas.control import WeightsReady
from streamrl.schemas.identifiers import group_id_of
from streamrl.schemas.reports import CarriedOver, Heartbeat, RecordRef, RefusedStep, SkipRecord, StepReport
from streamrl.schemas.topics import CONTROL, DEAD_LETTERS, HEARTBEATS, SKIPS, STEPS, TRAJECTORIES, WORK_ORDERS, Topic

RETRY_OF = "dlq-retry-of"
"""Header of a record that was sent once more: partition and offset of the refused one on the same topic."""
WHOLE_GROUP = -1
"""In place of a sample's number: all samples of the group, or the thing itself where a name has no number."""
_PREFIX = struct.Struct("<I")
_MAP_16, _STR_8 = 0xDE, 0xD9
_FIRST_FIELD = b"\xadtrajectory_id"
"""As msgpack writes the name of a trajectory's first field."""
_NAME_LIMIT = 256
"""Longer than any id that the producers make: what is longer stands in damaged bytes."""
_SAMPLE_DIGITS = 9
_MARKED_BYTES = 256
"""Of a value, in the mark by which its record is known again: a frame begins with its id."""


class Kind(IntEnum):
    """What a named row stands for: the record at its position. Numbers are those in the file."""

    TRAJECTORY = 0
    ORDER = 1
    STEP = 2
    SKIP = 3


class RefKind(IntEnum):
    """What a row stands for that is known by a position on the trajectories topic instead of by a name."""

    UNNAMED_SKIP = 0
    DEAD_LETTER = 1
    RETRY = 2


class StepKind(IntEnum):
    """A report on the steps topic."""

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
    """``of``: partition and offset on the trajectories topic; then where the record stands that is about it."""

    kind: RefKind
    of_partition: int
    of_offset: int
    partition: int
    offset: int


class StepRow(NamedTuple):
    """A step report without what it trained: enough to tell which steps survive."""

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
    """The first sign of weights: a worker's heartbeat, or, without a worker, their announcement."""

    worker: str
    lineage: int
    number: int
    sent_at: float


@dataclass
class Rows:
    """Of some records."""

    named: list[NamedRow] = field(default_factory=list)
    refs: list[RefRow] = field(default_factory=list)
    steps: list[StepRow] = field(default_factory=list)
    weights: list[WeightsRow] = field(default_factory=list)


def split_name(name: str) -> tuple[str, int]:
    """Group and sample of a trajectory id; a text that is none is a group of its own."""
    group, _, sample = name.rpartition("/")
    # Only the one way in which an id is written: "a/07" is not the name of sample 7.
    if group and sample.isascii() and sample.isdigit() and len(sample) <= _SAMPLE_DIGITS and str(int(sample)) == sample:
        return group, int(sample)
    return name, WHOLE_GROUP


def joined_name(group: str, sample: int) -> str:
    """The inverse of ``split_name``."""
    return group if sample == WHOLE_GROUP else f"{group}/{sample}"


def mark_of(record: Record) -> int:
    """A number by which a record is known again, as SQLite holds numbers: signed."""
    value = record.value or b""
    content = repr((record.key, record.timestamp, len(value))).encode(errors="replace") + value[:_MARKED_BYTES]
    return xxhash.xxh3_64_intdigest(content) - (1 << 63)


def name_of(record: Record) -> str | None:
    """The id of a trajectory; None if the bytes do not begin as a trajectory's do."""
    value = record.value
    # The frame as our own writers make it; whatever differs takes the longer way.
    if value is not None and len(value) > 22 and value[4] == _MAP_16 and value[7:21] == _FIRST_FIELD:
        begin, size = (23, value[22]) if value[21] == _STR_8 else (22, value[21] & 0x1F)
        (header,) = _PREFIX.unpack_from(value)
        is_short = 0xA0 <= value[21] <= 0xBF or value[21] == _STR_8
        fits = begin + size <= 4 + header <= min(len(value), MAX_HEADER_BYTES)
        if is_short and fits and size and ("schema", b"trajectory") in record.headers:
            try:
                return value[begin : begin + size].decode()
            except UnicodeDecodeError:
                return None
    return trajectory_id_of(record)


def trajectory_id_of(record: Record, schema: bytes = b"trajectory") -> str | None:
    """The trajectory's id; None if the bytes do not begin as those of a message of this schema do.

    The rest is not decoded, so an id may be found in a record that the reader refuses.
    """
    name = fields_of(record, schema, ("trajectory_id",), MAX_HEADER_BYTES).get("trajectory_id")
    return name if isinstance(name, str) and 0 < len(name) <= _NAME_LIMIT else None


def fields_of(record: Record, schema: bytes, wanted: Collection[str], limit: int) -> dict[str, Any]:
    """These fields of a frame's header, without the rest; empty if the bytes do not begin as such a frame does."""
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


def position_in(content: bytes | None) -> tuple[int, int] | None:
    """Partition and offset as a retry's header tells them, if it does: anybody may write one."""
    partition, _, offset = (content or b"").decode(errors="replace").partition("@")
    numbers = (number(partition), number(offset))
    return None if numbers[0] is None or numbers[1] is None else (numbers[0], numbers[1])


def number(text: str | None) -> int | None:
    """A number out of a header, if it is one: headers come from outside."""
    # At most 18 digits, the range of an offset.
    return int(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 19 else None


def refused_position(headers: Headers, topic: str) -> tuple[int, int] | None:
    """Where the record stands that became this dead letter, if it is one of the topic and the headers tell."""
    named = {name: (content or b"").decode(errors="replace") for name, content in headers}
    partition, offset = number(named.get("dlq-partition")), number(named.get("dlq-offset"))
    if named.get("dlq-topic") != topic or partition is None or offset is None:
        return None
    return partition, offset


class Fold:
    """Adds records of one run's topics to rows. ``topics``: full names of those it takes."""

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
        """Take a record; what does not decode adds what can be told of it."""
        self._handlers[record.topic](record, rows)

    def _trajectory(self, record: Record, rows: Rows) -> None:
        if (name := name_of(record)) is not None:
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
        # One row a group and not one a sample: the report itself says which record is in which micro-batch.
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
        # An arm's versions are its own: one with a served version's number says nothing of that.
        if isinstance(message, Heartbeat) and not message.policy:
            rows.weights.append(WeightsRow(message.worker_id, *message.version, message.sent_at))


def _refs_of(message: StepReport | RefusedStep | CarriedOver) -> list[RecordRef]:
    if isinstance(message, CarriedOver):
        return list(message.records)
    return [*(ref for batch in message.micro_batches for ref in batch), *message.left_out]


def _group_of(ref: RecordRef) -> str:
    return group_id_of(ref.trajectory_id) if split_name(ref.trajectory_id)[1] != WHOLE_GROUP else ref.trajectory_id
