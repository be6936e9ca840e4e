"""A tiny character model with its tokenizer, in a Hugging Face directory."""

from pathlib import Path
from typing import Any

from benchmarks.small_model import build, save

CHARACTERS = 95  # of printable ASCII
SHAPE: dict[str, Any] = {
    "vocab_size": 2 + CHARACTERS,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}


def save_tiny_model(directory: Path) -> Path:
    """The directory, with the model in it."""
    return save(build(128, **SHAPE), directory)
