import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.bus.port import Record
from streamrl.producers.generation.engines.port import TokenDelta
from streamrl.producers.generation.rollout import MAX_HELD, MAX_PENDING, Rollout, SampledCompletion, TokenStream
from streamrl.schemas.codec import decode, encode, headers_of
from streamrl.schemas.errors import DeliveryUnknown, EngineError
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.trajectories import FinishReason, SamplingParams, TokenChunk, VersionSpan
from tests.fakes.clock import FakeClock
from tests.fakes.engine import FakeEngine, FakeTokenizer, fake_tokens
from tests.fakes.publisher import FailingBus
from tests.fakes.scorer import FakeScorer
from tests.fakes.waiting import until
from tests.producers.generation.factories import WORKER, work_order

V1, V2 = PolicyVersion(1, 1), PolicyVersion(1, 2)
PROMPT = [5, 6, 7]


def rollout(engine: FakeEngine) -> Rollout:
    engine.version, engine.started = V1, True
    return Rollout(engine, FakeTokenizer(), FakeScorer(), WORKER, clock=FakeClock(100.0))


async def test_a_trajectory_carries_what_was_ordered_sampled_and_scored() -> None:
    engine, order = FakeEngine(length=10, chunk=4), work_order(samples=4, attempt=2)
    trajectory = await rollout(engine).sample(order, 3, PROMPT)
    tokens = fake_tokens(engine.requests[0], 10)
    assert engine.requests[0].request_id == trajectory.trajectory_id == "d/0/0/3"
    assert trajectory.token_ids.tolist() == tokens
    assert trajectory.logprobs.tolist() == np.array([-0.5 - token / 128 for token in tokens], np.float32).tolist()
    assert trajectory.loss_mask.tolist() == [1] * 10
    assert trajectory.version_spans == (VersionSpan(version=V1, start=0, end=10),)
    assert trajectory.prompt_token_ids.tolist() == PROMPT
    assert trajectory.completion_text == " ".join(map(str, tokens))
    assert (trajectory.rewards, trajectory.reward_errors) == ({"length": 10.0}, {})
    assert (trajectory.finish_reason, trajectory.attempt, trajectory.bucket) == (FinishReason.STOP, 2, 1)
    assert (trajectory.created_at, trajectory.started_at, trajectory.finished_at) == (1.0, 100.0, 100.0)
    assert decode(encode(trajectory), headers_of(trajectory)) == trajectory


async def test_new_weights_in_mid_sequence_begin_a_new_span() -> None:
    engine = FakeEngine(length=12, chunk=4, hold_at=8)
    maker = rollout(engine)
    sampling = asyncio.create_task(maker.sample(work_order(), 0, PROMPT))
    await until(lambda: maker.load.generated_tokens == 8)
    engine.version = V2
    engine.release.set()
    trajectory = await sampling
    assert trajectory.version_spans == (
        VersionSpan(version=V1, start=0, end=8),
        VersionSpan(version=V2, start=8, end=12),
    )
    assert (trajectory.oldest_version, trajectory.newest_version) == (V1, V2)


async def test_a_failing_engine_is_asked_once_more_for_what_is_missing() -> None:
    engine = FakeEngine(failures={"d/0/0/0": 1}, fails_at=4)
    trajectory = await rollout(engine).sample(work_order(), 0, PROMPT)
    first, second = engine.requests
    assert (list(first.prefix_token_ids), list(second.prefix_token_ids)) == ([], fake_tokens(first, 8)[:4])
    assert trajectory.token_ids.tolist() == fake_tokens(first, 8)
    assert engine.sampled == 8


async def test_an_engine_that_fails_twice_is_an_error() -> None:
    maker = rollout(FakeEngine(failures={"*": 2}))
    with pytest.raises(EngineError, match="fake failure"):
        await maker.sample(work_order(), 0, PROMPT)
    assert maker.load.generating == 0


