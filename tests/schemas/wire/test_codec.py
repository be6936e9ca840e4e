import math
import struct
from collections.abc import Callable
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.schemas.codec import (
    CONTROL_SCHEMA,
    MAX_HEADER_BYTES,
    MAX_TEXT_BYTES,
    MESSAGES,
    Headers,
    decode,
    encode,
    encode_token_chunk,
    headers_of,
    split_frame,
    text_prefix,
)
from streamrl.schemas.errors import FrameTooLarge, MalformedFrame, UnknownSchema, WireError
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.messages import Message
from streamrl.schemas.reports import SkipReason, SkipRecord
from streamrl.schemas.trajectories import FinishReason, SamplingParams, TokenChunk, Trajectory, WorkOrder
from tests.schemas.examples import example, examples, trajectory, work_order

ARRAYS = ("prompt_token_ids", "token_ids", "logprobs", "loss_mask")
TEXTS = ("prompt_text", "completion_text")


def headers(schema: str = "trajectory", version: str = "1") -> Headers:
    return (("schema", schema.encode()), ("schema-version", version.encode()))


def parts(frame: bytes) -> tuple[dict[str, Any], bytes]:
    """The header map of a frame, and its arrays and texts."""
    (size,) = struct.unpack_from("<I", frame)
    return msgpack.unpackb(frame[4 : 4 + size]), frame[4 + size :]


def frame_of(fields: object, arrays: bytes = b"", pack: Callable[[object], bytes] = msgpack.packb) -> bytes:
    header = pack(fields)
    return struct.pack("<I", len(header)) + header + arrays


def altered(**changes: object) -> bytes:
    fields, arrays = parts(encode(trajectory()))
    return frame_of(fields | changes, arrays)


@pytest.mark.parametrize("name", examples())
def test_every_message_survives_encoding_and_decoding(name: str) -> None:
    message = examples()[name]
    assert decode(encode(message), headers_of(message)) == message


def test_every_kind_of_message_has_an_example() -> None:
    assert {message.SCHEMA for message in examples().values()} == {*MESSAGES, CONTROL_SCHEMA}


def test_arrays_are_carried_as_their_bytes_and_read_without_a_copy() -> None:
    message = trajectory(1000)
    value = encode(message)
    assert message.logprobs.tobytes() in value
    read = decode(value, headers_of(message))
    assert isinstance(read, Trajectory)
    assert not read.logprobs.flags.owndata
    assert not read.logprobs.flags.writeable


def test_an_array_that_is_a_view_with_gaps_is_carried_as_what_it_shows() -> None:
    gaps = np.arange(10, dtype=np.int32)[::2]
    message = trajectory(5, token_ids=gaps)
    read = decode(encode(message), headers_of(message))
    assert isinstance(read, Trajectory)
    assert read.token_ids.tolist() == [0, 2, 4, 6, 8]


def test_how_an_order_is_sampled_survives_the_round_trip_and_older_orders_are_sampled_as_they_were() -> None:
    sampling = SamplingParams(max_completion_length=8, min_p=0.1, stop=("</a>", "é\n"), include_stop_str_in_output=True)
    order = work_order("What is 2 + 2?").replace(sampling=sampling)
    assert decode(encode(order), headers_of(order)) == order
    older = {"max_completion_length": 8, "temperature": 0.7, "top_p": 0.9, "top_k": 50, "seed": None}
    read = SamplingParams.model_validate(older)
    assert (read.min_p, read.stop, read.include_stop_str_in_output, read.truncates) == (0.0, (), False, True)


def test_all_that_a_turn_of_a_prompt_has_survives_the_round_trip() -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [{"x": {"y": None}}]}]
    order = work_order("").replace(prompt={"prompt_id": "p", "dataset": "d", "content": turns, "stated": "é"})
    read = decode(encode(order), headers_of(order))
    assert isinstance(read, WorkOrder)
    assert [turn.model_dump() for turn in read.prompt.content if not isinstance(turn, str)] == turns
    assert read == order


def test_fields_of_a_newer_writer_are_ignored() -> None:
    assert decode(altered(colour="green"), headers()) == trajectory()


