"""Reads single fields of a frame's header without decoding the rest, for looking at very many records.

Whether the whole record is sound is not its business: a name read here may stand in bytes that the intake refuses.
"""

import struct
from collections.abc import Collection
from typing import Any

import msgpack

from schemas.ports.bus import Record
from schemas.wire.codec import MAX_HEADER_BYTES

_PREFIX = struct.Struct("<I")
_NAME_LIMIT = 256
_ORDER_LIMIT = 4 << 20


def trajectory_id_of(record: Record) -> str | None:
    """The trajectory's name; None if the bytes do not begin as a trajectory's do."""
    name = _fields(record, b"trajectory", ("trajectory_id",), MAX_HEADER_BYTES).get("trajectory_id")
    return name if isinstance(name, str) and 0 < len(name) <= _NAME_LIMIT else None


def ordered_ids_of(record: Record) -> list[str]:
    """Names of the trajectories that a work order asks for; none if it is no work order."""
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
    if size > min(limit, len(value) - _PREFIX.size):
        return {}
    unpacker = msgpack.Unpacker(max_buffer_size=limit, strict_map_key=True)
    unpacker.feed(memoryview(value)[_PREFIX.size : _PREFIX.size + size])
    found: dict[str, Any] = {}
    try:
        for _ in range(unpacker.read_map_header()):
            if (name := unpacker.unpack()) in wanted:
                found[name] = unpacker.unpack()
                if len(found) == len(wanted):
                    break
            else:
                unpacker.skip()
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError, OverflowError):
        return {}
    return found
