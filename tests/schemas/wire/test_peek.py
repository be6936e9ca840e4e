"""A look into a frame's header, without the rest of it."""

import msgpack
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from streamrl.schemas.codec import encode, headers_of, peek, peek_trajectory_id
from streamrl.schemas.trajectories import Trajectory, WorkOrder
from tests.consumers.factories import trajectory

HEADERS = headers_of(Trajectory)


def framed(header: bytes) -> bytes:
    return len(header).to_bytes(4, "little") + header


def by_fields(value: bytes | None) -> object:
    """The longer way to an id, which stops at no particular place."""
    return peek(value, HEADERS, Trajectory.SCHEMA, ("trajectory_id",)).get("trajectory_id")


@settings(max_examples=40, deadline=None)
@given(st.text(max_size=80))
@example("d" * 31)
@example("d" * 32)
def test_the_id_is_the_one_that_the_decoder_finds(name: str) -> None:
    name = name.encode(errors="ignore").decode() or "d"
    value = encode(trajectory(trajectory_id=name))
    assert peek_trajectory_id(value, HEADERS) == by_fields(value) == name


@given(st.integers(0, 400), st.binary(max_size=6))
def test_damage_is_read_alike_on_both_ways(place: int, bytes_: bytes) -> None:
    value = encode(trajectory())
    place %= len(value)
    damaged = value[:place] + bytes_ + value[place + len(bytes_) :]
    found, expected = peek_trajectory_id(damaged, HEADERS), by_fields(damaged)
    # Behind the id the frame may be damaged in any way: neither looks there.
    assert found == (expected if isinstance(expected, str) and 0 < len(expected) <= 256 else None)


@pytest.mark.parametrize(
    "value",
    [
        None,
        b"",
        b"\xff\xff",
        b"\xff\xff\xff\xff",
        (1 << 31).to_bytes(4, "little") + b"\xde",
        framed(b"\x93\x01\x02\x03"),
        framed(b"\x81"),
        framed(b"\x91" * 5000),
        framed(b"\x81\xa1x" + b"\x91" * 5000),
        framed(msgpack.packb({"trajectory_id": 7})),
        framed(msgpack.packb({"trajectory_id": ""})),
        framed(msgpack.packb({"trajectory_id": "x" * 300})),
        framed(msgpack.packb({1: 2})),
        framed(b"\xdf\xff\xff\xff\xff"),
    ],
)
def test_other_bytes_have_no_id(value: bytes | None) -> None:
    assert peek_trajectory_id(value, HEADERS) is None


def test_a_frame_of_another_writer_is_read_too() -> None:
    assert peek_trajectory_id(framed(msgpack.packb({"trajectory_id": "a/0/0/1"})), HEADERS) == "a/0/0/1"


def test_a_record_of_another_kind_has_no_id() -> None:
    value = encode(trajectory())
    assert peek_trajectory_id(value, ()) is None
    assert peek_trajectory_id(value, headers_of(WorkOrder)) is None


@given(st.binary(max_size=300))
def test_any_bytes_are_looked_at_without_an_error(value: bytes) -> None:
    peek_trajectory_id(value, HEADERS)
    peek_trajectory_id(framed(value), HEADERS)