def test_a_skip_reason_of_a_newer_writer_is_read_as_another_one() -> None:
    """The row counts for admission and dedupe whatever the reason; the error for a newer version says what to do."""
    row = example("skip", SkipRecord)
    fields, arrays = parts(encode(row))
    read = decode(frame_of(fields | {"reason": "too_loud"}, arrays), headers_of(row))
    assert isinstance(read, SkipRecord)
    assert (read.reason, read.trajectory_id) == (SkipReason.OTHER, row.trajectory_id)
    with pytest.raises(MalformedFrame):
        decode(frame_of(fields | {"reason": 3}, arrays), headers_of(row))
    with pytest.raises(UnknownSchema, match="newer writer: update this process"):
        decode(encode(row), headers("skip", "2"))


def test_an_optional_field_that_an_older_writer_left_out_takes_its_default() -> None:
    fields, arrays = parts(encode(trajectory(reward_errors={})))
    del fields["reward_errors"]
    assert decode(frame_of(fields, arrays), headers()) == trajectory(reward_errors={})


@pytest.mark.parametrize(
    "named",
    [
        (),
        (("schema", b"trajectory"),),
        (("schema-version", b"1"),),
        headers("no-such-schema"),
        headers(version="3"),
        headers(version="0"),
        headers(version="-1"),
        headers(version="one"),
        headers(CONTROL_SCHEMA, "2"),
        (("schema", b"\xff"), ("schema-version", b"1")),
        (("schema", None), ("schema-version", b"1")),
        (("schema", b"trajectory"), ("schema-version", None)),
    ],
)
def test_a_schema_that_is_unknown_or_newer_is_refused(named: Headers) -> None:
    with pytest.raises(UnknownSchema):
        decode(encode(trajectory()), named)


@pytest.mark.parametrize("value", [None, b"", b"\x00", b"\x00\x00\x00", struct.pack("<I", 10) + b"short"])
def test_a_frame_without_its_header_is_refused(value: bytes | None) -> None:
    with pytest.raises(MalformedFrame):
        decode(value, headers())


@pytest.mark.parametrize("name", ["trajectory", "token-chunk", "heartbeat", "step-report", "control-flow"])
def test_a_frame_cut_anywhere_is_refused(name: str) -> None:
    message = examples()[name]
    whole = encode(message)
    for length in range(len(whole)):
        with pytest.raises(WireError):
            decode(whole[:length], headers_of(message))


@pytest.mark.parametrize("name", ["trajectory", "heartbeat", "control-flow"])
def test_bytes_after_the_last_array_are_refused(name: str) -> None:
    message = examples()[name]
    with pytest.raises(MalformedFrame, match="arrays and texts after"):
        decode(encode(message) + b"\x00", headers_of(message))


@pytest.mark.parametrize("field", ARRAYS)
@pytest.mark.parametrize("length", [-1, 4, 6, 2**31, 2**62, None, True, 5.0, "5", [5]])
def test_a_wrong_length_of_an_array_is_refused(field: str, length: object) -> None:
    with pytest.raises(MalformedFrame):
        decode(altered(**{field: length}), headers())


@pytest.mark.parametrize("field", ARRAYS)
def test_a_missing_array_is_refused(field: str) -> None:
    fields, arrays = parts(encode(trajectory()))
    del fields[field]
    with pytest.raises(MalformedFrame, match=field):
        decode(frame_of(fields, arrays), headers())


def test_arrays_of_different_lengths_are_refused() -> None:
    shorter = np.zeros(4, np.uint8)
    with pytest.raises(ValueError, match="one length"):
        trajectory(5, loss_mask=shorter)
    fields, arrays = parts(encode(trajectory(5)))
    # The mask's last byte becomes the first of the text behind it.
    with pytest.raises(MalformedFrame, match="one length"):
        decode(frame_of(fields | {"loss_mask": 4, "prompt_text": fields["prompt_text"] + 1}, arrays), headers())


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_nan_log_probabilities_are_refused(number: float) -> None:
    fields, arrays = parts(encode(trajectory(5)))
    place = arrays.index(trajectory(5).logprobs.tobytes())
    poisoned = arrays[:place] + struct.pack("<f", number) + arrays[place + 4 :]
    with pytest.raises(MalformedFrame, match="finite logprobs"):
        decode(frame_of(fields, poisoned), headers())


@pytest.mark.parametrize("number", [math.nan, math.inf])
@pytest.mark.parametrize("field", ["temperature", "created_at"])
def test_plain_numbers_that_are_not_finite_are_refused(field: str, number: float) -> None:
    with pytest.raises(MalformedFrame, match=field):
        decode(altered(**{field: number}), headers())


def test_a_reward_that_is_not_a_number_is_refused() -> None:
    with pytest.raises(MalformedFrame, match=r"rewards\.accuracy"):
        decode(altered(rewards={"accuracy": math.nan}), headers())


