"""Counts the values in msgpack bytes before any is made: one byte on the wire becomes up to two hundred in memory."""

import msgpack

from schemas.errors import FrameTooLarge

_ARRAY_16, _ARRAY_32, _MAP_16, _MAP_32 = 0xDC, 0xDD, 0xDE, 0xDF


def refuse_many_items(data: bytes, limit: int) -> None:
    """Walk over the bytes without keeping anything.

    Raises:
        FrameTooLarge: there are more than ``limit`` values, each key and each value in a container counted.
        ValueError, IndexError, msgpack.UnpackException: the bytes are not msgpack.
    """
    unpacker = msgpack.Unpacker(max_buffer_size=len(data))
    unpacker.feed(data)
    seen, to_come = 0, 1
    while to_come:
        first = data[unpacker.tell()]
        if 0x90 <= first <= 0x9F or first in (_ARRAY_16, _ARRAY_32):
            to_come += unpacker.read_array_header()
        elif 0x80 <= first <= 0x8F or first in (_MAP_16, _MAP_32):
            to_come += 2 * unpacker.read_map_header()
        else:
            unpacker.skip()
        seen, to_come = seen + 1, to_come - 1
        if seen + to_come > limit:
            raise FrameTooLarge(f"expected at most {limit} values in a header, got {seen + to_come} or more")
