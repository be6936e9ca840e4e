"""Makes fetched record batches safe to iterate. Knows neither topics nor consumers.

Invariants:
- iterating a batch never raises. Each offset that cannot be read gives a record without a value, with the reason in a
  header, so that every offset is accounted for;
- only damage that is seen for the first time raises. The bytes are then fetched again, which shows whether the damage
  happened in transfer or is stored on the broker;
- memory is bounded: decompression stops at a size, and headers are counted before they are made.

``SafeRecords`` replaces aiokafka's ``MemoryRecords`` for all consumers of the process
(``aiokafka_internals.replace_record_reader``). The decompression of ``MemoryRecords`` has no bound, and an error in one
record would stop its consumer there for ever.
"""

import struct
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import cramjam
import xxhash
from aiokafka.errors import CorruptRecordException, KafkaError
from aiokafka.record.default_records import DefaultRecordBatch
from cachetools import LRUCache

from streamrl.schemas.codec import UNREADABLE_HEADER

LARGEST_UNCOMPRESSED = 20 << 20
"""Most bytes of one batch, and of all compressed batches in one fetch of a partition; above every topic's own limit."""
LARGEST_UNCHECKED = 1 << 20
"""Bytes up to which the headers of a batch are not counted first: two bytes on the wire become sixty in memory."""
MAX_HEADERS = 256
"""Most headers of one record."""
MAX_RECORDS = 100_000
"""Most records of one batch that is large enough to be counted."""

# A record batch of the second format (KIP-98), up to its records. The first two fields frame it: base offset, and the
# number of bytes that follow. Then leader epoch, magic, CRC, attributes, last offset delta, first and last timestamp,
# producer id, producer epoch, base sequence, number of records.
_FRAME = struct.Struct(">qi")
_HEADER = struct.Struct(">qiibIhiqqqhii")
_MAGIC_AT, _ATTRIBUTES_AT = 16, 21
_CODEC, _TRANSACTIONAL, _CONTROL = 0x07, 0x10, 0x20  # bits of the attributes
GZIP, SNAPPY, LZ4, ZSTD = 1, 2, 3, 4
"""Kafka's numbers for the codecs."""


class Undecodable(ValueError):
    """The bytes do not follow the codec's format, or are too many."""


# All errors that reading a hostile batch may raise, in the library or below.
_PROBLEMS = (KafkaError, Undecodable, ValueError, IndexError, TypeError, OverflowError, struct.error)


class SafeRecords:
    """The fetched bytes of a partition, with the methods of ``MemoryRecords`` that aiokafka's fetcher uses.

    It ends early if the next batch would exceed the memory limit of a fetch. The next fetch then starts with that
    batch.
    """

    def __init__(self, data: bytes) -> None:
        self._rest = memoryview(data)
        self._size = len(data)
        self._room = LARGEST_UNCOMPRESSED
        self._next = self._cut()

    def size_in_bytes(self) -> int:
        """Number of fetched bytes."""
        return self._size

    def has_next(self) -> bool:
        """Whether there is another batch."""
        return self._next is not None

    def next_batch(self) -> "SafeBatch | None":
        """The next batch, or None after the last one."""
        batch, self._next = self._next, None
        if batch is not None:
            self._next = self._cut()
        return batch

    def _cut(self) -> "SafeBatch | None":
        if len(self._rest) < _FRAME.size:
            return None
        # A broker cuts a fetch at its limit of bytes, so the last batch may be incomplete. That is no damage.
        end = _FRAME.size + _FRAME.unpack_from(self._rest)[1]
        if not _FRAME.size <= end <= len(self._rest):
            return None
        batch = SafeBatch(self._rest[:end], self._room)
        if batch.damaged and self._room < LARGEST_UNCOMPRESSED:
            return None  # perhaps only for lack of room: the next fetch starts with this batch
        self._room -= batch.size
        self._rest = self._rest[end:]
        return batch