def test_negative_token_ids_are_refused() -> None:
    with pytest.raises(ValueError, match="token ids >= 0"):
        trajectory(5, token_ids=np.array([1, 2, -3, 4, 5], np.int32))
    with pytest.raises(ValueError, match="prompt token ids >= 0"):
        trajectory(5, prompt_token_ids=np.array([-1], np.int32))


@pytest.mark.parametrize(
    "spans",
    [
        [],
        [(0, 4)],
        [(0, 6)],
        [(1, 5)],
        [(0, 2), (3, 5)],
        [(0, 3), (2, 5)],
        [(2, 5), (0, 2)],
        [(0, 5), (5, 5)],
        [(0, 0), (0, 5)],
        [(3, 1), (0, 5)],
    ],
)
def test_version_spans_that_do_not_tile_the_completion_are_refused(spans: list[tuple[int, int]]) -> None:
    written = [{"version": [1, 2], "start": start, "end": end} for start, end in spans]
    with pytest.raises(MalformedFrame):
        decode(altered(version_spans=written), headers())


@pytest.mark.parametrize("size", [MAX_HEADER_BYTES + 1, 2**32 - 1])
def test_a_header_larger_than_allowed_is_refused_before_it_is_read(size: int) -> None:
    with pytest.raises(FrameTooLarge):
        decode(struct.pack("<I", size) + b"\x80" * 100, headers())


def random_text(size: int, seed: int = 0) -> str:
    """So many characters of all planes, of one to four bytes each, without surrogates."""
    random = np.random.default_rng(seed)
    kinds = random.integers(0, 4, size)
    low = np.array([0x20, 0x80, 0x800, 0x10000])[kinds]
    high = np.array([0x7F, 0x800, 0xD800, 0x110000])[kinds]
    return "".join(map(chr, random.integers(low, high)))


@pytest.mark.parametrize("text", [random_text(400_000), "🙂" * 1_000_000, "x" * 4_000_000, "a" * 900_000 + "🙂"])
def test_200_000_tokens_and_their_text_survive_the_round_trip(text: str) -> None:
    random = np.random.default_rng(0)
    message = trajectory(
        200_000,
        token_ids=random.integers(0, 151_936, 200_000, dtype=np.int32),
        prompt_token_ids=random.integers(0, 151_936, 30_000, dtype=np.int32),
        logprobs=-random.exponential(0.5, 200_000).astype(np.float32),
        prompt_text=text[:150_000],
        completion_text=text,
    )
    frame = encode(message)
    assert decode(frame, headers_of(message)) == message
    fields, body = split_frame(frame, headers_of(message))
    assert len(frame) - len(body) < 2_000  # the header stays small, however long the text
    assert text_prefix(Trajectory, "completion_text", fields, body, 50) == text[:50]
    assert text_prefix(Trajectory, "prompt_text", fields, body, 50) == text[:50]


@pytest.mark.parametrize("field", TEXTS)
@pytest.mark.parametrize("length", [-1, 0, 3, 2**31, 2**62, None, True, 5.0, [5], b"x"])
def test_a_wrong_length_of_a_text_is_refused(field: str, length: object) -> None:
    with pytest.raises(MalformedFrame):
        decode(altered(**{field: length}), headers())


@pytest.mark.parametrize("length", [-1, 2**31, 2**62, None, True, 5.0])
def test_the_beginning_of_a_text_of_wrong_length_is_refused(length: object) -> None:
    fields, body = split_frame(altered(completion_text=length), headers())
    for name in TEXTS:
        with pytest.raises(MalformedFrame):
            text_prefix(Trajectory, name, fields, body, 10)


@pytest.mark.parametrize("field", TEXTS)
def test_a_missing_text_is_refused(field: str) -> None:
    fields, body = parts(encode(trajectory()))
    del fields[field]
    with pytest.raises(MalformedFrame, match=field):
        decode(frame_of(fields, body), headers())


def test_a_text_that_ends_within_a_character_is_refused() -> None:
    message = trajectory(prompt_text="zwei🙂", completion_text="vier")
    fields, body = parts(encode(message))
    assert (fields["prompt_text"], fields["completion_text"]) == (8, 4)
    with pytest.raises(MalformedFrame, match=r"UTF-8 as trajectory\.prompt_text"):
        decode(frame_of(fields | {"prompt_text": 6, "completion_text": 6}, body), headers())


