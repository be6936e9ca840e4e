import itertools

import msgpack
import numpy as np
import pytest

from streamrl.bus.port import Outgoing, Record
from streamrl.observability.run_state.trajectory_summary import MOST, NEWEST, PREVIEW, sampled, summary_of
from streamrl.schemas.codec import headers_of
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.messages import Message
from tests.schemas.examples import examples, trajectory


def record(message: Message) -> Record:
    outgoing = Outgoing.of("run.trajectories", message, key="k")
    return Record(outgoing.topic, 3, 14, "k", outgoing.value, outgoing.headers, 1.0)


def test_a_summary_says_what_the_whole_message_says() -> None:
    message = trajectory(7, completion_text="x" * 1000)
    summary = summary_of(record(message), {})
    assert summary is not None
    assert (summary.trajectory_id, summary.worker_id) == (message.trajectory_id, message.worker_id)
    assert (summary.length, summary.predicted, summary.bucket) == (7, 128, 2)
    assert (summary.oldest, summary.newest) == (message.oldest_version, message.newest_version)
    assert summary.reward == 1.0
    assert (summary.partition, summary.offset) == (3, 14)
    assert len(summary.completion) == PREVIEW + 1


def test_a_completion_without_tokens_has_the_version_it_was_admitted_with() -> None:
    summary = summary_of(record(trajectory(0, prompt_token_ids=np.zeros(0, np.int32), rewards={"accuracy": None})), {})
    assert summary is not None
    assert summary.oldest == PolicyVersion(1, 19)
    assert summary.reward is None


def test_other_messages_and_rubbish_give_no_summary() -> None:
    assert summary_of(record(examples()["heartbeat"]), {}) is None
    for value in (None, b"", b"\xff\xff\xff\xff", b"\x05\x00\x00\x00\x93not"):
        assert summary_of(record(trajectory())._replace(value=value), {}) is None


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
        ("completion_text", 1 << 40),
    ],
)
def test_a_field_of_the_wrong_kind_gives_no_summary(field: str, value: object) -> None:
    whole = record(trajectory())
    assert whole.value is not None
    end = 4 + int.from_bytes(whole.value[:4], "little")
    for change in ({}, {field: value}):
        header = msgpack.packb(msgpack.unpackb(whole.value[4:end]) | change)
        written = len(header).to_bytes(4, "little") + header + whole.value[end:]
        summary = summary_of(whole._replace(value=written, headers=headers_of(trajectory())), {})
        assert (summary is None) == bool(change)


def test_few_are_all_looked_into() -> None:
    assert sampled(range(MOST)) == set(range(MOST))


def test_the_newest_and_a_spread_of_the_older_ones_are_sampled() -> None:
    many = range(0, 10 * MOST, 2)
    found = sampled(many)
    assert len(found) == MOST
    assert set(many[-NEWEST:]) <= found
    older = sorted(found - set(many[-NEWEST:]))
    assert older[0] == 0
    assert max(later - earlier for earlier, later in itertools.pairwise(older)) <= 2 * len(many) / 150
