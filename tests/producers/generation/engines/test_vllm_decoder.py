"""The vLLM engine against transformers' forward pass; one engine for all tests, for its start takes long."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

from streamrl.producers.generation.engines.port import Engine
from streamrl.producers.generation.engines.threaded import ThreadedEngine
from streamrl.schemas.errors import EngineError, WeightsError
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.trajectories import FinishReason
from tests.producers.generation.engines.conftest import EOS, SLOTS, KeptDecoder, MakeVersion
from tests.producers.generation.engines.replay import (
    Sampled,
    full_forward,
    load,
    mixed_forward,
    request,
    sample,
    sample_and_adopt,
    worst,
)
from tests.progress import within

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module")]

PROMPTS = [[5 + i + j for j in range(1 + 3 * i)] for i in range(6)]
FIRST, SECOND = PolicyVersion(1, 0), PolicyVersion(1, 1)
LONG_PROMPT = [2 + (7 * i) % 120 for i in range(300)]
WHOLE_BLOCKS = 256
"""Of the long prompt's tokens: vLLM's blocks have 128 on a CPU."""


def make_engine(decoder: KeptDecoder) -> Engine:
    return ThreadedEngine(decoder, SLOTS, chunk_tokens=4)


@pytest.fixture(scope="module")
def decoder(vllm_decoder: KeptDecoder) -> KeptDecoder:
    return vllm_decoder


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started(decoder: KeptDecoder) -> AsyncIterator[Engine]:
    engine = make_engine(decoder)
    await engine.start()
    yield engine
    await engine.close()


@pytest_asyncio.fixture(loop_scope="module")
async def engine(started: Engine, no_eos_dir: Path) -> Engine:
    """The engine with the first weights in place."""
    await started.adopt(no_eos_dir, FIRST)
    return started


async def greedy(engine: Engine, prompt: list[int]) -> Sampled:
    return await sample(engine, prompt, max_completion_length=12, temperature=0.0)


@torch.no_grad()
def best_tokens(model: Any, sampled: Sampled) -> list[int]:
    """What a fresh engine with these weights would choose after each beginning of the completion."""
    logits = model(input_ids=torch.tensor([sampled.prompt + sampled.tokens])).logits[0]
    best: list[int] = logits[len(sampled.prompt) - 1 : -1].argmax(-1).tolist()
    return best


async def test_logprobs_equal_a_fresh_forward_pass(engine: Engine, no_eos_dir: Path) -> None:
    results = await asyncio.gather(*(sample(engine, p, max_completion_length=40) for p in PROMPTS * 5))
    model = load(no_eos_dir)
    for result in results:
        assert worst(result, full_forward(model, result)) < 1e-3
        assert (len(result.tokens), result.finish_reason) == (40, FinishReason.LENGTH)


async def test_logprobs_are_at_the_sampling_temperature(engine: Engine, no_eos_dir: Path) -> None:
    hot = await asyncio.gather(*(sample(engine, p, max_completion_length=30, temperature=1.7) for p in PROMPTS))
    model = load(no_eos_dir)
    assert all(worst(result, full_forward(model, result, temperature=1.7)) < 1e-3 for result in hot)
    # An engine has to be told before it starts that there will be truncation.
    with pytest.raises(EngineError, match="top_k"):
        await sample(engine, PROMPTS[2], max_completion_length=10, top_k=1)


async def test_samples_of_one_prompt_differ_unless_seeded_alike(engine: Engine) -> None:
    free = await asyncio.gather(*(sample(engine, PROMPTS[3], max_completion_length=20) for _ in range(4)))
    alike = await asyncio.gather(*(sample(engine, PROMPTS[3], max_completion_length=20, seed=5) for _ in range(2)))
    assert len({tuple(result.tokens) for result in free}) == 4
    assert alike[0].tokens == alike[1].tokens


async def test_spans_agree_with_their_versions_when_weights_arrive_in_flight(
    engine: Engine, no_eos_dir: Path, no_eos_version: MakeVersion
) -> None:
    directories = {FIRST: no_eos_dir} | {PolicyVersion(1, n): no_eos_version(n) for n in (1, 2, 3)}
    models = {version: load(directory) for version, directory in directories.items()}
    others = [sample(engine, PROMPTS[n % 6], max_completion_length=400) for n in range(30)]
    arriving = {version: directories[version] for version in list(directories)[1:]}
    first = sample_and_adopt(engine, PROMPTS[3], arriving, max_completion_length=900)
    results = await asyncio.gather(first, *others)
    assert len(results[0].spans()) == 4
    for result in results:
        assert worst(result, mixed_forward(models, result)) < 1e-3
        if min((end - start for _, start, end in result.spans()[1:]), default=0) > 10:
            assert worst(result, mixed_forward(dict.fromkeys(models, models[FIRST]), result)) > 0.05


async def test_a_group_is_prefilled_once(engine: Engine, decoder: KeptDecoder, no_eos_dir: Path) -> None:
    cached, prompts = decoder.cached_prompt_tokens, decoder.prompt_tokens
    results = await asyncio.gather(*(sample(engine, LONG_PROMPT, max_completion_length=20) for _ in range(SLOTS)))
    assert decoder.prompt_tokens - prompts == SLOTS * len(LONG_PROMPT)
    assert decoder.cached_prompt_tokens - cached == (SLOTS - 1) * WHOLE_BLOCKS
    model = load(no_eos_dir)
    assert len({tuple(result.tokens) for result in results}) > 1
    assert all(worst(result, full_forward(model, result)) < 1e-3 for result in results)


async def test_no_key_or_value_of_older_weights_serves_a_new_request(
    engine: Engine, decoder: KeptDecoder, no_eos_version: MakeVersion
) -> None:
    await sample(engine, LONG_PROMPT, max_completion_length=5)
    cached = decoder.cached_prompt_tokens
    assert (await sample(engine, LONG_PROMPT, max_completion_length=5)).tokens
    assert decoder.cached_prompt_tokens == cached + WHOLE_BLOCKS
    directory = no_eos_version(1)

    async def versions_until_the_second() -> set[PolicyVersion]:
        found = set[PolicyVersion]()
        # Far longer than it takes to adopt weights, also where others hold the processors.
        async with aclosing(engine.generate(request(PROMPTS[1], max_completion_length=900))) as deltas:  # type: ignore[type-var]
            async for delta in deltas:
                found.add(delta.version)
                if delta.version == SECOND:
                    break
        return found

    # As many as there is room for run under the old weights; the others wait for them, and begin under the new ones.
    before = decoder.prompt_tokens
    running = [asyncio.create_task(versions_until_the_second()) for _ in range(SLOTS)]
    while decoder.prompt_tokens - before < SLOTS * len(PROMPTS[1]):
        await asyncio.sleep(0.01)
    waiting = [asyncio.create_task(greedy(engine, LONG_PROMPT)) for _ in range(SLOTS)]
    await asyncio.sleep(0.01)
    await engine.adopt(directory, SECOND)
    model = load(directory)
    for result in [*await asyncio.gather(*waiting), await greedy(engine, LONG_PROMPT)]:
        assert set(result.versions) == {SECOND}
        assert result.tokens == best_tokens(model, result)
    assert await asyncio.gather(*running) == [{FIRST, SECOND}] * SLOTS


async def test_refused_weights_change_nothing(engine: Engine, tmp_path: Path, no_eos_dir: Path) -> None:
    with pytest.raises(WeightsError):
        await engine.adopt(tmp_path, PolicyVersion(2, 0))
    result = await sample(engine, PROMPTS[2], max_completion_length=10)
    assert set(result.versions) == {FIRST}
    assert worst(result, full_forward(load(no_eos_dir), result)) < 1e-3


async def test_closing_the_iterator_frees_the_slot(engine: Engine) -> None:
    for n in range(SLOTS):
        stream = engine.generate(request(PROMPTS[n % 6], max_completion_length=900))
        async with aclosing(stream):  # type: ignore[type-var]
            await anext(stream)
    assert (await within(sample(engine, PROMPTS[0], max_completion_length=5), 5)).tokens


async def test_the_end_token_of_the_model_ends_a_completion(
    engine: Engine, decoder: KeptDecoder, model_dir: Path
) -> None:
    await engine.close()
    ending = make_engine(decoder.of(model_dir))
    await ending.start()
    await ending.adopt(model_dir, SECOND)
    short, long = ([sample(ending, p, max_completion_length=tokens) for p in PROMPTS * 5] for tokens in (2, 120))
    results = await asyncio.gather(*short, *long)
    await ending.close()
    assert {result.finish_reason for result in results} == {FinishReason.STOP, FinishReason.LENGTH}
    for result in results:
        assert (result.finish_reason is FinishReason.STOP) == (result.tokens[-1] == EOS)
        assert EOS not in result.tokens[:-1]