def test_as_much_text_as_allowed_is_carried_and_one_byte_more_is_refused_by_reader_and_writer() -> None:
    most = trajectory(prompt_text="", completion_text="x" * MAX_TEXT_BYTES)
    frame = encode(most)
    assert decode(frame, headers_of(most)) == most
    with pytest.raises(FrameTooLarge, match="bytes of text"):
        encode(trajectory(prompt_text="x", completion_text="x" * MAX_TEXT_BYTES))
    fields, body = parts(frame)
    with pytest.raises(FrameTooLarge, match="bytes of text"):
        decode(frame_of(fields | {"prompt_text": 1}, body + b"x"), headers())
    with pytest.raises(FrameTooLarge):
        decode(altered(completion_text="x" * MAX_HEADER_BYTES), headers())


def test_a_work_order_may_be_all_header_up_to_its_own_limit() -> None:
    order = work_order("x" * 900_000)
    assert decode(encode(order), headers_of(order)) == order


@pytest.mark.parametrize("name", ["trajectory", "heartbeat", "skip"])
def test_a_frame_larger_than_its_schema_allows_is_refused(name: str) -> None:
    message = examples()[name]
    with pytest.raises(FrameTooLarge):
        decode(encode(message) + bytes(type(message).MAX_BYTES), headers_of(message))


def test_a_message_that_would_be_too_large_cannot_be_written() -> None:
    tokens = Trajectory.MAX_BYTES // 8
    with pytest.raises(FrameTooLarge):
        encode(trajectory(tokens))


@pytest.mark.parametrize(
    "fields",
    [[], "text", 7, None, [["trajectory_id", "x"]]],
)
def test_a_header_that_is_no_map_is_refused(fields: object) -> None:
    with pytest.raises(MalformedFrame):
        decode(frame_of(fields), headers("heartbeat"))


EXTENSIONS = [
    msgpack.ExtType(5, b"x"),
    msgpack.ExtType(5, b"x" * 100),
    msgpack.Timestamp(1),
]


@pytest.mark.parametrize("value", EXTENSIONS, ids=str)
@pytest.mark.parametrize("field", ["created_at", "rewards", "prompt_text"])
def test_msgpack_extension_types_are_refused_wherever_they_stand(field: str, value: object) -> None:
    with pytest.raises(WireError):
        decode(altered(**{field: value}), headers())
    with pytest.raises(WireError):
        decode(altered(**{field: [{"deep": value}]}), headers())


def test_an_extension_type_in_a_prompt_column_is_refused() -> None:
    order = work_order("x")
    fields, _ = parts(encode(order))
    for value in EXTENSIONS:
        fields["prompt"]["columns"] = {"answer": value}
        with pytest.raises(WireError):
            decode(frame_of(fields), headers_of(order))


@pytest.mark.parametrize(
    "raw", [b"\xc7\x0c\xff" + b"\xff" * 12, b"\xd7\xff" + b"\xff" * 8, b"\xc7\x05\xffwrong", b"\xc1"]
)
def test_timestamps_beyond_the_calendar_and_reserved_bytes_are_refused(raw: bytes) -> None:
    fields, arrays = parts(encode(trajectory(dataset="@@@@")))
    header = msgpack.packb(fields).replace(b"\xa4@@@@", raw)
    assert raw in header
    with pytest.raises(MalformedFrame):
        decode(struct.pack("<I", len(header)) + header + arrays, headers())


def test_map_keys_that_are_not_text_are_refused() -> None:
    with pytest.raises(MalformedFrame):
        decode(frame_of({1: 2}), headers("heartbeat"))


def test_nesting_without_end_is_refused() -> None:
    deep = b"\x91" * 200_000 + b"\xc0"
    with pytest.raises(WireError):
        decode(struct.pack("<I", len(deep)) + deep, headers("heartbeat"))


def test_text_that_is_not_utf8_is_refused() -> None:
    value = encode(trajectory()).replace(b"vier", b"\xff\xfe\xfd\xfc")
    with pytest.raises(MalformedFrame):
        decode(value, headers())


def test_an_error_names_schema_and_field() -> None:
    with pytest.raises(MalformedFrame, match=r"^trajectory\.sample_index: "):
        decode(altered(sample_index=-1), headers())


def test_a_control_message_of_an_unknown_kind_is_refused() -> None:
    with pytest.raises(MalformedFrame):
        decode(frame_of({"kind": "self_destruct", "sequence": 1, "sent_at": 1.0}), headers(CONTROL_SCHEMA))


