import asyncio

import numpy as np
import pytest

from producers.generation.rollout import Rollout
from schemas.codec import decode, encode, headers_of
from schemas.errors import EngineError
from schemas.identifiers import PolicyVersion
from schemas.trajectories import FinishReason, SamplingParams, VersionSpan
from tests.fakes.clock import FakeClock
from tests.fakes.engine import FakeEngine, FakeTokenizer, fake_tokens
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
    assert trajectory.logprobs.tolist() == np.float32([-0.5 - token / 128 for token in tokens]).tolist()
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


async def test_a_failing_engine_is_asked_once_more_and_from_the_start() -> None:
    engine = FakeEngine(failures={"d/0/0/0": 1})
    trajectory = await rollout(engine).sample(work_order(), 0, PROMPT)
    assert len(engine.requests) == 2
    assert len(trajectory.token_ids) == 8


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
    assert "gave up" in trajectory.reward_errors["length"]


async def test_leaving_early_frees_the_engines_slot() -> None:
    engine = FakeEngine(hold_at=4)
    maker = rollout(engine)
    sampling = asyncio.create_task(maker.sample(work_order(), 0, PROMPT))
    await until(lambda: maker.load.generated_tokens == 4)
    sampling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sampling
    assert (engine.running, engine.left_early, maker.load.generating) == (0, 1, 0)
