"""The transformers engine against transformers' own forward pass and generate."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from streamrl.producers.generation.engines.port import ActiveCompletion
from streamrl.producers.generation.engines.slots import SlotDecoder
from streamrl.producers.generation.engines.threaded import ThreadedEngine
from streamrl.producers.generation.settings import GenerationSettings
from streamrl.schemas.errors import ModelError, PromptRefused, WeightsError
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.trajectories import FinishReason
from tests.producers.generation.engines.conftest import EOS, MakeVersion
from tests.producers.generation.engines.replay import (
    full_forward,
    load,
    mixed_forward,
    request,
    sample,
    sample_and_adopt,
    worst,
)
from tests.progress import within

SLOTS = 8
PROMPTS = [[5 + i + j for j in range(1 + 3 * i)] for i in range(6)]


def make_engine(model: Path, chunk_tokens: int = 4, **settings: int) -> ThreadedEngine:
    wanted = GenerationSettings.model_validate({"max_num_seqs": SLOTS, "device": "cpu", **settings})
    return ThreadedEngine(SlotDecoder(str(model), wanted), wanted.max_num_seqs, chunk_tokens)


@pytest.fixture
async def engine(model_dir: Path) -> AsyncIterator[ThreadedEngine]:
    engine = make_engine(model_dir)
    await engine.start()
    yield engine
    await engine.close()


@pytest.fixture
async def no_eos_engine(no_eos_dir: Path) -> AsyncIterator[ThreadedEngine]:
    engine = make_engine(no_eos_dir)
    await engine.start()
    yield engine
    await engine.close()


async def test_logprobs_equal_a_fresh_forward_pass(engine: ThreadedEngine, model_dir: Path) -> None:
    runs = [sample(engine, prompt, max_completion_length=60, seed=n) for n in range(5) for prompt in PROMPTS]
    model = load(model_dir)
    results = await asyncio.gather(*runs)
    assert {result.finish_reason for result in results} == {FinishReason.STOP, FinishReason.LENGTH}
    for result in results:
        assert worst(result, full_forward(model, result)) < 1e-4
        assert (result.finish_reason is FinishReason.STOP) == (result.tokens[-1] == EOS)
        assert EOS not in result.tokens[:-1]
        assert result.finish_reason is FinishReason.STOP or len(result.tokens) == 60


async def test_batch_composition_does_not_change_what_a_request_gets(engine: ThreadedEngine) -> None:
    alone = await sample(engine, PROMPTS[3], max_completion_length=50, temperature=0.8, seed=11)
    crowd = [sample(engine, PROMPTS[n % 6], max_completion_length=10 + 3 * n, seed=n) for n in range(20)]
    among = (
        await asyncio.gather(*crowd, sample(engine, PROMPTS[3], max_completion_length=50, temperature=0.8, seed=11))
    )[-1]
    assert among.tokens == alone.tokens
    assert worst(among, torch.tensor(alone.logprobs)) < 1e-4


async def test_samples_of_one_prompt_differ_and_are_right(no_eos_engine: ThreadedEngine, no_eos_dir: Path) -> None:
    group = await asyncio.gather(*(sample(no_eos_engine, PROMPTS[4], max_completion_length=20) for _ in range(SLOTS)))
    assert len({tuple(result.tokens) for result in group}) == SLOTS
    model = load(no_eos_dir)
    assert all(worst(result, full_forward(model, result)) < 1e-4 for result in group)


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"top_k": 1}, {"temperature": 1e-4}])
async def test_greedy_equals_generate(engine: ThreadedEngine, model_dir: Path, sampling: dict[str, float]) -> None:
    results = await asyncio.gather(*(sample(engine, p, max_completion_length=30, **sampling) for p in PROMPTS))
    model = load(model_dir)
    for result in results:
        ids = torch.tensor([result.prompt])
        whole = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=30, do_sample=False)
        assert result.tokens == whole[0, len(result.prompt) :].tolist()


async def test_spans_agree_with_their_versions_when_weights_arrive_in_flight(
    no_eos_engine: ThreadedEngine, no_eos_dir: Path, no_eos_version: MakeVersion
) -> None:
    directories = {PolicyVersion(0, 0): no_eos_dir} | {PolicyVersion(1, n): no_eos_version(n) for n in (1, 2, 3)}
    models = {version: load(directory) for version, directory in directories.items()}
    others = [sample(no_eos_engine, PROMPTS[n % 6], max_completion_length=400, seed=n) for n in range(2 * SLOTS)]
    arriving = {version: directories[version] for version in list(directories)[1:]}
    first = sample_and_adopt(no_eos_engine, PROMPTS[3], arriving, max_completion_length=900)
    results = await asyncio.gather(first, *others)
    assert len(results[0].spans()) == 4
    for result in results:
        assert worst(result, mixed_forward(models, result)) < 1e-3
        if min((end - start for _, start, end in result.spans()[1:]), default=0) > 10:
            assert worst(result, mixed_forward(dict.fromkeys(models, models[PolicyVersion(0, 0)]), result)) > 0.05
        if len(result.spans()) == 1:
            assert worst(result, full_forward(models[result.versions[0]], result)) < 1e-4


async def test_refused_weights_change_nothing(no_eos_engine: ThreadedEngine, tmp_path: Path, no_eos_dir: Path) -> None:
    with pytest.raises(WeightsError):
        await no_eos_engine.adopt(tmp_path, PolicyVersion(1, 1))
    result = await sample(no_eos_engine, PROMPTS[2], max_completion_length=10)
    assert set(result.versions) == {PolicyVersion(0, 0)}
    assert worst(result, full_forward(load(no_eos_dir), result)) < 1e-4


async def test_closing_the_iterator_frees_the_slot(no_eos_engine: ThreadedEngine) -> None:
    abandoned = [no_eos_engine.generate(request(PROMPTS[n % 6], max_completion_length=900)) for n in range(SLOTS)]
    for stream in abandoned:
        async with aclosing(stream):  # type: ignore[type-var]
            await anext(stream)
    result = await within(sample(no_eos_engine, PROMPTS[0], max_completion_length=5), 5)
    assert len(result.tokens) == 5


async def test_a_prompt_that_does_not_fit_is_refused(no_eos_engine: ThreadedEngine) -> None:
    causes = {"no tokens": [], "longer than 1023 tokens": [1] * 1024, "token ids above the model's 128": [128]}
    for cause, prompt in causes.items():
        with pytest.raises(PromptRefused, match="expected") as refusal:
            await sample(no_eos_engine, prompt, max_completion_length=5)
        assert refusal.value.cause == cause
    assert (await sample(no_eos_engine, [1] * 1023, max_completion_length=5)).finish_reason is FinishReason.LENGTH


async def test_the_context_ends_a_completion(no_eos_dir: Path) -> None:
    engine = make_engine(no_eos_dir, max_model_len=20)
    await engine.start()
    result = await sample(engine, PROMPTS[2], max_completion_length=500)
    assert (len(result.tokens), result.finish_reason) == (20 - len(PROMPTS[2]), FinishReason.LENGTH)
    await engine.close()


async def test_prompts_beyond_the_token_budget_are_prefilled_in_several_passes(no_eos_dir: Path) -> None:
    engine = make_engine(no_eos_dir, max_num_batched_tokens=64)
    await engine.start()
    prompts = [[(7 * n + j) % 128 for j in range(10 * n + 1)] for n in range(SLOTS)]
    results = await asyncio.gather(*(sample(engine, prompt, max_completion_length=5) for prompt in prompts))
    model = load(no_eos_dir)
    assert all(worst(result, full_forward(model, result)) < 1e-4 for result in results)
    await engine.close()


@pytest.mark.parametrize(("interactive", "steps"), [(False, 4), (True, 1)])
async def test_a_request_that_waits_for_its_first_token_is_prefilled_at_once(
    no_eos_dir: Path, interactive: bool, steps: int
) -> None:
    """One slot of eight stands idle: by itself it is refilled once that has gone on for four steps."""
    decoder = make_engine(no_eos_dir)._decoder
    decoder.load()
    first = ActiveCompletion(request(PROMPTS[1], max_completion_length=50), 50, 0)
    decoder.queue(first)
    decoder.step()
    others = [ActiveCompletion(request(PROMPTS[0], max_completion_length=50), 50, n) for n in range(7)]
    for other in others[:6]:
        decoder.queue(other)
    while not all(other.generated for other in others[:6]):
        decoder.step()
    late = ActiveCompletion(replace(request(PROMPTS[2], max_completion_length=50), interactive=interactive), 50, 9)
    decoder.queue(late)
    taken = 0
    while not late.generated:
        decoder.step()
        taken += 1
    assert taken == steps
    decoder.close()


async def test_a_missing_model_is_one_line(tmp_path: Path) -> None:
    engine = make_engine(tmp_path / "nowhere")
    with pytest.raises(ModelError, match="nowhere"):
        await engine.start()
    await engine.close()