numbers = st.floats(width=32, allow_nan=False, allow_infinity=False)
ids = st.integers(0, 2**31 - 1)


@given(
    tokens=st.lists(st.tuples(ids, numbers, st.integers(0, 255)), max_size=50),
    prompt=st.lists(ids, max_size=20),
    rewards=st.dictionaries(st.text(max_size=20), st.none() | st.floats(allow_nan=False, allow_infinity=False)),
    text=st.text(max_size=100),
    completion=st.text(max_size=60),
)
@settings(max_examples=100, deadline=None)
def test_any_valid_trajectory_survives_the_round_trip(
    tokens: list[tuple[int, float, int]],
    prompt: list[int],
    rewards: dict[str, float | None],
    text: str,
    completion: str,
) -> None:
    message = trajectory(
        len(tokens),
        token_ids=np.array([token for token, _, _ in tokens], np.int32),
        logprobs=np.array([logprob for _, logprob, _ in tokens], np.float32),
        loss_mask=np.array([mask for _, _, mask in tokens], np.uint8),
        prompt_token_ids=np.array(prompt, np.int32),
        rewards=rewards,
        prompt_text=text,
        completion_text=completion,
    )
    assert decode(encode(message), headers_of(message)) == message


def _only_wire_errors(value: bytes | None, named: Headers) -> None:
    try:
        message = decode(value, named)
    except WireError:
        return
    assert isinstance(message, Message)


schemas = st.sampled_from([*MESSAGES, CONTROL_SCHEMA])


@given(schema=schemas, value=st.none() | st.binary(max_size=300))
@settings(max_examples=300, deadline=None)
def test_random_bytes_raise_nothing_but_wire_errors(schema: str, value: bytes | None) -> None:
    _only_wire_errors(value, headers(schema))


@given(named=st.lists(st.tuples(st.sampled_from(["schema", "schema-version", "x"]), st.binary(max_size=12))))
@settings(max_examples=200, deadline=None)
def test_random_headers_raise_nothing_but_wire_errors(named: list[tuple[str, bytes]]) -> None:
    _only_wire_errors(encode(trajectory()), tuple(named))


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(data=st.data(), name=st.sampled_from(sorted(examples())))
@settings(max_examples=300, deadline=None)
def test_a_valid_frame_with_any_one_field_replaced_raises_nothing_but_wire_errors(
    data: st.DataObject, name: str
) -> None:
    message = examples()[name]
    fields, arrays = parts(encode(message))
    field = data.draw(st.sampled_from(sorted(fields)))
    _only_wire_errors(frame_of(fields | {field: data.draw(plain)}, arrays), headers_of(message))


@given(place=st.integers(0, 10_000), bits=st.integers(1, 255), name=st.sampled_from(sorted(examples())))
@settings(max_examples=300, deadline=None)
def test_a_valid_frame_with_any_one_byte_changed_raises_nothing_but_wire_errors(
    place: int, bits: int, name: str
) -> None:
    message = examples()[name]
    value = bytearray(encode(message))
    value[place % len(value)] ^= bits
    _only_wire_errors(bytes(value), headers_of(message))


def test_a_token_chunk_carries_its_arrays_too() -> None:
    chunk = examples()["token-chunk"]
    assert isinstance(chunk, TokenChunk)
    assert list(TokenChunk.array_fields()) == ["token_ids", "logprobs"]


@pytest.mark.parametrize("name", examples())
def test_headers_are_readable_text(name: str) -> None:
    """So that kcat and Kafka UI show them."""
    for key, content in headers_of(examples()[name]):
        assert key.isprintable()
        assert key.isascii()
        assert content.decode("ascii").isprintable()


@given(
    tokens=st.lists(st.tuples(st.integers(0, 2**31 - 1), st.floats(-1024, 0, width=32)), max_size=4),
    reason=st.none() | st.sampled_from(FinishReason),
)
def test_a_chunk_of_tokens_is_encoded_by_hand_as_it_is_in_general(
    tokens: list[tuple[int, float]], reason: FinishReason | None
) -> None:
    ids, logprobs = [token for token, _ in tokens], [logprob for _, logprob in tokens]
    version = PolicyVersion(3, 70_000)
    chunk = TokenChunk(
        trajectory_id="d/ä/0/1",
        worker_id="w",
        start=5,
        version=version,
        token_ids=ids,
        logprobs=logprobs,
        finish_reason=reason,
    )
    assert encode_token_chunk("d/ä/0/1", "w", 5, version, (ids, logprobs), reason) == encode(chunk)
