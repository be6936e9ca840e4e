"""Which models the slots can run."""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from streamrl.producers.generation.engines.model_files import read_facts
from streamrl.producers.generation.engines.slots import SlotModel
from streamrl.producers.generation.settings import GenerationSettings
from streamrl.schemas.errors import ModelError

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def write(directory: Path, model_type: str, **changes: object) -> str:
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **(SMALL | changes))
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return str(directory)


def build(path: str) -> SlotModel:
    return SlotModel(path, read_facts(path, None), GenerationSettings(device="cpu"))


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "qwen3", "gpt_neox", "phi", "mistral"])
def test_models_with_standard_attention_are_accepted(tmp_path: Path, model_type: str) -> None:
    changes: dict[str, object] = {}
    if model_type == "gpt2":
        changes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}
    if model_type in ("mistral", "qwen3"):
        changes = {"num_key_value_heads": 1, "sliding_window": None}
    build(write(tmp_path, model_type, **changes))


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("mistral", {"num_key_value_heads": 1, "sliding_window": 32}),
        ("bloom", {"n_layer": 2, "n_head": 2}),
        ("mamba", {"state_size": 8, "num_hidden_layers": 2}),
    ],
)
def test_a_model_whose_attention_is_not_standard_is_refused(
    tmp_path: Path, model_type: str, changes: dict[str, object]
) -> None:
    with pytest.raises(ModelError, match="use the vllm engine") as caught:
        build(write(tmp_path, model_type, **changes))
    assert "\n" not in str(caught.value)
