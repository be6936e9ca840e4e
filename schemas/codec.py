"""Bytes ↔ messages.

A frame is: header length (uint32, little-endian), header (a msgpack map of the plain fields; array fields hold their
length in items, long texts theirs in bytes), then the arrays' little-endian bytes in field order, then the long texts'
UTF-8 in field order. The schema's name and version travel in the record's headers. Every size is checked before it is
used; the header is small by contract, so that a hostile one stays cheap, and what grows with a completion is behind it.
"""

import struct
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

import msgpack
import numpy as np
from pydantic import BaseModel, ValidationError

from streamrl.schemas.control import OperatorCommand, RunIdentity, WeightsReady, control_adapter
from streamrl.schemas.errors import FrameTooLarge, MalformedFrame, UnknownSchema
from streamrl.schemas.evaluation import EvaluationOrder, EvaluationReport
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.messages import Message
from streamrl.schemas.reports import (
    CarriedOver,
    Heartbeat,
    InstanceBeat,
    RefusedStep,
    RelayBeat,
    SkipRecord,
    StepReport,
    TrainerBeat,
)
from streamrl.schemas.trajectories import (
    FinishReason,
    PartialTrajectory,
    ReleaseOrder,
    TokenChunk,
    Trajectory,
    UngradedTrajectory,
    WorkOrder,
)

Headers = tuple[tuple[str, bytes], ...]

CONTENT_TYPE = b"application/vnd.streamrl+msgpack"
UNREADABLE_HEADER = "unreadable"
"""Header of a record that the bus could not read: its value says why; the record has no value of its own."""
CONTINUATIONS_HEADER = "continuations"
"""Header of a trajectory that others had begun: how often another worker went on; an audit counts without decoding."""
TURNS_HEADER = "turns"
"""Header of a session's trajectory: how many turns it has; an audit counts without decoding."""
MAX_HEADER_BYTES = 512 << 10
MAX_TEXT_BYTES = 8 << 20
"""Of all long texts of a frame: 200,000 tokens of 40 bytes. In memory one emoji makes a text four times as large."""
MAX_ITEMS = 20_000
MAX_REPORT_ITEMS = 120_000
"""Values in a header, those in containers counted; each takes up to two hundred times its bytes once it is unpacked."""
_SMALL_HEADER = 16 << 10
"""Bytes in which there cannot be too many values, so that the usual header is not walked over twice."""
_MANY_PROBLEMS = 1000
"""Invalid fields from which on they are only counted: to list them takes a kilobyte each."""
_NAME_LIMIT = 256
"""Longer than any id that the producers make; a longer one stands in damaged bytes."""
_PREFIX = struct.Struct("<I")  # length of the header
_STR_8 = 0xD9
_FIRST_FIELD = b"\xadtrajectory_id"
"""As msgpack writes the name of a trajectory's first field."""
# First bytes of containers whose sizes follow; smaller ones hold theirs in the first byte.
_ARRAY_16, _ARRAY_32, _MAP_16, _MAP_32 = 0xDC, 0xDD, 0xDE, 0xDF

MESSAGES: dict[str, type[Message]] = {
    message.SCHEMA: message
    for message in (
        WorkOrder,
        ReleaseOrder,
        TokenChunk,
        PartialTrajectory,
        UngradedTrajectory,
        Trajectory,
        StepReport,
        RefusedStep,
        CarriedOver,
        SkipRecord,
        Heartbeat,
        TrainerBeat,
        InstanceBeat,
        RelayBeat,
        OperatorCommand,
        RunIdentity,
        EvaluationOrder,
        EvaluationReport,
    )
}
# One schema for all control messages: their ``kind`` says which of the union it is, so a single validator reads them.
CONTROL_SCHEMA = WeightsReady.SCHEMA
_HEADER_FREE = {"step-report", "refused-step", "carried-over", "work-order", "evaluation-order"}
"""Schemas whose header may be as large as the message: our own trainer, dispatcher and evaluator write them."""


_LEFT_OUT = ("policy", "algorithm")
"""Fields that are not written while unset, so that a run without attached instances writes the bytes it always did."""


def headers_of(message: Message | type[Message]) -> Headers:
    """The record headers that name a message's schema."""
    return (
        ("schema", message.SCHEMA.encode()),
        ("schema-version", str(message.VERSION).encode()),
        ("content-type", CONTENT_TYPE),
    )


class _Kind(NamedTuple):
    """What the codec needs to know of a schema, looked up once per record."""

    schema: str
    version: int
    max_bytes: int
    max_header: int
    max_items: int
    arrays: tuple[tuple[str, np.dtype[Any]], ...]
    texts: tuple[str, ...]
    validate: Callable[[Any], Message]