class SafeBatch:
    """One batch, with the methods that aiokafka's fetcher uses. ``room``: most bytes that it may decompress to."""

    def __init__(self, data: memoryview, room: int) -> None:
        self._data = data
        self._records: Any = None
        self._reason: str | None = None
        self._timestamp = 0
        self._may_be_transfer_damage = False
        self.size = 0
        self.producer_id: int | None = None
        self.is_transactional = self.is_control_batch = False
        self.base_offset: int = _FRAME.unpack_from(data)[0]
        self.next_offset = self.base_offset + 1
        try:
            self._open(room)
        except _PROBLEMS as error:
            self._reason = f"expected a record batch at offset {self.base_offset}, got: {error}"

    def _open(self, room: int) -> None:
        if len(self._data) < _HEADER.size or self._data[_MAGIC_AT] != 2:
            raise Undecodable(f"{len(self._data)} bytes that are no batch of format 2")
        fields = _HEADER.unpack_from(self._data)
        attributes, last, count = fields[5], fields[6], fields[12]
        batch = DefaultRecordBatch(self._data)
        intact = batch.validate_crc()
        # An intact batch may hold fewer records than offsets, since compaction removes some. A damaged batch's last
        # offset is trusted only if the number of records agrees. Otherwise the batch covers only its first offset.
        if last >= 0 and (intact or last + 1 == count):
            self.next_offset = self.base_offset + last + 1
        if not intact:
            self._may_be_transfer_damage = True
            raise Undecodable("damaged bytes, the checksum differs")
        self._timestamp, self.producer_id = fields[8], fields[9]
        self.is_transactional = bool(attributes & _TRANSACTIONAL)
        plain = self._data
        if attributes & _CODEC:
            plain = self._decompressed(attributes, room)
        if len(plain) > LARGEST_UNCHECKED:
            refuse_too_many_headers(plain[_HEADER.size :], count)
        self._records = iter(DefaultRecordBatch(plain))
        self.is_control_batch = bool(attributes & _CONTROL)

    def _decompressed(self, attributes: int, room: int) -> memoryview:
        """The same batch without compression."""
        payload = decompressed(attributes & _CODEC, bytes(self._data[_HEADER.size :]), room)
        self.size = len(payload)
        head = bytearray(self._data[: _HEADER.size])
        # The length field counts the bytes after the frame. The checksum is not updated: it was already compared.
        struct.pack_into(">i", head, 8, _HEADER.size - _FRAME.size + len(payload))
        struct.pack_into(">h", head, _ATTRIBUTES_AT, attributes & ~_CODEC)
        return memoryview(b"".join((head, payload)))

    @property
    def damaged(self) -> bool:
        """Whether the whole batch cannot be read."""
        return self._records is None

    def validate_crc(self) -> bool:
        """Always True, because damage is delivered as unreadable records. Raises for damage that is seen first now."""
        if self._may_be_transfer_damage and _seen_first(self._data):
            raise CorruptRecordException(self._reason)
        return True

    # The fetcher reads a control batch this way, to see whether it commits or aborts a transaction.
    def __next__(self) -> Any:
        return next(self._records)

    def __iter__(self) -> Iterator[Any]:
        offset = self.base_offset
        try:
            while self._records is not None and (record := next(self._records, None)) is not None:
                if len(record.headers) > MAX_HEADERS:
                    reason = f"expected at most {MAX_HEADERS} headers, got {len(record.headers)}"
                    record = Unreadable.because(record.offset, reason, self._timestamp)
                offset = record.offset + 1
                yield record
        except _PROBLEMS as error:
            self._reason = f"expected a record at offset {offset}, got: {error}"
        if self._reason is not None:
            # A record for each remaining offset of the batch. Without them, a reader would not learn of the loss.
            for missing in range(offset, self.next_offset):
                yield Unreadable.because(missing, self._reason, self._timestamp)


# Digests of damaged batches that were fetched once. A dropped entry costs one more fetch.
_damaged_once: LRUCache[int, None] = LRUCache(maxsize=64)


