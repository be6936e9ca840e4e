"""Bytes ↔ messages.

A frame is: header length (uint32, little-endian), header (a msgpack map of the plain fields; array fields hold their
length), then the arrays' little-endian bytes in field order. The schema's name and version travel in the record's
headers. Every size is checked before it is used; the header is small by contract, so that a hostile one stays cheap.
"""

import struct
from collections.abc import Callable
from typing import Any

import msgpack
import numpy as np
from pydantic import BaseModel, ValidationError

from schemas.errors import FrameTooLarge, MalformedFrame, UnknownSchema
from schemas.messages.base import Message
from schemas.messages.control import OperatorCommand, WeightsReady, control_adapter
from schemas.messages.prompts import WorkOrder
from schemas.messages.reports import Heartbeat, SkipRecord, StepReport
from schemas.messages.trajectories import TokenChunk, Trajectory

Headers = tuple[tuple[str, bytes], ...]

CONTENT_TYPE = b"application/vnd.streamrl+msgpack"
MAX_HEADER_BYTES = 512 << 10
_PREFIX = struct.Struct("<I")

MESSAGES: dict[str, type[Message]] = {
    message.SCHEMA: message
    for message in (WorkOrder, TokenChunk, Trajectory, StepReport, SkipRecord, Heartbeat, OperatorCommand)
}
CONTROL_SCHEMA = "control"
CONTROL_VERSION = WeightsReady.VERSION
_HEADER_FREE = {"step-report", "work-order"}
"""Schemas whose header may be as large as the whole message: they are written by our own trainer and dispatcher."""


def headers_of(message: Message | type[Message]) -> Headers:
    """The record headers that name a message's schema."""
    return (
        ("schema", message.SCHEMA.encode()),
        ("schema-version", str(message.VERSION).encode()),
        ("content-type", CONTENT_TYPE),
    )


_SCHEMA_BY_HEADERS = {headers_of(model): model.SCHEMA for model in MESSAGES.values()}
"""What our own writers send, so that the usual record needs one look-up."""


def encode(message: Message) -> bytes:
    """Serialise a message.

    Raises:
        FrameTooLarge: the frame would exceed ``MAX_BYTES`` of its schema.
    """
    fields = dict(message.__dict__)
    blobs = []
    for name in message.array_fields():
        array = fields.pop(name)
        fields[name] = array.size  # behind the plain fields, as the bytes are
        blobs.append(array if array.flags.c_contiguous else array.tobytes())
    header = msgpack.packb(fields, default=_fields_of)
    frame = b"".join((_PREFIX.pack(len(header)), header, *blobs))
    _check_sizes(message.SCHEMA, type(message).MAX_BYTES, len(frame), len(header))
    return frame


def decode(value: bytes | None, headers: Headers) -> Message:
    """Rebuild a message from a record's value and headers.

    Raises:
        UnknownSchema: the headers name no schema, or one that is not ours or is newer than ours.
        FrameTooLarge: a size exceeds what the schema allows.
        MalformedFrame: anything else; the text says which field.
    """
    schema = _schema_of(headers)
    model = MESSAGES.get(schema)
    limit = model.MAX_BYTES if model else Message.MAX_BYTES
    fields, body = _split(value, schema, limit)
    if model is None:
        return _validated(schema, control_adapter.validate_python, fields)
    _attach_arrays(schema, model, fields, body)
    return _validated(schema, model.model_validate, fields)


def _schema_of(headers: Headers) -> str:
    return _SCHEMA_BY_HEADERS.get(headers) or _named_schema(headers)


def _named_schema(headers: Headers) -> str:
    named = dict(headers)
    try:
        schema, version = named["schema"].decode(), int(named["schema-version"])
    except (KeyError, ValueError, AttributeError, TypeError) as error:
        raise UnknownSchema(f"expected headers 'schema' and 'schema-version', got {sorted(named)}") from error
    known = CONTROL_VERSION if schema == CONTROL_SCHEMA else getattr(MESSAGES.get(schema), "VERSION", None)
    if known is None or not 1 <= version <= known:
        raise UnknownSchema(f"expected one of {sorted([*MESSAGES, CONTROL_SCHEMA])}, got {schema!r} version {version}")
    return schema


def _split(value: bytes | None, schema: str, limit: int) -> tuple[dict[str, Any], memoryview]:
    if value is None or len(value) < _PREFIX.size:
        raise MalformedFrame(f"expected a {schema} frame, got {0 if value is None else len(value)} bytes")
    (header_size,) = _PREFIX.unpack_from(value)
    _check_sizes(schema, limit, len(value), header_size)
    header, body = value[_PREFIX.size : _PREFIX.size + header_size], memoryview(value)[_PREFIX.size + header_size :]
    if len(header) != header_size:
        raise MalformedFrame(f"expected a {schema} header of {header_size} bytes, got {len(header)}")
    try:
        fields = msgpack.unpackb(header, strict_map_key=True, ext_hook=_refuse_ext, timestamp=3)
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError, OverflowError) as error:
        raise MalformedFrame(f"expected a msgpack map as {schema} header, got: {error!r}") from error
    if not isinstance(fields, dict):
        raise MalformedFrame(f"expected a map as {schema} header, got {type(fields).__name__}")
    return fields, body


def _attach_arrays(schema: str, model: type[Message], fields: dict[str, Any], body: memoryview) -> None:
    position = 0
    for name, dtype in model.array_fields().items():
        count = fields.get(name)
        size = count * dtype.itemsize if type(count) is int else -1
        if size < 0 or position + size > len(body):
            raise MalformedFrame(f"expected the length of {schema}.{name} within the frame, got {count!r}")
        fields[name] = np.frombuffer(body, dtype, size // dtype.itemsize, position)
        position += size
    if position != len(body):
        raise MalformedFrame(f"expected {position} bytes of arrays after the {schema} header, got {len(body)}")


def _validated(schema: str, validate: Callable[[Any], Message], fields: dict[str, Any]) -> Message:
    try:
        return validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "record"
        raise MalformedFrame(f"{schema}.{where}: {first['msg']}") from error


def _check_sizes(schema: str, limit: int, frame_size: int, header_size: int) -> None:
    header_limit = limit if schema in _HEADER_FREE else min(limit, MAX_HEADER_BYTES)
    if frame_size > limit or header_size > header_limit:
        raise FrameTooLarge(
            f"expected a {schema} frame of at most {limit} bytes with a header of at most {header_limit}, "
            f"got {frame_size} with {header_size}"
        )


def _fields_of(part: Any) -> Any:
    if not isinstance(part, BaseModel):
        raise TypeError(f"expected a field that msgpack can carry, got {type(part).__name__}")
    return part.__dict__


def _refuse_ext(code: int, _data: bytes) -> Any:
    raise MalformedFrame(f"expected plain msgpack, got extension type {code}")
