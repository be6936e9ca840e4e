"""The forward pass for plain decoders against the model's own, over the same rows."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from transformers import AutoConfig, AutoModelForCausalLM

from streamrl.producers.generation.engines.model_files import read_facts
from streamrl.producers.generation.engines.own_forward import OwnForward
from streamrl.producers.generation.engines.plain_forward import PlainForward, why_not_plain
from streamrl.producers.generation.engines.slots import SlotForward, SlotModel
from streamrl.producers.generation.settings import GenerationSettings
from tests.producers.generation.engines.slots.test_model import SMALL, write

CLOSE = {torch.float32: 2e-4, torch.bfloat16: 0.25}
"""Largest difference of a logit that is rounding: logits are up to 20 in size, and have 24 or 8 bits."""
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"num_key_value_heads": 2}),
    "llama, tied, grouped": ("llama", {"num_attention_heads": 4, "tie_word_embeddings": True}),
    "llama, stretched": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 100.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
    ),
    "llama, yarn": ("llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0}}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "mistral": ("mistral", {"sliding_window": None, "head_dim": 16}),
}


def build(kind: str, dtype: torch.dtype = torch.float32) -> Any:
    """A random model that is sure of what it says; the same for the same kind."""
    model_type, changes = KINDS[kind]
    torch.manual_seed(3)
    config = AutoConfig.for_model(model_type, **(SMALL | {"num_key_value_heads": 1} | changes))
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False)
    shake(model, 0)
    return model


def shake(model: Any, seed: int) -> None:
    """Other weights, copied over the present ones as an engine does; biases and norms included."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in model.state_dict().values():
        drawn = torch.randn(tensor.shape, generator=generator)
        tensor.copy_(1.0 + 0.3 * drawn if tensor.ndim == 1 else 0.2 * drawn)


def decoded(forward: SlotForward, model: Any) -> Iterator[torch.Tensor]:
    """Logits of some of an engine's work: a group of one prompt, rows that come and go, a larger cache, weights."""
    prompts = [list(range(3, 14)), list(range(20, 25)), [7]]
    positions = torch.tensor([11, 5, 11, 1])
    cache = forward.cache
    cache.reserve(4, 12, 0, 0)
    forward.prefill(prompts, [[0, 2], [1], [3]])

    def step(tokens: list[int]) -> torch.Tensor:
        nonlocal positions
        longest = int(positions.max()) + 1
        cache.reserve(len(tokens), longest, len(tokens), longest - 1)
        logits = forward.decode(torch.tensor(tokens), positions, longest)
        positions = positions + 1
        return logits

    for token in range(30, 34):
        yield step([token, token + 1, token + 2, token + 3])
    # Row 1 ends, and the last one takes its place. Then another prompt comes.
    cache.move(3, 1, int(positions[3]))
    positions = torch.tensor([positions[0], positions[3], positions[2], 3])
    forward.prefill([[40, 41, 42]], [[3]])
    yield step([8, 9, 10, 11])
    shake(model, 1)
    for token in range(40, 60):
        yield step([token, 5, token, 6])
    positions = positions[:1]
    yield step([9])
    cache.release()
    cache.reserve(1, 3, 0, 0)
    forward.prefill([[8, 9]], [[0]])
    yield forward.decode(torch.tensor([10]), torch.tensor([2]), 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_logits_are_those_of_the_models_own_forward(kind: str, dtype: torch.dtype) -> None:
    models = build(kind, dtype), build(kind, dtype)
    assert not why_not_plain(models[0])
    plain, own = PlainForward(models[0]), OwnForward(models[1])
    steps = list(zip(decoded(plain, models[0]), decoded(own, models[1]), strict=True))
    assert len(steps) > 20
    for found, expected in steps:
        assert found.dtype == expected.dtype
        assert (found - expected).abs().max() < CLOSE[dtype]
    assert expected.abs().max() > 2


@torch.inference_mode()
def test_the_models_parameters_are_the_ones_that_are_used() -> None:
    model = build("qwen2")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    PlainForward(model)
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


@pytest.mark.parametrize(
    ("model_type", "changes", "reason"),
    [
        ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}, "a GPT2LMHeadModel"),
        ("llama", {"hidden_act": "gelu"}, "the activation gelu"),
        ("llama", {"mlp_bias": True}, "biases after attention or in the MLP"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 2.0}}, "kind dynamic"),
    ],
)
def test_other_models_use_their_own_forward_and_the_log_says_why(
    tmp_path: Path, model_type: str, changes: dict[str, object], reason: str
) -> None:
    path = write(tmp_path, model_type, **changes)
    with capture_logs() as lines:
        model = SlotModel(path, read_facts(path, None), GenerationSettings(device="cpu"))
    assert isinstance(model._forward, OwnForward)
    (line,) = lines
    assert reason in line["found"]


def test_a_forward_that_differs_from_the_models_own_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, "llama")
    facts = read_facts(path, None)
    assert isinstance(SlotModel(path, facts, GenerationSettings(device="cpu"))._forward, PlainForward)
    monkeypatch.setattr(PlainForward, "_normed", lambda self, hidden, weight: hidden)
    with capture_logs() as lines:
        model = SlotModel(path, facts, GenerationSettings(device="cpu"))
    assert isinstance(model._forward, OwnForward)
    assert "differ by" in lines[0]["found"]
