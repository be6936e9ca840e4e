"""Two engines of vLLM in one process, which started at once, each in a thread of its own."""

import asyncio
from pathlib import Path

import pytest

from streamrl.producers.generation.engines.threaded import ThreadedEngine
from streamrl.schemas.identifiers import PolicyVersion
from tests.producers.generation.engines.conftest import SLOTS, KeptDecoder
from tests.producers.generation.engines.replay import PROMPTS, full_forward, load, sample, worst

pytestmark = pytest.mark.vllm

FIRST = PolicyVersion(1, 0)


async def test_two_engines_that_started_at_once_sample_each_from_its_own_weights(
    vllm_decoders: tuple[KeptDecoder, KeptDecoder], no_eos_dir: Path, undecided_dir: Path
) -> None:
    models = (no_eos_dir, undecided_dir)
    engines = [ThreadedEngine(decoder.of(model), SLOTS) for decoder, model in zip(vllm_decoders, models, strict=True)]
    for engine in engines:
        await engine.start()
    try:
        for engine, model in zip(engines, models, strict=True):
            await engine.adopt(model, FIRST)
        found = await asyncio.gather(
            *(
                sample(engine, PROMPTS[n], max_completion_length=40, temperature=0.7)
                for engine in engines
                for n in (2, 4)
            )
        )
    finally:
        for engine in engines:
            await engine.close()
    for number, result in enumerate(found):
        own, other = (load(models[which]) for which in (number // 2, 1 - number // 2))
        assert worst(result, full_forward(own, result, temperature=0.7)) < 1e-3
        assert worst(result, full_forward(other, result, temperature=0.7)) > 0.05
    # What each of their processes tells, it tells its own engine.
    groups = [decoder._group for decoder in vllm_decoders]
    assert groups[0].errors.path != groups[1].errors.path
    for group in groups:
        (core,) = group._processes
        assert core.member.errors == group.errors.path
        assert core.member.environment["OMP_NUM_THREADS"] == "1"