def _kind_of(model: type[Message], validate: Callable[[Any], Message]) -> _Kind:
    max_header = model.MAX_BYTES if model.SCHEMA in _HEADER_FREE else min(model.MAX_BYTES, MAX_HEADER_BYTES)
    max_items = MAX_REPORT_ITEMS if model.SCHEMA in _HEADER_FREE else MAX_ITEMS
    arrays = tuple(model.array_fields().items())
    texts = model.text_fields()
    return _Kind(model.SCHEMA, model.VERSION, model.MAX_BYTES, max_header, max_items, arrays, texts, validate)


_KINDS = {
    CONTROL_SCHEMA: _kind_of(WeightsReady, control_adapter.validator.validate_python),
    **{schema: _kind_of(model, model.__pydantic_validator__.validate_python) for schema, model in MESSAGES.items()},
}
_KIND_BY_HEADERS = {
    headers_of(WeightsReady): _KINDS[CONTROL_SCHEMA],
    **{headers_of(model): _KINDS[schema] for schema, model in MESSAGES.items()},
}
"""By what our own writers send, so that the usual record needs one look-up."""


def encode(message: Message) -> bytes:
    """Serialise a message.

    Raises:
        FrameTooLarge: the frame would exceed ``MAX_BYTES`` of its schema, or its texts ``MAX_TEXT_BYTES``.
    """
    # A shallow copy: fields of it are replaced below, and the message itself is frozen.
    fields = dict(message.__dict__)
    for name in _LEFT_OUT:
        if fields.get(name, "") is None:
            del fields[name]
    blobs = []
    text_size = 0
    kind = _KINDS[message.SCHEMA]
    for name, _ in kind.arrays:
        array = fields.pop(name)
        fields[name] = array.size  # behind the plain fields, as the bytes are
        # A view with gaps is no run of bytes: it is copied once. ``join`` reads the others in place.
        blobs.append(array if array.flags.c_contiguous else array.tobytes())
    for name in kind.texts:
        text = fields.pop(name).encode()
        fields[name] = len(text)
        text_size += len(text)
        blobs.append(text)
    header = msgpack.packb(fields, default=_fields_of)
    frame = b"".join((_PREFIX.pack(len(header)), header, *blobs))
    # By the reader's own rule, so that nothing is written that would become a dead letter.
    _check_sizes(kind, len(frame), len(header))
    _check_texts(kind, text_size)
    return frame


def encode_token_chunk(
    trajectory_id: str,
    worker_id: str,
    start: int,
    version: PolicyVersion,
    tokens: tuple[Sequence[int], Sequence[float]],
    finish_reason: FinishReason | None,
) -> bytes:
    """The bytes that ``encode`` makes of such a ``TokenChunk``, at a fifth of the cost: there is one for every token.

    ``tokens``: ids and log-probabilities, as many of each.
    """
    count = len(tokens[0])
    fields = {
        "trajectory_id": trajectory_id,
        "worker_id": worker_id,
        "start": start,
        "version": version,
        "finish_reason": finish_reason,
        "token_ids": count,
        "logprobs": count,
    }
    header: bytes = msgpack.packb(fields, default=_fields_of)
    return _PREFIX.pack(len(header)) + header + struct.pack(f"<{count}i{count}f", *tokens[0], *tokens[1])


def decode(value: bytes | None, headers: Headers) -> Message:
    """Rebuild a message from a record's value and headers.

    Raises:
        UnknownSchema: the headers name no schema, or one that is not ours or is newer than ours.
        FrameTooLarge: a size exceeds what the schema allows.
        MalformedFrame: anything else; the text says which field.
    """
    kind = _KIND_BY_HEADERS.get(headers) or _named_kind(headers)
    fields, body = _split(value, kind)
    _attach_texts(kind, fields, body, _attach_arrays(kind, fields, body))
    try:
        return kind.validate(fields)
    except ValidationError as error:
        raise MalformedFrame(_first_problem(kind.schema, error)) from error


def header_of(value: bytes | None, headers: Headers) -> tuple[dict[str, Any], memoryview]:
    """The plain fields of a frame, not validated, and what stands behind its header: for displays of many records.

    Raises:
        WireError: as ``decode``, as far as the header shows it.
    """
    return _split(value, _KIND_BY_HEADERS.get(headers) or _named_kind(headers))


