"""The demo's policy: a Qwen2 of about a million parameters, before it has learnt anything. Knows no task."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.demo.tokenizer import EOS, PAD, build_tokenizer


@dataclass(frozen=True)
class ModelShape:
    """Sizes of the Qwen2; heads of 32 are the smallest that vLLM's CPU attention takes."""

    hidden_size: int = 128
    intermediate_size: int = 384
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 4
    vocab_size: int = 320
    max_position_embeddings: int = 128
    initializer_range: float = 0.03


def build_model(shape: ModelShape, seed: int) -> Any:
    """A ``Qwen2ForCausalLM`` in float32 with random weights, the same ones for a seed."""
    import torch
    from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

    tokenizer = build_tokenizer()
    eos, pad = tokenizer.convert_tokens_to_ids([EOS, PAD])
    config = Qwen2Config(
        **vars(shape), tie_word_embeddings=False, bos_token_id=None, eos_token_id=eos, pad_token_id=pad, dtype="float32"
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=eos, pad_token_id=pad)  # type: ignore[no-untyped-call]
    return model


def save(model: Any, directory: Path) -> None:
    """Write model and tokenizer as a directory for ``from_pretrained`` and for vLLM."""
    model.save_pretrained(directory)
    build_tokenizer().save_pretrained(directory)
