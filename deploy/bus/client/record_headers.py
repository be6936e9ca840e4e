"""Counts the headers of records before anything is made of them: two bytes on the wire become sixty in memory."""

from deploy.bus.client.decompression import Undecodable

MAX_HEADERS = 256
"""Of one record."""
MAX_RECORDS = 100_000
"""In one batch that is large enough to be counted."""


def refuse_many_headers(records: memoryview, count: int) -> None:
    """Walk over the records of a batch, each of which names its length and its number of headers.

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
        headers = _count(records, position + 1)
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
    """A number in zigzag encoding, and where it ends."""
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return (value >> 1) ^ -(value & 1), position
        shift += 7
        if shift > 63:
            raise Undecodable("expected a number of at most ten bytes, got a longer one")