async def test_samples_of_one_prompt_and_attempts_at_one_sample_have_seeds_of_their_own() -> None:
    engine = FakeEngine()
    maker = rollout(engine)
    order = work_order(sampling=SamplingParams(max_completion_length=8, seed=2**40))
    for index, attempt in ((0, 0), (1, 0), (0, 1), (0, 0)):
        await maker.sample(order.replace(attempt=attempt), index, PROMPT)
    first, other_sample, other_attempt, again = (request.sampling.seed for request in engine.requests)
    assert first == again
    assert len({first, other_sample, other_attempt}) == 3


@pytest.mark.parametrize(
    ("include", "reason", "kept"),
    [(False, FinishReason.STOP, 5), (True, FinishReason.STOP, 7), (False, FinishReason.LENGTH, 10)],
)
async def test_rewards_see_the_text_up_to_the_stop_string_and_the_trainer_every_token(
    include: bool, reason: FinishReason, kept: int
) -> None:
    engine = FakeEngine(length=10, finish_reason=reason)
    maker = rollout(engine)
    whole = (await maker.sample(work_order(), 0, PROMPT)).completion_text.split(" ")
    # The words of tokens 6 and 7: where the text ends with them, and where it ends before them.
    stop = f" {whole[5]} {whole[6]}"
    sampling = SamplingParams(max_completion_length=16, stop=("none", stop), include_stop_str_in_output=include)
    trajectory = await maker.sample(work_order(sampling=sampling), 0, PROMPT)
    assert trajectory.completion_text == " ".join(whole[:kept])
    assert len(trajectory.token_ids) == len(trajectory.logprobs) == trajectory.loss_mask.sum() == 10
    assert trajectory.finish_reason is reason


async def test_a_sample_that_was_never_made_is_accounted_for() -> None:
    order = work_order()
    trajectory = rollout(FakeEngine()).refused(order, 1, "because")
    assert trajectory.trajectory_id == "d/0/0/1"
    assert rollout(FakeEngine()).refused(order.replace(position=7), 1, "because").position == 7
    assert len(trajectory.token_ids) == len(trajectory.prompt_token_ids) == 0
    assert trajectory.finish_reason is FinishReason.ABORT
    assert (trajectory.rewards, trajectory.reward_errors) == ({"length": None}, {"length": "because"})
    assert decode(encode(trajectory), headers_of(trajectory)) == trajectory


async def test_a_completion_that_the_engine_gave_up_is_not_scored() -> None:
    trajectory = await rollout(FakeEngine(finish_reason=FinishReason.ABORT)).sample(work_order(), 0, PROMPT)
    assert len(trajectory.token_ids) == 8
    assert trajectory.rewards == {"length": None}
    assert "aborted" in trajectory.reward_errors["length"]


async def test_leaving_early_frees_the_engines_slot() -> None:
    engine = FakeEngine(hold_at=4)
    maker = rollout(engine)
    sampling = asyncio.create_task(maker.sample(work_order(), 0, PROMPT))
    await until(lambda: maker.load.generated_tokens == 4)
    sampling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sampling
    assert (engine.running, engine.left_early, maker.load.generating) == (0, 1, 0)


DELTAS = st.lists(
    st.tuples(
        st.lists(st.tuples(st.integers(0, 2**31 - 1), st.floats(-100, 0, width=32)), max_size=5), st.integers(0, 2)
    )
)


@given(DELTAS)
def test_spans_tile_the_completion_and_name_the_version_of_every_token(
    deltas: list[tuple[list[tuple[int, float]], int]],
) -> None:
    completion, expected = SampledCompletion(), []
    for tokens, number in deltas:
        version = PolicyVersion(1, number)
        completion.extend(TokenDelta([token for token, _ in tokens], [logprob for _, logprob in tokens], version))
        expected += [(token, logprob, version) for token, logprob in tokens]
    token_ids, logprobs = completion.arrays()
    assert (token_ids.dtype, logprobs.dtype) == (np.dtype(np.int32), np.dtype(np.float32))
    assert token_ids.tolist() == [token for token, _, _ in expected]
    assert logprobs.tolist() == [logprob for _, logprob, _ in expected]
    spans = completion.version_spans()
    assert [span.version for span in spans for _ in range(span.start, span.end)] == [
        version for *_, version in expected
    ]
    assert all(before.version != after.version for before, after in pairwise(spans))


