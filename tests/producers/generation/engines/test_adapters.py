"""Published adapters in both engines: the base is loaded once, and tokens are those of base plus adapter."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from streamrl.producers.generation.engines.factory import build_engine
from streamrl.producers.generation.engines.model_files import base_identity
from streamrl.producers.generation.settings import GenerationSettings
from streamrl.schemas.errors import EngineError, WeightsError
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.weights import WeightAdapter
from streamrl.weights.export import WeightExporter
from tests.producers.generation.engines.replay import PROMPTS, load, mixed_forward, sample, sample_and_adopt, worst
from tests.progress import within

RANK, SCALE = 4, 2.0
LAYERS = [
    f"model.layers.{number}.{name}"
    for number in range(2)
    for name in ("self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")
]
CONFIG = """{"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", "task_type": "CAUSAL_LM",
"target_modules": ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]}"""


def publish(root: Path, base: Path, number: int, *, strength: float, rank: int = RANK) -> Any:
    """An adapter in the store, as a trainer leaves it; the model that it makes of the base."""
    model, tensors = load(base), dict[str, torch.Tensor]()
    generator = torch.Generator().manual_seed(number)
    weights = model.state_dict()
    for layer in LAYERS:
        weight = weights[f"{layer}.weight"]
        a = torch.randn(rank, weight.shape[1], generator=generator)
        b = torch.randn(weight.shape[0], rank, generator=generator) * strength
        tensors |= {f"base_model.model.{layer}.lora_A.weight": a, f"base_model.model.{layer}.lora_B.weight": b}
        weight += SCALE * b @ a
    adapter = WeightAdapter(base_sha256=base_identity(str(base)), rank=rank, scale=SCALE)
    texts, version = {"adapter_config.json": CONFIG}, PolicyVersion(1, number)
    WeightExporter(root, 9).export(tensors, texts, version, number, 0.0, adapter)
    return model


@pytest.mark.parametrize("name", ["transformers", pytest.param("vllm", marks=pytest.mark.vllm)])
async def test_tokens_are_those_of_the_adapter_in_force_also_when_it_changes_in_flight(
    name: str, no_eos_dir: Path, tmp_path: Path
) -> None:
    strengths = {0: 0.0, 1: 0.02, 2: 0.05}
    models = {PolicyVersion(1, n): publish(tmp_path, no_eos_dir, n, strength=by) for n, by in strengths.items()}
    engine = build_engine(GenerationSettings(engine=name, max_num_seqs=8), no_eos_dir, None, RANK, chunk_tokens=4)
    await engine.start()
    try:
        first, *later = models
        await engine.adopt(tmp_path / str(first), first)
        arriving = {version: tmp_path / str(version) for version in later}
        others = [sample(engine, PROMPTS[n % 6], max_completion_length=150) for n in range(6)]
        results = await asyncio.gather(
            sample_and_adopt(engine, PROMPTS[3], arriving, max_completion_length=300), *others
        )
        assert len(results[0].spans()) == 3
        for result in results:
            assert worst(result, mixed_forward(models, result)) < 1e-3
        # The same tokens under the base alone are told apart.
        assert worst(results[0], mixed_forward(dict.fromkeys(models, models[first]), results[0])) > 0.05
        publish(tmp_path, no_eos_dir, 8, strength=0.01)
        (tmp_path / "1-8" / "manifest.json").write_text(
            (tmp_path / "1-8" / "manifest.json").read_text().replace(base_identity(str(no_eos_dir)), "0" * 64)
        )
        with pytest.raises(WeightsError, match=r"expected the base of the adapter \(sha256 000000000000\)"):
            await engine.adopt(tmp_path / "1-8", PolicyVersion(1, 8))
        assert (await sample(engine, PROMPTS[2], max_completion_length=8)).versions[0] == PolicyVersion(1, 2)
        if name == "vllm":
            await _ends_with_its_processes(engine)
    finally:
        await engine.close()


async def _ends_with_its_processes(engine: Any) -> None:
    """A killed core, which nothing can replace within the worker, ends its engine, and whoever waits hears of it."""
    waiting = asyncio.create_task(sample(engine, PROMPTS[1], max_completion_length=900))
    await asyncio.sleep(0.05)
    for process in engine._decoder._core.resources.engine_manager.processes:
        process.kill()
    with pytest.raises(EngineError, match="has ended"):
        await within(waiting, 30)
    with pytest.raises(
        EngineError, match="got one that has not started or has ended: a vLLM process ended, it logged no error"
    ):
        await sample(engine, PROMPTS[1], max_completion_length=5)
