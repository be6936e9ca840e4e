"""Bytes ↔ messages.

A frame has four parts, in this order:
- the header's length (uint32, little-endian);
- the header, a msgpack map of the plain fields. An array field holds its number of items there, a long text its number
  of bytes;
- the arrays' little-endian bytes, in field order;
- the long texts' UTF-8, in field order.

The schema's name and version travel in the record's headers. Every size is checked before it is used. The header has a
small limit, so that a hostile one costs little to read. Fields that grow with a completion come after the header.
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
"""Header that replaces the value of a record that the bus could not read. It holds the reason."""
CONTINUATIONS_HEADER = "continuations"
"""Header of a trajectory that several workers sampled: how often another worker continued it.

With it, an audit counts continuations without decoding.
"""
TURNS_HEADER = "turns"
"""Header of a session's trajectory: its number of turns. With it, an audit counts turns without decoding."""
MAX_HEADER_BYTES = 512 << 10
MAX_TEXT_BYTES = 8 << 20
"""Most bytes of all long texts of a frame together: 200,000 tokens of 40 bytes.

In memory, one emoji makes the whole text four times as large.
"""
MAX_ITEMS = 20_000
MAX_REPORT_ITEMS = 120_000
"""Most values in a header, including values in containers. An unpacked value takes up to 200 times its bytes."""
_SMALL_HEADER = 16 << 10
"""Bytes up to which a header cannot hold too many values. A header of this size or less is not counted first."""
_MANY_PROBLEMS = 1000
"""Number of invalid fields above which an error reports only their number: listing one takes a kilobyte."""
_NAME_LIMIT = 256
"""Characters of the longest trajectory id. Producers make shorter ones, so a longer one comes from damaged bytes."""
_PREFIX = struct.Struct("<I")  # length of the header
_STR_8 = 0xD9
_FIRST_FIELD = b"\xadtrajectory_id"
"""The name of a trajectory's first field, as msgpack writes it."""
# First bytes of containers whose sizes follow. Smaller containers hold their sizes in the first byte.
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
# One schema and one validator serve all control messages: ``kind`` selects the member of the union.
CONTROL_SCHEMA = WeightsReady.SCHEMA
_LARGE_HEADER_SCHEMAS = {"step-report", "refused-step", "carried-over", "work-order", "evaluation-order"}
"""Schemas whose header may be as large as the message. Only trainer, dispatcher and evaluator write them."""


_OMITTED_IF_UNSET = ("policy", "algorithm", "chance", "decided")
"""Fields that are written only if set, so that the bytes of a run without their feature stay the same."""


def headers_of(message: Message | type[Message]) -> Headers:
    """The record headers that name a message's schema."""
    return (
        ("schema", message.SCHEMA.encode()),
        ("schema-version", str(message.VERSION).encode()),
        ("content-type", CONTENT_TYPE),
    )


class _Kind(NamedTuple):
    """What the codec needs to know about a schema, looked up once per record."""

    schema: str
    version: int
    max_bytes: int
    max_header: int
    max_items: int
    arrays: tuple[tuple[str, np.dtype[Any]], ...]
    texts: tuple[str, ...]
    validate: Callable[[Any], Message]


def _kind_of(model: type[Message], validate: Callable[[Any], Message]) -> _Kind:
    max_header = model.MAX_BYTES if model.SCHEMA in _LARGE_HEADER_SCHEMAS else min(model.MAX_BYTES, MAX_HEADER_BYTES)
    max_items = MAX_REPORT_ITEMS if model.SCHEMA in _LARGE_HEADER_SCHEMAS else MAX_ITEMS
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
"""Schemas by the exact headers that this project's writers send, so that a usual record needs one look-up."""


def encode(message: Message) -> bytes:
    """Serialise a message.

    Raises:
        FrameTooLarge: the frame would exceed ``MAX_BYTES`` of its schema, or its texts ``MAX_TEXT_BYTES``.
    """
    # A shallow copy, because the code below replaces fields and the message is frozen.
    fields = dict(message.__dict__)
    for name in _OMITTED_IF_UNSET:
        if fields.get(name, "") is None:
            del fields[name]
    blobs = []
    text_size = 0
    kind = _KINDS[message.SCHEMA]
    for name, _ in kind.arrays:
        array = fields.pop(name)
        fields[name] = array.size  # after the plain fields, in the order of the bytes
        # An array with gaps is not one run of bytes, so it is copied once. ``join`` reads the others without a copy.
        blobs.append(array if array.flags.c_contiguous else array.tobytes())
    for name in kind.texts:
        text = fields.pop(name).encode()
        fields[name] = len(text)
        text_size += len(text)
        blobs.append(text)
    header = msgpack.packb(fields, default=_fields_of)
    frame = b"".join((_PREFIX.pack(len(header)), header, *blobs))
    # The reader's checks: a frame that a reader would refuse as a dead letter is not written.
    _check_sizes(kind, len(frame), len(header))
    _check_texts(kind, text_size)
    return frame


