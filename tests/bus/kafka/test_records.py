import gzip
import struct

import cramjam
import pytest
from aiokafka.codec import gzip_encode, lz4_encode, snappy_encode, zstd_encode
from aiokafka.errors import CorruptRecordException
from aiokafka.record.memory_records import MemoryRecords
from hypothesis import given
from hypothesis import strategies as st

from streamrl.bus.kafka.records import LARGEST_UNCOMPRESSED, SafeRecords, Undecodable, decompressed
from tests.fuzz.bombs import based_at, batch

ENCODERS = {1: gzip_encode, 2: snappy_encode, 3: lz4_encode, 4: zstd_encode}


def values(records: object) -> list[tuple[int, bytes | None]]:
    found = []
    while records.has_next():  # type: ignore[attr-defined]
        for record in records.next_batch():  # type: ignore[attr-defined]
            found.append((record.offset, record.value))
    return found


@pytest.mark.parametrize("codec", range(5))
def test_sound_batches_read_as_aiokafka_itself_reads_them(codec: int) -> None:
    data = batch(b"a", None, b"c" * 1000, codec=codec, headers=[("h", b"v"), ("n", None)])
    data += based_at(3, batch(b"d", codec=codec))
    assert (
        values(SafeRecords(data)) == values(MemoryRecords(data)) == [(0, b"a"), (1, None), (2, b"c" * 1000), (3, b"d")]
    )


def test_a_batch_cut_off_at_the_end_of_a_fetch_is_left_for_the_next() -> None:
    data = batch(b"a") + based_at(1, batch(b"b"))
    for cut in range(1, len(batch(b"b"))):
        assert values(SafeRecords(data[:-cut])) == [(0, b"a")]


def test_a_fetch_ends_early_where_it_would_take_too_much_memory_and_the_next_one_goes_on() -> None:
    large = batch(bytes(LARGEST_UNCOMPRESSED // 2 + 1000), codec=4)
    data = large + based_at(1, large)
    assert [offset for offset, _ in values(SafeRecords(data))] == [0]
    assert [offset for offset, _ in values(SafeRecords(data[len(large) :]))] == [1]


def test_damage_raises_the_first_time_and_is_delivered_the_second() -> None:
    damaged = bytearray(batch(b"damaged only in this test"))
    damaged[-2] ^= 1
    with pytest.raises(CorruptRecordException):
        SafeRecords(bytes(damaged)).next_batch().validate_crc()  # type: ignore[union-attr]
    again = SafeRecords(bytes(damaged)).next_batch()
    assert again is not None
    assert again.validate_crc()
    (record,) = again
    assert (record.offset, record.value) == (0, None)
    assert b"checksum" in dict(record.headers)["unreadable"]


def test_an_old_format_is_one_unreadable_record() -> None:
    old = bytearray(batch(b"x"))
    old[16] = 1
    (record,) = SafeRecords(bytes(old)).next_batch()  # type: ignore[misc]
    assert b"format 2" in dict(record.headers)["unreadable"]


@pytest.mark.parametrize("length", [-(2**31), -1, 0, 5, 2**31 - 1])
def test_a_length_that_leads_nowhere_ends_the_reading(length: int) -> None:
    data = struct.pack(">qi", 0, length) + bytes(100)
    assert len(values(SafeRecords(data))) <= len(data)


@pytest.mark.parametrize("codec", ENCODERS)
@given(data=st.binary(max_size=2000), times=st.integers(1, 200))
def test_compressed_records_are_decompressed_unchanged(codec: int, data: bytes, times: int) -> None:
    whole = data * times
    assert decompressed(codec, ENCODERS[codec](whole), max(1, len(whole))) == whole


def test_raw_snappy_and_gzip_of_several_members_come_back() -> None:
    assert decompressed(2, bytes(cramjam.snappy.compress_raw(b"abc" * 100)), 300) == b"abc" * 100
    assert decompressed(1, gzip.compress(b"abc") + gzip.compress(b"def"), 6) == b"abcdef"


@pytest.mark.parametrize("codec", ENCODERS)
def test_one_byte_more_than_allowed_is_refused(codec: int) -> None:
    data = ENCODERS[codec](bytes(100_000))
    assert len(decompressed(codec, data, 100_000)) == 100_000
    with pytest.raises(Undecodable, match="at most 99999 bytes"):
        decompressed(codec, data, 99_999)


@pytest.mark.parametrize("codec", ENCODERS)
def test_data_cut_short_is_refused(codec: int) -> None:
    data = ENCODERS[codec](bytes(range(256)) * 40)
    with pytest.raises(Undecodable):
        decompressed(codec, data[: len(data) // 2], 1 << 20)


@pytest.mark.parametrize("codec", [0, 5, 6, 7])
def test_codecs_that_do_not_exist_are_refused(codec: int) -> None:
    with pytest.raises(Undecodable, match=f"got {codec}"):
        decompressed(codec, b"", 1)
