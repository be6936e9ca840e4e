"""What an engine reports and what the trainer scores are one number at equal weights, however sampling truncates."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from streamrl.consumers.algorithms.losses import CompletionScorer, TokenBatch, token_losses
from streamrl.consumers.algorithms.settings import AlgorithmSettings
from streamrl.producers.generation.engines.factory import build_engine
from streamrl.producers.generation.engines.port import Engine
from streamrl.producers.generation.engines.threaded import ThreadedEngine
from streamrl.producers.generation.settings import GenerationSettings
from streamrl.schemas.errors import EngineError
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.trajectories import SamplingParams
from tests.producers.generation.engines.conftest import SLOTS, KeptDecoder
from tests.producers.generation.engines.replay import PROMPTS, Sampled, load, sample

TRUNCATIONS: list[dict[str, Any]] = [
    {},
    {"top_p": 0.7},
    {"top_k": 20},
    {"min_p": 0.1},
    {"top_p": 0.7, "top_k": 20},
    {"top_p": 0.9, "top_k": 20, "min_p": 0.1},
]
TEMPERATURES = (1.0, 0.7)
FIRST = PolicyVersion(1, 0)


@asynccontextmanager
async def started(engine: Engine, model: Path) -> AsyncIterator[Engine]:
    """An engine with the model's weights in place."""
    await engine.start()
    try:
        # As in a run, where a worker's first weights are adopted like all others.
        await engine.adopt(model, FIRST)
        yield engine
    finally:
        await engine.close()


async def sampled_with(engine: Engine, temperature: float) -> list[tuple[dict[str, Any], list[Sampled]]]:
    """For each truncation, completions of every prompt, all of one engine that runs them together."""
    return [
        (
            truncation,
            await asyncio.gather(
                *(
                    sample(engine, prompt, max_completion_length=40, temperature=temperature, seed=n, **truncation)
                    for n, prompt in enumerate(PROMPTS)
                )
            ),
        )
        for truncation in TRUNCATIONS
    ]


def scored(scorer: CompletionScorer, one: Sampled, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs as the trainer computes them, and the behaviour's, both [1, prompt and completion]."""
    ids = torch.tensor([one.prompt + one.tokens])
    mask = torch.zeros(ids.shape)
    mask[:, len(one.prompt) :] = 1.0
    behaviour = torch.zeros(ids.shape)
    behaviour[:, len(one.prompt) :] = torch.tensor(one.logprobs)
    return scorer(ids, mask, torch.tensor([temperature]))[0], behaviour


def off_by(scorer: CompletionScorer, samples: Sequence[Sampled], temperature: float) -> float:
    """The largest distance of a token's ratio from 1."""
    with torch.no_grad():
        pairs = [scored(scorer, one, temperature) for one in samples]
    return max((torch.exp(current - behaviour) - 1.0).abs().max().item() for current, behaviour in pairs)


def dead_tokens(scorer: CompletionScorer, samples: Sequence[Sampled], temperature: float, ratio: str) -> int:
    """Tokens of negative advantage that the loss gives no gradient."""
    settings, dead = AlgorithmSettings(ratio=ratio), 0
    for one in samples:
        current, behaviour = scored(scorer, one, temperature)
        current = current.detach().requires_grad_()
        mask = (behaviour != 0.0).float()
        token_losses(settings, TokenBatch(current, behaviour, torch.tensor([-1.0]), mask)).loss.backward()
        assert current.grad is not None
        dead += int(((current.grad == 0.0) & (mask > 0)).sum())
    return dead


def check(
    drawn: list[tuple[dict[str, Any], list[Sampled]]], scorer: CompletionScorer, temperature: float, tolerance: float
) -> None:
    for truncation, samples in drawn:
        distance = off_by(scorer, samples, temperature)
        kept = {ratio: dead_tokens(scorer, samples, temperature, ratio) for ratio in ("behaviour", "proximal")}
        print(f"temperature {temperature} {truncation}: ratio 1 +- {distance:.1e}, A<0 without gradient {kept}")
        assert distance < tolerance, truncation
        assert not any(kept.values()), truncation
    # They did truncate: of the distribution's tail, only the plain one drew.
    tails = [min(logprob for one in samples for logprob in one.logprobs) for _, samples in drawn]
    assert min(tails[1:]) > tails[0]


@pytest.mark.parametrize("temperature", TEMPERATURES)
async def test_logprobs_are_what_the_trainer_computes(undecided_dir: Path, temperature: float) -> None:
    of_the_run = SamplingParams(max_completion_length=40, temperature=temperature, top_p=0.5)
    built = build_engine(GenerationSettings(max_num_seqs=16), undecided_dir, of_the_run)
    async with started(built, undecided_dir) as engine:
        drawn = await sampled_with(engine, temperature)
    check(drawn, CompletionScorer(load(undecided_dir)), temperature, tolerance=1e-5)


@pytest.mark.vllm
async def test_ratios_are_one_with_vllm_which_samples_greedily_or_at_the_runs_temperature(
    truncating_decoder: KeptDecoder, undecided_dir: Path
) -> None:
    # Another implementation of the model, in float32 on a CPU: its rounding is no larger than transformers' own.
    async with started(ThreadedEngine(truncating_decoder, 2 * SLOTS), undecided_dir) as engine:
        drawn = await sampled_with(engine, 0.7)
        greedy = await sample(engine, PROMPTS[3], max_completion_length=20, temperature=0.0, top_k=20)
        with pytest.raises(EngineError, match=r"temperature 1\.0, .* at temperature 0\.7"):
            await sample(engine, PROMPTS[3], max_completion_length=20, temperature=1.0)
    check(drawn, CompletionScorer(load(undecided_dir)), 0.7, tolerance=2e-5)
    ids = torch.tensor([greedy.prompt])
    model = load(undecided_dir)
    whole = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False)
    assert greedy.tokens == whole[0, len(greedy.prompt) :].tolist()
