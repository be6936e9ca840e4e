"""A tiny character model with its tokenizer, in a Hugging Face directory."""

from pathlib import Path

from benchmarks.small_model import END, PAD, save

CHARACTERS = 95  # of printable ASCII


def save_tiny_model(directory: Path) -> Path:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=2 + CHARACTERS,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=128,
        eos_token_id=END,
        pad_token_id=PAD,
        bos_token_id=None,
    )
    return save(Qwen2ForCausalLM(config), directory)
