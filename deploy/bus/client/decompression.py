"""Decompression that stops at a size, for what strangers compressed. Knows nothing of records.

Invariant: at most ``limit`` bytes are produced, and few more are ever held.
"""

import struct
import zlib
from collections.abc import Callable, Iterator

import cramjam

GZIP, SNAPPY, LZ4, ZSTD = 1, 2, 3, 4
"""Kafka's numbers."""
_SMALLEST_BUFFER = 64 << 10
_GROWTH = 8
_XERIAL_MAGIC = b"\x82SNAPPY\x00"
_XERIAL_HEADER = 16
_FULL = "failed to write whole buffer"


class Undecodable(ValueError):
    """The bytes are not what the codec promises, or too many."""


def decompressed(codec: int, data: bytes, limit: int) -> bytes:
    """The bytes behind ``data``.

    Raises:
        Undecodable: no such codec, damaged data, or more than ``limit`` bytes.
    """
    decode = _DECODERS.get(codec)
    if decode is None:
        raise Undecodable(f"expected a compression codec of {sorted(_DECODERS)}, got {codec}")
    try:
        return decode(data, limit)
    except (cramjam.DecompressionError, zlib.error, struct.error) as error:
        raise Undecodable(f"expected data of compression codec {codec}, got: {error}") from error


def _too_large(limit: int) -> Undecodable:
    return Undecodable(f"expected at most {limit} bytes after decompression, got more")


def _gunzip(data: bytes, limit: int) -> bytes:
    parts, room = [], limit
    while data:
        member = zlib.decompressobj(wbits=31)
        parts.append(member.decompress(data, room + 1))
        room -= len(parts[-1])
        if room < 0:
            raise _too_large(limit)
        if not member.eof:
            raise Undecodable("expected a whole gzip member, got a part of one")
        data = member.unused_data
    return b"".join(parts)


def _unsnap(data: bytes, limit: int) -> bytes:
    parts, room = [], limit
    for block in _snappy_blocks(data):
        room -= cramjam.snappy.decompress_raw_len(block)
        if room < 0:
            raise _too_large(limit)
        parts.append(bytes(cramjam.snappy.decompress_raw(block)))
    return b"".join(parts)


def _snappy_blocks(data: bytes) -> Iterator[bytes]:
    if not data.startswith(_XERIAL_MAGIC):
        yield data
        return
    position = _XERIAL_HEADER
    while position < len(data):
        (size,) = struct.unpack_from(">i", data, position)
        position += 4
        if not 0 < size <= len(data) - position:
            raise Undecodable(f"expected a snappy block within {len(data)} bytes, got one of {size}")
        yield data[position : position + size]
        position += size


def _into_growing_buffers(decode_into: Callable[[bytes, bytearray], int]) -> Callable[[bytes, int], bytes]:
    def decode(data: bytes, limit: int) -> bytes:
        size = min(limit, max(_SMALLEST_BUFFER, len(data) * _GROWTH))
        while True:
            buffer = bytearray(size)
            try:
                written = decode_into(data, buffer)
            except cramjam.DecompressionError as error:
                if _FULL not in str(error):
                    raise
                if size == limit:
                    raise _too_large(limit) from error
                size = min(limit, size * _GROWTH)
            else:
                return bytes(memoryview(buffer)[:written])

    return decode


_DECODERS: dict[int, Callable[[bytes, int], bytes]] = {
    GZIP: _gunzip,
    SNAPPY: _unsnap,
    LZ4: _into_growing_buffers(cramjam.lz4.decompress_into),
    ZSTD: _into_growing_buffers(cramjam.zstd.decompress_into),
}