def peek(value: bytes | None, headers: Headers, schema: str, wanted: Collection[str]) -> dict[str, Any]:
    """These plain fields of a frame, without the rest; empty if the bytes do not begin as a frame of the schema does.

    Nothing behind the last field wanted is looked at, so a field may be found in a record that ``decode`` refuses.
    """
    if value is None or len(value) < _PREFIX.size or ("schema", schema.encode()) not in headers:
        return {}
    (size,) = _PREFIX.unpack_from(value)
    limit = _KINDS[schema].max_header
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
    # All that damaged bytes make msgpack raise.
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError, OverflowError):
        return {}
    return found


def peek_trajectory_id(value: bytes | None, headers: Headers, schema: str = Trajectory.SCHEMA) -> str | None:
    """The id in a trajectory's frame, its first field; None if the bytes do not begin as such a frame does."""
    # The frame as our own writers make it, in a tenth of the time; any other frame takes the longer way.
    if value is not None and len(value) > 22 and value[4] == _MAP_16 and value[7:21] == _FIRST_FIELD:
        begin, size = (23, value[22]) if value[21] == _STR_8 else (22, value[21] & 0x1F)
        (header,) = _PREFIX.unpack_from(value)
        is_short = 0xA0 <= value[21] <= 0xBF or value[21] == _STR_8
        fits = begin + size <= _PREFIX.size + header <= min(len(value), MAX_HEADER_BYTES)
        if is_short and fits and size and ("schema", schema.encode()) in headers:
            try:
                return value[begin : begin + size].decode()
            except UnicodeDecodeError:
                return None
    name = peek(value, headers, schema, ("trajectory_id",)).get("trajectory_id")
    return name if isinstance(name, str) and 0 < len(name) <= _NAME_LIMIT else None


def beginning_of_text(
    model: type[Message], name: str, fields: dict[str, Any], body: memoryview, characters: int
) -> str:
    """At most so many characters of a long text, of what ``header_of`` gave; the rest of it is not looked at.

    Raises:
        MalformedFrame: the lengths do not fit the frame.
    """
    # The texts are last, so what follows this one counts from the end.
    names = _KINDS[model.SCHEMA].texts
    sizes: list[int] = []
    for size in (fields.get(each) for each in names[names.index(name) :]):
        if type(size) is not int or size < 0:
            raise MalformedFrame(f"expected the length of {model.SCHEMA}.{name} within the frame, got {size!r}")
        sizes.append(size)
    start = len(body) - sum(sizes)
    if start < 0:
        raise MalformedFrame(f"expected the length of {model.SCHEMA}.{name} within the frame, got {sizes[0]!r}")
    # A character has at most four bytes; what the cut leaves of one stands behind the characters wanted.
    return str(body[start : start + min(sizes[0], 4 * characters)], "utf-8", "replace")[:characters]


def _first_problem(schema: str, error: ValidationError) -> str:
    if error.error_count() > _MANY_PROBLEMS:
        return f"{schema}: expected a valid record, got one with {error.error_count()} invalid fields"
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"]) or "record"
    return f"{schema}.{where}: {first['msg']}"


def _named_kind(headers: Headers) -> _Kind:
    named = dict(headers)
    if (reason := named.get(UNREADABLE_HEADER)) is not None:
        raise MalformedFrame(f"the bus could not read the record: {reason.decode(errors='replace')}")
    try:
        schema, version = named["schema"].decode(), int(named["schema-version"])
    except (KeyError, ValueError, AttributeError, TypeError) as error:
        raise UnknownSchema(f"expected headers 'schema' and 'schema-version', got {sorted(named)}") from error
    kind = _KINDS.get(schema)
    # Older ones are read, since a version only adds optional fields; what a newer one means we cannot know.
    if kind is None or not 1 <= version <= kind.version:
        newer = ", of a newer writer: update this process" if kind is not None and version > kind.version else ""
        raise UnknownSchema(f"expected one of {sorted(_KINDS)}, got {schema!r} version {version}{newer}")
    return kind


def _split(value: bytes | None, kind: _Kind) -> tuple[dict[str, Any], memoryview]:
    if value is None or len(value) < _PREFIX.size:
        raise MalformedFrame(f"expected a {kind.schema} frame, got {0 if value is None else len(value)} bytes")
    (header_size,) = _PREFIX.unpack_from(value)
    # Before the slice and before msgpack sees a byte: the length is a stranger's word.
    _check_sizes(kind, len(value), header_size)
    end = _PREFIX.size + header_size
    if len(value) < end:
        raise MalformedFrame(f"expected a {kind.schema} header of {header_size} bytes, got {len(value) - _PREFIX.size}")
    header = value[_PREFIX.size : end]
    try:
        if header_size > _SMALL_HEADER:
            refuse_many_items(header, kind.max_items)
        # The timestamp extension never comes to ``ext_hook``; as a datetime (3) there is no field that takes it.
        fields = msgpack.unpackb(header, strict_map_key=True, ext_hook=_refuse_ext, timestamp=3)
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError, OverflowError, IndexError) as error:
        raise MalformedFrame(f"expected a msgpack map as {kind.schema} header, got: {error!r}") from error
    if not isinstance(fields, dict):
        raise MalformedFrame(f"expected a map as {kind.schema} header, got {type(fields).__name__}")
    return fields, memoryview(value)[end:]


