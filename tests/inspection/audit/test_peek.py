import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.bus.port import Record
from streamrl.inspection.audit.columns import NameTable, keys_of, position_of
from streamrl.inspection.audit.index import ordered_ids_of
from streamrl.observability.record_index.entries import trajectory_id_of
from streamrl.schemas.codec import encode, headers_of
from streamrl.schemas.trajectories import Trajectory
from tests.consumers.factories import trajectory
from tests.inspection.test_auditing import order


def _record(value: bytes | None, message: object = Trajectory) -> Record:
    return Record("t", 0, 0, None, value, headers_of(message), 0.0)  # type: ignore[arg-type]


def _framed(header: bytes) -> bytes:
    return len(header).to_bytes(4, "little") + header


def test_the_name_is_the_one_that_the_decoder_finds() -> None:
    message = trajectory("d/7/1", 3)
    assert trajectory_id_of(_record(encode(message), message)) == message.trajectory_id


def test_the_ordered_names_are_those_of_the_order() -> None:
    message = order("d/7/1", 0, 5)
    assert ordered_ids_of(_record(encode(message), message)) == ["d/7/1/0", "d/7/1/5"]
    assert ordered_ids_of(_record(b"junk", message)) == []


@pytest.mark.parametrize(
    "value",
    [
        None,
        b"",
        b"\xff\xff\xff\xff",
        _framed(b"\x93\x01\x02\x03"),
        _framed(b"\x81"),
        _framed(b"\x91" * 5000),
        _framed(b"\x81\xa1x" + b"\x91" * 5000),
        _framed(msgpack.packb({"trajectory_id": 7})),
        _framed(msgpack.packb({"trajectory_id": ""})),
        _framed(msgpack.packb({"trajectory_id": "x" * 300})),
        _framed(msgpack.packb({1: 2})),
        _framed(b"\xdf\xff\xff\xff\xff"),
    ],
)
def test_other_bytes_have_no_name(value: bytes | None) -> None:
    assert trajectory_id_of(_record(value)) is None


def test_a_record_of_another_kind_has_no_name() -> None:
    message = trajectory()
    assert trajectory_id_of(Record("t", 0, 0, None, encode(message), (), 0.0)) is None


@given(st.binary(max_size=300))
def test_any_bytes_are_looked_at_without_an_error(value: bytes) -> None:
    trajectory_id_of(_record(value))
    trajectory_id_of(_record(_framed(value)))


@given(st.lists(st.none() | st.text(min_size=1, max_size=12).filter(lambda text: "\ud800" not in text)))
def test_names_come_back_as_they_were(names: list[str | None]) -> None:
    kept = NameTable()
    for name in names:
        kept.append(name)
    assert [kept[index] for index in range(len(names))] == names
    assert len({int(number) for number in kept.hashes()}) == len(set(names))


@given(st.integers(0, 10_000), st.integers(0, 2**43))
def test_a_place_comes_back_from_its_number(partition: int, offset: int) -> None:
    import numpy as np

    (key,) = keys_of(np.array([partition]), np.array([offset]))
    assert position_of(int(key)) == (partition, offset)
