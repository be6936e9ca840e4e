import pytest

from streamrl.bus.port import Outgoing, Record
from streamrl.observability.record_index.entries import (
    WHOLE_GROUP,
    Fold,
    Rows,
    joined_name,
    position_in,
    split_name,
)
from streamrl.schemas.codec import headers_of
from streamrl.schemas.topics import HEARTBEATS
from streamrl.schemas.trajectories import Trajectory
from tests.schemas.examples import examples


def record(value: bytes | None) -> Record:
    return Record("t", 0, 0, None, value, headers_of(Trajectory), 0.0)


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
def test_a_header_without_a_position_gives_none(content: bytes | None) -> None:
    assert position_in(content) is None


def test_weights_held_by_workers_of_an_arm_are_not_taken_for_served_ones() -> None:
    rows, topic = Rows(), HEARTBEATS.full_name("r")
    for policy in ("", "rloo-1"):
        out = Outgoing.of(topic, examples()["heartbeat"].replace(worker_id=f"of-{policy}", policy=policy), key="w")
        Fold("r").add(Record(topic, 0, 0, out.key, out.value, out.headers, 0.0), rows)
    assert [row.worker for row in rows.weights] == ["of-"]