def refuse_many_items(data: bytes, limit: int) -> None:
    """Count the values in msgpack bytes before any is made: one byte on the wire becomes up to two hundred in memory.

    Walks over the bytes without keeping anything.

    Raises:
        FrameTooLarge: there are more than ``limit`` values, each key and each value in a container counted.
        ValueError, IndexError, msgpack.UnpackException: the bytes are not msgpack.
    """
    unpacker = msgpack.Unpacker(max_buffer_size=len(data))
    unpacker.feed(data)
    # Values read, and values that the containers read so far still promise.
    seen, to_come = 0, 1
    while to_come:
        first = data[unpacker.tell()]
        if 0x90 <= first <= 0x9F or first in (_ARRAY_16, _ARRAY_32):
            to_come += unpacker.read_array_header()
        elif 0x80 <= first <= 0x8F or first in (_MAP_16, _MAP_32):
            to_come += 2 * unpacker.read_map_header()  # a key and a value each
        else:
            unpacker.skip()
        seen, to_come = seen + 1, to_come - 1
        # What is promised counts at once: a container may claim 2^32 values in five bytes.
        if seen + to_come > limit:
            raise FrameTooLarge(f"expected at most {limit} values in a header, got {seen + to_come} or more")


def _attach_arrays(kind: _Kind, fields: dict[str, Any], body: memoryview) -> int:
    """Where in the body the arrays end."""
    position, end = 0, len(body)
    for name, dtype in kind.arrays:
        count = fields.get(name)
        # ``type``, not ``isinstance``: a bool is an int in Python.
        size = count * dtype.itemsize if type(count) is int else -1
        if size < 0 or position + size > end:
            raise MalformedFrame(f"expected the length of {kind.schema}.{name} within the frame, got {count!r}")
        # A view of the record's bytes, read-only as they are: nothing is copied.
        fields[name] = np.frombuffer(body, dtype, size // dtype.itemsize, position)
        position += size
    return position


def _attach_texts(kind: _Kind, fields: dict[str, Any], body: memoryview, position: int) -> None:
    end = len(body)
    # All that is left is text, or refused below.
    _check_texts(kind, end - position)
    for name in kind.texts:
        size = fields.get(name)
        if type(size) is not int or not 0 <= size <= end - position:
            raise MalformedFrame(f"expected the length of {kind.schema}.{name} within the frame, got {size!r}")
        try:
            fields[name] = str(body[position : position + size], "utf-8")
        except UnicodeDecodeError as error:
            raise MalformedFrame(f"expected UTF-8 as {kind.schema}.{name}, got: {error.reason}") from error
        position += size
    if position != end:
        raise MalformedFrame(
            f"expected {position} bytes of arrays and texts behind the {kind.schema} header, got {end}"
        )


def _check_sizes(kind: _Kind, frame_size: int, header_size: int) -> None:
    if frame_size > kind.max_bytes or header_size > kind.max_header:
        raise FrameTooLarge(
            f"expected a {kind.schema} frame of at most {kind.max_bytes} bytes with a header of at most "
            f"{kind.max_header}, got {frame_size} with {header_size}"
        )


def _check_texts(kind: _Kind, size: int) -> None:
    if size > MAX_TEXT_BYTES and kind.texts:
        raise FrameTooLarge(f"expected at most {MAX_TEXT_BYTES} bytes of text in a {kind.schema} frame, got {size}")


def _fields_of(part: Any) -> Any:
    if not isinstance(part, BaseModel):
        raise TypeError(f"expected a field that msgpack can carry, got {type(part).__name__}")
    return part.__dict__


def _refuse_ext(code: int, _data: bytes) -> Any:
    raise MalformedFrame(f"expected plain msgpack, got extension type {code}")


def named_error(headers: Iterable[tuple[str, bytes]]) -> str:
    """The class of the error for which a record became a dead letter."""
    # Of a name that comes twice the last one counts, here and in ``_named_kind``.
    return (dict(headers).get("dlq-error-class") or b"(none)").decode(errors="replace")
