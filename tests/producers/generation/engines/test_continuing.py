"""A completion goes on behind tokens that were sampled before, elsewhere or with other weights, in every engine."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from streamrl.producers.generation.engines.factory import build_engine
from streamrl.producers.generation.engines.port import Engine, GenerationRequest, Interrupted
from streamrl.producers.generation.rollout import SampledCompletion
from streamrl.producers.generation.settings import GenerationSettings
from streamrl.producers.generation.tokenizer import ModelTokenizer
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.trajectories import FinishReason
from tests.producers.generation.engines import replay
from tests.producers.generation.engines.conftest import EOS, SLOTS, Build, MakeVersion
from tests.producers.generation.engines.replay import Sampled, full_forward, load, sample

PROMPT = [5, 6, 7, 8]
LENGTH = 40
ENGINES = [
    "transformers",
    pytest.param("vllm", marks=pytest.mark.vllm),
]
FIRST, SECOND = PolicyVersion(1, 0), PolicyVersion(1, 1)


async def continued(engine: Engine, prefix: Sequence[int], **sampling: Any) -> Sampled:
    """What comes behind a prefix."""
    found = Sampled([*PROMPT, *prefix])
    async for delta in engine.generate(replace(replay.request(PROMPT, **sampling), prefix_token_ids=list(prefix))):
        found.tokens.extend(delta.token_ids)
        found.logprobs.extend(delta.logprobs)
        found.versions.extend([delta.version] * len(delta.token_ids))
        found.finish_reason = delta.finish_reason
    return found


@pytest.mark.parametrize("engine", ENGINES)
async def test_a_completion_continues_after_its_earlier_tokens(
    build: Build, no_eos_dir: Path, no_eos_version: MakeVersion
) -> None:
    running = build(no_eos_dir)
    wanted: dict[str, Any] = {"max_completion_length": LENGTH, "temperature": 0.0}
    newer = no_eos_version(3)
    await running.start()
    try:
        await running.adopt(no_eos_dir, FIRST)
        whole = await sample(running, PROMPT, **wanted)
        parts = {cut: await continued(running, whole.tokens[:cut], **wanted) for cut in (1, 17, LENGTH - 1)}
        nothing = await continued(running, whole.tokens, **wanted)
        said = ModelTokenizer(str(no_eos_dir)).decode
        stop = said(whole.tokens[:14])[len(said(whole.tokens[:11])) :]
        end = next(n for n in range(1, LENGTH) if stop in said(whole.tokens[:n]))
        stopped = [await continued(running, whole.tokens[:cut], stop=(stop,), **wanted) for cut in range(1, end + 2)]
        await running.adopt(newer, SECOND)
        other = await continued(running, whole.tokens[:20], max_completion_length=LENGTH)
    finally:
        await running.close()
    for cut, rest in parts.items():
        assert rest.tokens == whole.tokens[cut:]
        assert rest.finish_reason is FinishReason.LENGTH
        assert rest.logprobs == pytest.approx(whole.logprobs[cut:], abs=1e-3)
    assert (nothing.tokens, nothing.finish_reason) == ([], FinishReason.LENGTH)
    # Wherever the seam lies, in front of the stop string, within it or behind it.
    assert [rest.tokens for rest in stopped[:-1]] == [whole.tokens[cut:end] for cut in range(1, end + 1)]
    assert stopped[-1].tokens == []
    assert {rest.finish_reason for rest in stopped} == {FinishReason.STOP}
    # With other weights than the prefix's: the log-probs are those of a fresh forward pass of theirs over all of it.
    assert set(other.versions) == {SECOND}
    assert len(other.tokens) == LENGTH - 20
    assert torch.tensor(other.logprobs) == pytest.approx(full_forward(load(newer), other), abs=1e-3)


@pytest.mark.parametrize("engine", ENGINES)
async def test_an_interrupted_completion_continues_after_its_last_token(build: Build, no_eos_dir: Path) -> None:
    """Tokens that were gathered and not handed over yet come first; so nothing is sampled twice."""
    running = build(no_eos_dir, chunk_tokens=1000)
    wanted: dict[str, Any] = {"max_completion_length": 100, "temperature": 0.0}
    await running.start()
    try:
        await running.adopt(no_eos_dir, FIRST)
        whole = await sample(running, PROMPT, **wanted)
        asked = [replay.request(PROMPT, **wanted) for _ in range(SLOTS + 1)]
        found = [SampledCompletion() for _ in asked]
        tasks = [asyncio.create_task(_take(running, *pair)) for pair in zip(asked, found, strict=True)]
        # New weights hand over what there is, so they tell how far it is.
        while not any(one.token_ids for one in found):
            await running.adopt(no_eos_dir, SECOND)
        assert all(running.interrupt(one.request_id) for one in asked)
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(one) for one in ended] == [Interrupted] * len(asked)
        assert not running.interrupt(asked[0].request_id)
        assert len(found[-1].token_ids) == 0  # it waited for a slot
        rest = await continued(running, found[0].token_ids, **wanted)
    finally:
        await running.close()
    assert 0 < len(found[0].token_ids) < 100
    assert [*found[0].token_ids, *rest.tokens] == whole.tokens


async def _take(engine: Engine, asked: GenerationRequest, found: SampledCompletion) -> None:
    async for delta in engine.generate(asked):
        found.extend(delta)


async def test_requests_with_a_seed_draw_what_they_would_have_drawn(no_eos_dir: Path) -> None:
    running = build_engine(GenerationSettings(max_num_seqs=4, device="cpu"), no_eos_dir)
    await running.start()
    try:
        whole = await sample(running, PROMPT, max_completion_length=LENGTH, seed=5)
        rest = await continued(running, whole.tokens[:13], max_completion_length=LENGTH, seed=5)
    finally:
        await running.close()
    assert rest.tokens == whole.tokens[13:]


async def test_a_prefix_that_ended_by_itself_is_whole(model_dir: Path) -> None:
    running = build_engine(GenerationSettings(max_num_seqs=4, device="cpu"), model_dir)
    await running.start()
    try:
        found = await continued(running, [9, 10, EOS], max_completion_length=LENGTH)
    finally:
        await running.close()
    assert (found.tokens, found.finish_reason) == ([], FinishReason.STOP)
