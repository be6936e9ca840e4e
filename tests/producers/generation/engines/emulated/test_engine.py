import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from streamrl.producers.generation.engines.emulated import EmulatedEngine
from streamrl.producers.generation.engines.factory import build_emulated
from streamrl.producers.generation.engines.length_trace import LengthTraceSettings
from streamrl.producers.generation.engines.port import Engine, GenerationRequest, Interrupted
from streamrl.producers.generation.rollout import SampledCompletion
from streamrl.producers.generation.settings import GenerationSettings
from streamrl.schemas.errors import EngineError, PromptRefused, WeightsError
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.profiles import DecodeCurve, DecodeSettings
from streamrl.schemas.trajectories import FinishReason, Prompt, SamplingParams
from tests.producers.generation.engines.emulated.stepwise import Completion as Expected
from tests.producers.generation.engines.emulated.stepwise import simulate
from tests.progress import calm_s, patience

BY_COLUMN = LengthTraceSettings(source="column")
STEP = DecodeSettings(step_s=1.0, batch_scale=1e9)
FIRST, SECOND = PolicyVersion(1, 0), PolicyVersion(1, 1)


def request(number: int, length: int, prompt: int = 4, limit: int = 100_000) -> GenerationRequest:
    asked = Prompt(prompt_id=f"d/{number}", dataset="d", content="x", columns={"length": length})
    return GenerationRequest(f"d/{number}/0/0", [1] * prompt, SamplingParams(max_completion_length=limit), asked)


@asynccontextmanager
async def running(decode: DecodeSettings, scale: float, slots: int = 8) -> AsyncIterator[EmulatedEngine]:
    engine = EmulatedEngine(decode, BY_COLUMN, scale, slots, max_model_len=100_000)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


async def collect(engine: Engine, asked: GenerationRequest) -> SampledCompletion:
    completion = SampledCompletion()
    async for delta in engine.generate(asked):
        completion.extend(delta)
    return completion


def weights(directory: Path) -> Path:
    (directory / "model.safetensors").write_bytes(b"")
    return directory


async def test_an_interrupted_completion_hands_over_its_tokens_and_continues_elsewhere() -> None:
    """One that runs, one that waits for a slot, and one that nobody knows."""
    async with running(STEP, 1000.0, slots=1) as engine:
        asked = [request(0, 400), request(1, 50)]
        tasks = [asyncio.create_task(interrupted(engine, one)) for one in asked]
        await asyncio.sleep(0.1)
        # The waiting one first: the other's slot, once free, would be its own for a step.
        assert [engine.interrupt(one.request_id) for one in (*reversed(asked), request(2, 5))] == [True, True, False]
        first, second = await asyncio.gather(*tasks)
        assert 50 <= len(first.token_ids) < 400
        assert (len(second.token_ids), engine.interrupt(asked[0].request_id)) == (0, False)
        rest = await collect(engine, replace(asked[0], prefix_token_ids=first.token_ids.tolist()))
        assert len(first.token_ids) + len(rest.token_ids) == 400


async def interrupted(engine: EmulatedEngine, asked: GenerationRequest) -> SampledCompletion:
    completion = SampledCompletion()
    with pytest.raises(Interrupted):
        async for delta in engine.generate(asked):
            completion.extend(delta)
    return completion


async def test_wall_clock_is_emulated_time_over_the_scale() -> None:
    decode, scale, slots = DecodeSettings(prefill_s_per_token=1e-3), 20.0, 4
    expected = [Expected(0.0, 4, 300 + 37 * number) for number in range(12)]
    simulate(DecodeCurve(decode), slots, expected, [])
    measured: dict[int, float] = {}

    async def one(engine: EmulatedEngine, number: int) -> None:
        await collect(engine, request(number, expected[number].length))
        measured[number] = (time.monotonic() - began) * scale

    async with running(decode, scale, slots) as engine:
        began = time.monotonic()
        await asyncio.gather(*(one(engine, number) for number in range(len(expected))))
    ends = [completion.finish or 0.0 for completion in expected]
    assert all(measured[number] >= end - 0.02 * scale for number, end in enumerate(ends))
    assert max(measured.values()) == pytest.approx(max(ends), rel=0.05)


async def test_a_late_wake_up_delays_no_later_step() -> None:
    async with running(STEP, scale=100.0, slots=1) as engine:
        began, calm = time.monotonic(), calm_s()
        waiting = [asyncio.create_task(collect(engine, request(number, 10))) for number in range(8)]
        await asyncio.sleep(0.15)
        time.sleep(0.3)
        await asyncio.gather(*waiting)
        assert time.monotonic() - began > 0.7
        assert calm_s() - calm < 0.9


