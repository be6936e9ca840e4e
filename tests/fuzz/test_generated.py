"""Generated and mutated inputs end as the targets say: in a message, or in the one error that is meant for it."""

import random
import struct

import pytest
from aiokafka.record.util import calc_crc32c
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.bombs import based_at, batch
from tests.fuzz.corpus import seeds
from tests.fuzz.targets import TARGETS, batches

EXAMPLES = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
SEEDS = seeds()


@pytest.mark.parametrize("target", TARGETS)
@EXAMPLES
@given(data=st.binary(max_size=400))
def test_arbitrary_bytes(target: str, data: bytes) -> None:
    TARGETS[target](data)


@pytest.mark.parametrize("target", TARGETS)
@EXAMPLES
@given(choice=st.data())
def test_seeds_with_bytes_changed_cut_and_repeated(target: str, choice: st.DataObject) -> None:
    data = bytearray(choice.draw(st.sampled_from(SEEDS[target])))
    for _ in range(choice.draw(st.integers(1, 4))):
        place = choice.draw(st.integers(0, max(0, len(data) - 1)))
        match choice.draw(st.sampled_from(["set", "cut", "insert", "repeat", "extremes"])):
            case "set" if data:
                data[place] = choice.draw(st.integers(0, 255))
            case "cut":
                del data[place : place + choice.draw(st.integers(1, 40))]
            case "insert":
                data[place:place] = choice.draw(st.binary(max_size=20))
            case "repeat":
                data[place:place] = data[place : place + 64]
            case "extremes":
                extreme = choice.draw(st.sampled_from([0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF]))
                data[place : place + 4] = struct.pack(choice.draw(st.sampled_from(["<I", ">I"])), extreme)
    TARGETS[target](bytes(data))


def signed(data: bytes) -> bytes:
    """With the checksum made right, so that what is wrong lies deeper."""
    changed = bytearray(data)
    struct.pack_into(">I", changed, 17, calc_crc32c(bytes(changed[21:])))
    return bytes(changed)


@pytest.mark.parametrize("codec", range(8))
def test_every_byte_of_a_batch_changed_under_a_right_checksum(codec: int) -> None:
    good = batch(b"first", None, b"third" * 20, codec=codec if codec < 5 else 0, headers=[("name", b"value")])
    for place in range(21, len(good)):
        for change in (0x01, 0x07, 0x80, 0xFF):
            data = bytearray(good)
            data[place] ^= change
            batches(signed(bytes(data)))


def test_an_unknown_codec_makes_one_unreadable_record_of_each_offset() -> None:
    data = bytearray(batch(b"a", b"b", b"c"))
    data[22] |= 0x06
    assert batches(signed(bytes(data))) == "3 records, 3 of them unreadable"


def test_damage_is_asked_for_again_and_then_delivered_as_unreadable_and_its_neighbours_are_read() -> None:
    damaged = bytearray(based_at(1, batch(b"damaged %d" % random.randrange(10**9), b"x")))
    damaged[-3] ^= 0xFF
    data = batch(b"before") + bytes(damaged) + based_at(3, batch(b"after"))
    assert batches(data) == "4 records, 2 of them unreadable"
