"""A model that is small, and sure enough of what it says that a wrong log-probability shows."""

import torch
from transformers import Qwen2ForCausalLM

from benchmarks.small_model import build


def sharp_model(vocabulary: int, positions: int, end: int | None, *, tied: bool = False) -> Qwen2ForCausalLM:
    """A two-layer Qwen2 with sharp random weights, for contexts of so many tokens; token 0 is the pad."""
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    made = build(
        positions,
        7,
        **shape,
        vocab_size=vocabulary,
        num_key_value_heads=1,
        tie_word_embeddings=tied,
        eos_token_id=end,
        dtype=torch.float32,
    )
    model: Qwen2ForCausalLM = made.float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, 0.2)
    return model
