import struct

import msgpack
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from streamrl.bus.port import Outgoing, Record
from streamrl.observability.record_index.entries import (
    WHOLE_GROUP,
    Fold,
    Rows,
    joined_name,
    name_of,
    position_in,
    split_name,
    trajectory_id_of,
)
from streamrl.schemas.codec import encode, headers_of
from streamrl.schemas.topics import HEARTBEATS
from streamrl.schemas.trajectories import Trajectory
from tests.consumers.factories import trajectory
from tests.schemas.examples import examples


def record(value: bytes | None) -> Record:
    return Record("t", 0, 0, None, value, headers_of(Trajectory), 0.0)


@settings(max_examples=40, deadline=None)
@given(st.text(max_size=80))
@example("d" * 31)
@example("d" * 32)
def test_an_id_is_read_as_the_audit_reads_it(name: str) -> None:
    name = name.encode(errors="ignore").decode() or "d"
    value = encode(trajectory(trajectory_id=name))
    assert name_of(record(value)) == trajectory_id_of(record(value)) == name


@given(st.integers(0, 400), st.binary(max_size=6))
def test_damage_is_read_as_the_audit_reads_it(place: int, bytes_: bytes) -> None:
    value = encode(trajectory())
    place %= len(value)
    damaged = value[:place] + bytes_ + value[place + len(bytes_) :]
    found, expected = name_of(record(damaged)), trajectory_id_of(record(damaged))
    # Behind the id the frame may be damaged in any way: the audit does not look there either.
    assert found == expected


@pytest.mark.parametrize("value", [None, b"", b"\xff\xff", struct.pack("<I", 1 << 31) + b"\xde"])
def test_what_is_no_trajectory_has_no_name(value: bytes | None) -> None:
    assert name_of(record(value)) is None


def test_an_older_frame_is_read_too() -> None:
    header = msgpack.packb({"trajectory_id": "a/0/0/1", "group_id": "a/0/0"})
    assert name_of(record(struct.pack("<I", len(header)) + header)) == "a/0/0/1"


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("d/7/0/3", ("d/7/0", 3)),
        ("d/7/0/03", ("d/7/0/03", WHOLE_GROUP)),
        ("alone", ("alone", WHOLE_GROUP)),
        ("/3", ("/3", WHOLE_GROUP)),
        ("d/²", ("d/²", WHOLE_GROUP)),
        ("d/" + "9" * 40, ("d/" + "9" * 40, WHOLE_GROUP)),
    ],
)
def test_a_name_and_its_parts(name: str, parts: tuple[str, int]) -> None:
    assert split_name(name) == parts
    assert joined_name(*parts) == name


@pytest.mark.parametrize("content", [None, b"", b"1", b"1@", b"@1", b"\xff@1", b"-1@2", b"1@" + b"9" * 30])
def test_a_header_that_tells_no_position(content: bytes | None) -> None:
    assert position_in(content) is None


def test_what_workers_of_an_arm_hold_is_not_taken_for_served_weights() -> None:
    rows, topic = Rows(), HEARTBEATS.full_name("r")
    for policy in ("", "rloo-1"):
        out = Outgoing.of(topic, examples()["heartbeat"].replace(worker_id=f"of-{policy}", policy=policy), key="w")
        Fold("r").add(Record(topic, 0, 0, out.key, out.value, out.headers, 0.0), rows)
    assert [row.worker for row in rows.weights] == ["of-"]
