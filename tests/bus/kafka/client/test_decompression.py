import gzip

import cramjam
import pytest
from aiokafka.codec import gzip_encode, lz4_encode, snappy_encode, zstd_encode
from hypothesis import given
from hypothesis import strategies as st

from bus.kafka.records import Undecodable, decompressed

ENCODERS = {1: gzip_encode, 2: snappy_encode, 3: lz4_encode, 4: zstd_encode}


@pytest.mark.parametrize("codec", ENCODERS)
@given(data=st.binary(max_size=2000), times=st.integers(1, 200))
def test_what_the_client_compresses_comes_back(codec: int, data: bytes, times: int) -> None:
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
