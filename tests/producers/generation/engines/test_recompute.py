"""Weights arrive while completions run, whose cache is computed anew, or kept, as ``generation.adopt`` says."""

import asyncio
from pathlib import Path

import pytest

from streamrl.producers.generation.engines.factory import build_engine
from streamrl.producers.generation.settings import GenerationSettings
from streamrl.schemas.identifiers import PolicyVersion
from tests.producers.generation.engines.conftest import SLOTS, Build, MakeVersion
from tests.producers.generation.engines.replay import (
    PROMPTS,
    Sampled,
    load,
    mixed_forward,
    sample,
    sample_and_adopt,
    spanwise_forward,
    worst,
)
from tests.producers.generation.engines.test_continuing import ENGINES, PROMPT, continued

FIRST, SECOND = PolicyVersion(1, 0), PolicyVersion(1, 1)
LENGTH = 130


@pytest.mark.parametrize("engine", ENGINES)
async def test_a_recomputed_cache_is_as_if_the_new_weights_had_read_all_of_it(
    build: Build, no_eos_dir: Path, no_eos_version: MakeVersion
) -> None:
    """More completions than slots, so that some wait, begin or sit in a group of one prompt when weights arrive."""
    directories = {FIRST: no_eos_dir} | {PolicyVersion(1, n): no_eos_version(n) for n in (1, 2)}
    models = {version: load(directory) for version, directory in directories.items()}
    running = build(no_eos_dir, chunk_tokens=4, adopt="recompute")
    await running.start()
    try:
        await running.adopt(no_eos_dir, FIRST)
        others = [sample(running, PROMPTS[n % 3], max_completion_length=20 + 11 * n) for n in range(2 * SLOTS)]
        arriving = {version: directories[version] for version in list(directories)[1:]}
        first = sample_and_adopt(running, PROMPTS[3], arriving, max_completion_length=200)
        results = await asyncio.gather(first, *others)
    finally:
        await running.close()
    assert [version for version, _, _ in results[0].spans()] == list(directories)
    assert sum(len(result.spans()) > 1 for result in results) > SLOTS // 2
    for result in results:
        assert worst(result, spanwise_forward(models, result)) < 1e-3
    assert max(worst(result, mixed_forward(models, result)) for result in results) > 0.01


@pytest.mark.parametrize("adopt", ["recompute", "in_flight"])
async def test_a_recomputed_cache_equals_a_fresh_prefill_and_a_kept_one_does_not(
    adopt: str, no_eos_dir: Path, no_eos_version: MakeVersion
) -> None:
    newer = no_eos_version(1)
    whole = await _adopting(adopt, no_eos_dir, newer)
    (_, _, cut), (version, _, _) = whole.spans()
    assert version == SECOND
    fresh = build_engine(GenerationSettings(max_num_seqs=SLOTS, device="cpu"), newer)
    await fresh.start()
    try:
        rest = await continued(fresh, whole.tokens[:cut], max_completion_length=LENGTH, seed=7)
    finally:
        await fresh.close()
    same = rest.tokens == whole.tokens[cut:] and rest.logprobs == pytest.approx(whole.logprobs[cut:], abs=1e-5)
    assert same == (adopt == "recompute")


async def _adopting(adopt: str, first: Path, second: Path) -> Sampled:
    """A completion among others, in the middle of which the second weights arrive."""
    settings = GenerationSettings.model_validate(
        {"max_num_seqs": SLOTS, "device": "cpu", "adopt": adopt, "max_num_batched_tokens": 128}
    )
    running = build_engine(settings, first, chunk_tokens=4)
    await running.start()
    try:
        await running.adopt(first, FIRST)
        beside = [asyncio.create_task(sample(running, p, max_completion_length=LENGTH)) for p in PROMPTS[:4]]
        found = await sample_and_adopt(running, PROMPT, {SECOND: second}, max_completion_length=LENGTH, seed=7)
        await asyncio.gather(*beside)
    finally:
        await running.close()
    return found