def _seen_first(data: memoryview) -> bool:
    key = xxhash.xxh3_64_intdigest(data)
    first = key not in _damaged_once
    _damaged_once[key] = None
    return first


class Unreadable(NamedTuple):
    """Replaces a record that cannot be read; has the fields from which aiokafka makes its own records."""

    offset: int
    headers: tuple[tuple[str, bytes], ...]
    timestamp: int
    timestamp_type: int = 0
    key: None = None
    value: None = None
    checksum: None = None

    @classmethod
    def because(cls, offset: int, reason: str, timestamp: int = 0) -> "Unreadable":
        """A record with the reason in its header; ``timestamp`` in ms, 0 if it is unknown."""
        return cls(offset, ((UNREADABLE_HEADER, reason.encode()),), max(0, timestamp))


def refuse_too_many_headers(records: memoryview, count: int) -> None:
    """Check the numbers of records and headers in a batch without making any. Each record gives both its numbers.

    Raises:
        Undecodable: a record has more than ``MAX_HEADERS``, or the batch has more than ``MAX_RECORDS`` records.
        IndexError: a length leads out of the batch.
    """
    if count > MAX_RECORDS:
        raise Undecodable(f"expected at most {MAX_RECORDS} records in a batch of {len(records)} bytes, got {count}")
    position = 0
    for _ in range(count):
        length, position = _varint(records, position)
        end = position + length
        headers = _count(records, position + 1)  # one byte of attributes comes first
        if headers > MAX_HEADERS:
            raise Undecodable(f"expected at most {MAX_HEADERS} headers of a record, got {headers}")
        if not position < end <= len(records):
            raise Undecodable(f"expected a record within {len(records)} bytes, got one that ends at {end}")
        position = end


def _count(records: memoryview, position: int) -> int:
    for _ in ("timestamp", "offset"):
        _, position = _varint(records, position)
    for _ in ("key", "value"):
        size, position = _varint(records, position)
        position += max(0, size)
    return _varint(records, position)[0]


def _varint(data: memoryview, position: int) -> tuple[int, int]:
    """A number in zigzag encoding, and the position after it."""
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            # Zigzag: 0, 1, 2, 3 mean 0, -1, 1, -2, so that small negative numbers stay short.
            return (value >> 1) ^ -(value & 1), position
        shift += 7
        if shift > 63:
            raise Undecodable("expected a number of at most ten bytes, got a longer one")


# --- Decompression: at most ``limit`` bytes are produced, and few more are ever held ---------------------------------

# The decompressed size of LZ4 and Zstandard data is not known in advance. The buffer starts at eight times the data and
# grows eightfold when it is too small. Each attempt decompresses from the start, so large steps keep attempts few.
_SMALLEST_BUFFER = 64 << 10
_GROWTH = 8
_BUFFER_TOO_SMALL = "failed to write whole buffer"  # cramjam has no class for this error
_XERIAL_MAGIC = b"\x82SNAPPY\x00"  # Java's framing of Snappy: a header, then blocks with their lengths
_XERIAL_HEADER = 16


def decompressed(codec: int, data: bytes, limit: int) -> bytes:
    """The decompressed bytes of ``data``.

    Raises:
        Undecodable: the codec is unknown, the data is damaged, or the result exceeds ``limit`` bytes.
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
        # 31: 16 for a gzip header and 15 for the largest window. One byte more than allowed shows an excess.
        member = zlib.decompressobj(wbits=31)
        parts.append(member.decompress(data, room + 1))
        room -= len(parts[-1])
        if room < 0:
            raise _too_large(limit)
        if not member.eof:
            raise Undecodable("expected a complete gzip member, got a part of one")
        data = member.unused_data
    return b"".join(parts)


def _unsnap(data: bytes, limit: int) -> bytes:
    parts, room = [], limit
    for block in _snappy_blocks(data):
        # A block starts with its length, so a block that is too large is refused before decompression.
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
                if _BUFFER_TOO_SMALL not in str(error):
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
