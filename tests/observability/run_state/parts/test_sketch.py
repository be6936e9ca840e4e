import msgpack
import numpy as np
import pytest

from bus.port import Outgoing, Record
from observability.run_state.aggregates import PREVIEW, sketch_of
from schemas.codec import headers_of
from schemas.identifiers import PolicyVersion
from schemas.messages import Message
from tests.schemas.examples import examples, trajectory


def record(message: Message) -> Record:
    outgoing = Outgoing.of("run.trajectories", message, key="k")
    return Record(outgoing.topic, 3, 14, "k", outgoing.value, outgoing.headers, 1.0)


def test_a_sketch_says_what_the_whole_message_says() -> None:
    message = trajectory(7, completion_text="x" * 1000)
    sketch = sketch_of(record(message))
    assert sketch is not None
    assert (sketch.trajectory_id, sketch.worker_id) == (message.trajectory_id, message.worker_id)
    assert (sketch.length, sketch.predicted, sketch.bucket) == (7, 128, 2)
    assert (sketch.oldest, sketch.newest) == (message.oldest_version, message.newest_version)
    assert sketch.reward == 1.0
    assert (sketch.partition, sketch.offset) == (3, 14)
    assert len(sketch.completion) == PREVIEW + 1


def test_a_completion_without_tokens_has_the_version_it_was_admitted_with() -> None:
    sketch = sketch_of(record(trajectory(0, prompt_token_ids=np.zeros(0, np.int32), rewards={"accuracy": None})))
    assert sketch is not None
    assert sketch.oldest == PolicyVersion(1, 19)
    assert sketch.reward is None


def test_other_messages_and_rubbish_give_no_sketch() -> None:
    assert sketch_of(record(examples()["heartbeat"])) is None
    for value in (None, b"", b"\xff\xff\xff\xff", b"\x05\x00\x00\x00\x93not"):
        assert sketch_of(record(trajectory())._replace(value=value)) is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("trajectory_id", 7),
        ("bucket", -1),
        ("token_ids", "many"),
        ("rewards", {"accuracy": float("nan")}),
        ("finished_at", float("inf")),
        ("version_spans", [{"version": [1]}]),
        ("completion_text", None),
    ],
)
def test_a_field_of_the_wrong_kind_gives_no_sketch(field: str, value: object) -> None:
    whole = record(trajectory())
    assert whole.value is not None
    fields = msgpack.unpackb(whole.value[4 : 4 + int.from_bytes(whole.value[:4], "little")]) | {field: value}
    header = msgpack.packb(fields)
    spoilt = len(header).to_bytes(4, "little") + header
    assert sketch_of(whole._replace(value=spoilt, headers=headers_of(trajectory()))) is None