def size_of_part(part: BaseModel, max_items: int) -> int:
    """Bytes that a value takes inside a header.

    Raises:
        FrameTooLarge: it has more than ``max_items`` values.
        ValueError, OverflowError: msgpack cannot hold one of its values.
    """
    packed: bytes = msgpack.packb(part, default=_fields_of)
    if len(packed) > _SMALL_HEADER:
        refuse_too_many_items(packed, max_items)
    return len(packed)


def encode_token_chunk(
    trajectory_id: str,
    worker_id: str,
    start: int,
    version: PolicyVersion,
    tokens: tuple[Sequence[int], Sequence[float]],
    finish_reason: FinishReason | None,
) -> bytes:
    """The bytes that ``encode`` makes from this ``TokenChunk``, at a fifth of the cost: every token may need one.

    ``tokens``: ids and log-probabilities, of equal length.
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
        UnknownSchema: the headers name no schema, an unknown one, or a version newer than this process knows.
        FrameTooLarge: a size exceeds what the schema allows.
        MalformedFrame: the frame is invalid in another way; the text names the field.
    """
    kind = _KIND_BY_HEADERS.get(headers) or _named_kind(headers)
    fields, body = _split(value, kind)
    _attach_texts(kind, fields, body, _attach_arrays(kind, fields, body))
    try:
        return kind.validate(fields)
    except ValidationError as error:
        raise MalformedFrame(_first_problem(kind.schema, error)) from error


def split_frame(value: bytes | None, headers: Headers) -> tuple[dict[str, Any], memoryview]:
    """The plain fields of a frame, not validated, and the bytes after its header; for displays of many records.

    Raises:
        WireError: as in ``decode``, but only for problems in the headers, the sizes and the frame's header.
    """
    return _split(value, _KIND_BY_HEADERS.get(headers) or _named_kind(headers))


def peek(value: bytes | None, headers: Headers, schema: str, wanted: Collection[str]) -> dict[str, Any]:
    """The ``wanted`` plain fields of a frame; empty if the bytes do not start like a frame of the schema.

    Reading stops at the last wanted field, so a field may be found in a record that ``decode`` refuses.
    """
    if value is None or len(value) < _PREFIX.size or ("schema", schema.encode()) not in headers:
        return {}
    (size,) = _PREFIX.unpack_from(value)
    limit = _KINDS[schema].max_header
    # In damaged bytes the length may be anything up to 4 GiB, so it is checked before anything is allocated.
    if size > min(limit, len(value) - _PREFIX.size):
        return {}
    unpacker = msgpack.Unpacker(max_buffer_size=limit, strict_map_key=True)
    unpacker.feed(memoryview(value)[_PREFIX.size : _PREFIX.size + size])
    found: dict[str, Any] = {}
    # The header is one map. Reading it key by key skips the long values and stops at the last wanted field.
    try:
        for _ in range(unpacker.read_map_header()):
            if (name := unpacker.unpack()) in wanted:
                found[name] = unpacker.unpack()
                if len(found) == len(wanted):
                    break
            else:
                unpacker.skip()
    # All errors that msgpack raises for damaged bytes.
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError, OverflowError):
        return {}
    return found


def peek_trajectory_id(value: bytes | None, headers: Headers, schema: str = Trajectory.SCHEMA) -> str | None:
    """The trajectory id, the first field of a frame; None if the bytes do not start like such a frame."""
    # A frame as this project's writers make it is read in a tenth of the time. Any other frame goes through ``peek``.
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