def test_the_last_delta_may_be_empty_and_ends_the_completion() -> None:
    completion = SampledCompletion()
    completion.extend(TokenDelta([1], [-0.5], PolicyVersion(1, 0)))
    completion.extend(TokenDelta([], [], PolicyVersion(1, 1), FinishReason.LENGTH))
    assert completion.finish_reason is FinishReason.LENGTH
    assert [span.version.number for span in completion.version_spans()] == [0]


@pytest.mark.parametrize(
    ("token_ids", "logprobs"), [([1, 2], [-0.5]), ([2**31], [-0.5]), (["a"], [-0.5]), ([1], [None])]
)
def test_tokens_without_matching_logprobs_are_an_engine_error(token_ids: list[int], logprobs: list[float]) -> None:
    with pytest.raises(EngineError):
        SampledCompletion().extend(TokenDelta(token_ids, logprobs, PolicyVersion(1, 0)))


DELTA = TokenDelta([1, 2], [-0.5, -0.25], PolicyVersion(1, 3), FinishReason.STOP)


async def test_a_delta_becomes_a_chunk_under_the_trajectory_id() -> None:
    bus = FailingBus()
    bus.create_topic("run.tokens", 4)
    stream = TokenStream(await bus.publisher("w"), "run.tokens", "w0")
    stream.offer("g/0", 5, DELTA)
    async with publishing(stream):
        await until(lambda: bool(records(bus)))
    (record,) = records(bus)
    expected = TokenChunk(
        trajectory_id="g/0",
        worker_id="w0",
        start=5,
        version=PolicyVersion(1, 3),
        token_ids=[1, 2],
        logprobs=[-0.5, -0.25],
        finish_reason=FinishReason.STOP,
    )
    assert record.key == "g/0"
    assert record.message() == expected


@asynccontextmanager
async def publishing(stream: TokenStream) -> AsyncIterator[None]:
    task = asyncio.create_task(stream.publish_loop())
    try:
        yield
        await asyncio.sleep(0)
        assert not task.done(), task
    finally:
        task.cancel()


def records(bus: FailingBus) -> list[Record]:
    return [record for partition in bus.log("run.tokens").partitions for record in partition]


async def test_a_broker_that_fails_costs_chunks_and_nothing_else() -> None:
    bus = FailingBus(fail=lambda record: DeliveryUnknown("late"))
    stream = TokenStream(await bus.publisher("w"), "run.tokens", "w0")
    for _ in range(MAX_PENDING + 5):
        stream.offer("g/0", 0, DELTA)
    async with publishing(stream):
        # The broker's refusals make room for more.
        await until(lambda: stream.dropped == MAX_PENDING + 5)
    assert len(bus.attempts) == MAX_PENDING + 5


async def test_the_queue_of_tokens_is_bounded_and_has_extra_room_for_ends() -> None:
    bus = FailingBus()
    bus.create_topic("run.tokens", 1)
    stream = TokenStream(await bus.publisher("w"), "run.tokens", "w0")
    on, end = replace(DELTA, finish_reason=None), DELTA
    for number in range(MAX_HELD + 3):
        stream.offer("g/0", number, on)
    assert stream.dropped == 3
    stream.offer("g/0", MAX_HELD + 3, end)
    assert stream.dropped == 3
    async with publishing(stream):
        await until(lambda: len(records(bus)) == MAX_HELD + 1)
    chunks = [record.message() for record in records(bus)]
    starts = [chunk.start for chunk in chunks if isinstance(chunk, TokenChunk)]
    assert starts == [*range(MAX_HELD), MAX_HELD + 3], "in order, with a gap that a reader sees"


async def test_a_closed_publisher_is_no_reason_to_stop_sampling() -> None:
    bus = FailingBus()
    publisher = await bus.publisher("w")
    await publisher.close()
    stream = TokenStream(publisher, "run.tokens", "w0")
    stream.offer("g/0", 0, DELTA)
    async with publishing(stream):
        await until(lambda: stream.dropped == 1)