async def test_every_token_has_the_version_of_its_step(tmp_path: Path) -> None:
    async with running(STEP, scale=100.0) as engine:
        await engine.adopt(weights(tmp_path), FIRST)
        task = asyncio.create_task(collect(engine, request(0, 40)))
        await asyncio.sleep(0.2)
        await engine.adopt(tmp_path, SECOND)
        completion = await task
    spans = completion.version_spans()
    assert [span.version for span in spans] == [FIRST, SECOND]
    assert (spans[0].start, spans[1].end, spans[0].end) == (0, 40, spans[1].start)
    assert 15 <= spans[1].start <= 35
    assert len(completion.arrays()[0]) == len(completion.arrays()[1]) == 40


async def test_adoption_takes_its_time_and_stalls_what_runs(tmp_path: Path) -> None:
    decode = STEP.model_copy(update={"adopt_s": 30.0})
    async with running(decode, scale=100.0) as engine:
        began = time.monotonic()
        task = asyncio.create_task(collect(engine, request(0, 20)))
        await asyncio.sleep(0.05)
        await engine.adopt(weights(tmp_path), FIRST)
        assert time.monotonic() - began >= 0.34
        await task
        assert time.monotonic() - began >= 0.49


async def test_recomputed_caches_cost_their_prefill_again(tmp_path: Path) -> None:
    decode = STEP.model_copy(update={"prefill_s": 20.0})
    for adopt, prefills in (("in_flight", 1), ("recompute", 2)):
        settings = GenerationSettings.model_validate({"adopt": adopt, "max_num_seqs": 8})
        engine = build_emulated(settings, decode, BY_COLUMN, 200.0)
        await engine.start()
        began = time.monotonic()
        task = asyncio.create_task(collect(engine, request(0, 80)))
        await asyncio.sleep(0.12)
        await engine.adopt(weights(tmp_path), FIRST)
        completion = await task
        assert time.monotonic() - began >= (80 + prefills * 20) / 200 - 0.005
        assert len(completion.version_spans()) == 2  # from the version of the first step to the one adopted
        await engine.close()


async def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    async with running(STEP, scale=100.0) as engine:
        with pytest.raises(WeightsError, match=r"expected a \.safetensors file for 1-0"):
            await engine.adopt(tmp_path, FIRST)


async def test_the_length_limit_ends_a_completion() -> None:
    async with running(STEP, scale=1e4) as engine:
        cut = await collect(engine, request(0, 50, limit=20))
        whole = await collect(engine, request(0, 20, limit=20))
        long_prompt = await collect(engine, request(0, 50, prompt=99_990))
    assert [len(one.arrays()[0]) for one in (cut, whole, long_prompt)] == [20, 20, 10]
    assert [one.finish_reason for one in (cut, whole, long_prompt)] == [
        FinishReason.LENGTH,
        FinishReason.STOP,
        FinishReason.LENGTH,
    ]


async def test_the_first_token_tells_the_samples_of_a_group_apart() -> None:
    one = request(0, 8)
    async with running(STEP.model_copy(update={"chunk_tokens": 5}), scale=1000.0) as engine:
        first, second = await asyncio.gather(
            collect(engine, one), collect(engine, replace(one, request_id=one.request_id[:-1] + "1"))
        )
        rest = await collect(engine, replace(one, request_id="d/0/0/1", prefix_token_ids=[1, 1, 1]))
    assert (first.token_ids[0], second.token_ids[0], rest.token_ids[0]) == (1, 2, 1)
    assert set(first.token_ids[1:]) == set(second.token_ids[1:]) == {1}


async def test_closing_the_iterator_frees_the_slot() -> None:
    async with running(STEP.model_copy(update={"chunk_tokens": 5}), scale=100.0, slots=1) as engine:
        async with aclosing(engine.generate(request(0, 10_000))) as deltas:  # type: ignore[type-var]
            assert len((await anext(deltas)).token_ids) == 5
        async with patience(2):
            await collect(engine, request(1, 10))


async def test_closing_fails_what_runs_and_what_is_asked_later(tmp_path: Path) -> None:
    async with running(STEP, scale=1.0) as engine:
        task = asyncio.create_task(collect(engine, request(0, 1000)))
        await asyncio.sleep(0.01)
        await engine.close()
        await engine.close()
        for refused in (task, collect(engine, request(1, 1)), engine.adopt(weights(tmp_path), FIRST)):
            with pytest.raises(EngineError):
                await refused


async def test_a_prompt_that_fills_the_context_is_refused() -> None:
    async with running(STEP, scale=100.0) as engine:
        with pytest.raises(PromptRefused, match=r"expected a prompt of 1 to \d+ tokens, got 100000"):
            await collect(engine, request(0, 5, prompt=100_000))