def text_prefix(model: type[Message], name: str, fields: dict[str, Any], body: memoryview, characters: int) -> str:
    """The first ``characters`` of a long text, or all of a shorter one, without decoding the rest.

    ``fields`` and ``body``: the result of ``split_frame``.

    Raises:
        MalformedFrame: the lengths do not fit the frame.
    """
    # The texts are last in a frame, so the start of this one is found from the frame's end.
    names = _KINDS[model.SCHEMA].texts
    sizes: list[int] = []
    for size in (fields.get(each) for each in names[names.index(name) :]):
        if type(size) is not int or size < 0:
            raise MalformedFrame(f"expected the length of {model.SCHEMA}.{name} within the frame, got {size!r}")
        sizes.append(size)
    start = len(body) - sum(sizes)
    if start < 0:
        raise MalformedFrame(f"expected the length of {model.SCHEMA}.{name} within the frame, got {sizes[0]!r}")
    # A character has at most four bytes. A character that the byte limit cuts comes after the wanted ones.
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
    # Older versions are read, since a new version only adds optional fields. The meaning of a newer one is unknown.
    if kind is None or not 1 <= version <= kind.version:
        newer = ", from a newer writer: update this process" if kind is not None and version > kind.version else ""
        raise UnknownSchema(f"expected one of {sorted(_KINDS)}, got {schema!r} version {version}{newer}")
    return kind


def _split(value: bytes | None, kind: _Kind) -> tuple[dict[str, Any], memoryview]:
    if value is None or len(value) < _PREFIX.size:
        raise MalformedFrame(f"expected a {kind.schema} frame, got {0 if value is None else len(value)} bytes")
    (header_size,) = _PREFIX.unpack_from(value)
    # Checked before the slice and before msgpack reads a byte: the length may come from an untrusted writer.
    _check_sizes(kind, len(value), header_size)
    end = _PREFIX.size + header_size
    if len(value) < end:
        raise MalformedFrame(f"expected a {kind.schema} header of {header_size} bytes, got {len(value) - _PREFIX.size}")
    header = value[_PREFIX.size : end]
    try:
        if header_size > _SMALL_HEADER:
            refuse_too_many_items(header, kind.max_items)
        # msgpack does not pass the timestamp extension to ``ext_hook``. As a datetime (3), no field accepts it.
        fields = msgpack.unpackb(header, strict_map_key=True, ext_hook=_refuse_ext, timestamp=3)
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError, OverflowError, IndexError) as error:
        raise MalformedFrame(f"expected a msgpack map as {kind.schema} header, got: {error!r}") from error
    if not isinstance(fields, dict):
        raise MalformedFrame(f"expected a map as {kind.schema} header, got {type(fields).__name__}")
    return fields, memoryview(value)[end:]


def refuse_too_many_items(data: bytes, limit: int) -> None:
    """Refuse msgpack bytes with too many values before unpacking them: a byte takes up to 200 bytes once unpacked.

    Reads over the bytes and keeps no value.

    Raises:
        FrameTooLarge: there are more than ``limit`` values, counting each key and each value in a container.
        ValueError, IndexError, msgpack.UnpackException: the bytes are not msgpack.
    """
    unpacker = msgpack.Unpacker(max_buffer_size=len(data))
    unpacker.feed(data)
    # Values read, and values that the containers read so far still announce.
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
        # Announced values count at once: a container may claim 2^32 values in five bytes.
        if seen + to_come > limit:
            raise FrameTooLarge(f"expected at most {limit} values in a header, got {seen + to_come} or more")


def _attach_arrays(kind: _Kind, fields: dict[str, Any], body: memoryview) -> int:
    """Put views of the arrays into ``fields``; returns where in the body the arrays end."""
    position, end = 0, len(body)
    for name, dtype in kind.arrays:
        count = fields.get(name)
        # ``type``, not ``isinstance``: a bool is an int in Python.
        size = count * dtype.itemsize if type(count) is int else -1
        if size < 0 or position + size > end:
            raise MalformedFrame(f"expected the length of {kind.schema}.{name} within the frame, got {count!r}")
        # A read-only view of the record's bytes, not a copy.
        fields[name] = np.frombuffer(body, dtype, size // dtype.itemsize, position)
        position += size
    return position


def _attach_texts(kind: _Kind, fields: dict[str, Any], body: memoryview, position: int) -> None:
    end = len(body)
    # The rest of the body is text. Bytes after the texts are refused below.
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
        raise MalformedFrame(f"expected {position} bytes of arrays and texts after the {kind.schema} header, got {end}")


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
    # Fields beyond those of the class, where the class keeps them.
    return {**part.__dict__, **part.__pydantic_extra__} if part.__pydantic_extra__ else part.__dict__


def _refuse_ext(code: int, _data: bytes) -> Any:
    raise MalformedFrame(f"expected plain msgpack, got extension type {code}")


def dead_letter_error_class(headers: Iterable[tuple[str, bytes]]) -> str:
    """The class of the error that made a record a dead letter."""
    # If a header comes twice, the last one counts, here and in ``_named_kind``.
    return (dict(headers).get("dlq-error-class") or b"(none)").decode(errors="replace")
