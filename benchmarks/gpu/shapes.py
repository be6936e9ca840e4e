"""Models of real sizes with random weights: what is computed and moved is a real one's, what is said is noise."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.memory import SHAPES as KNOWN
from benchmarks.gpu.memory import KnownModel

POSITIONS = 4096
_BY_NAME = {known.name: known for known in KNOWN}


@dataclass(frozen=True)
class Shape:
    """``known``: sizes as the planner computes with them. ``family``: of transformers."""

    known: KnownModel
    family: str
    vocabulary: int = 151_936
    head_width: int = 128
    is_tied: bool = True

    def config(self) -> Any:
        """Of transformers."""
        import transformers

        sizes = {
            "vocab_size": self.vocabulary,
            "hidden_size": self.known.width,
            "intermediate_size": self.known.feed_forward,
            "num_hidden_layers": self.known.layers,
            "num_attention_heads": self.known.attention_width // self.head_width,
            "num_key_value_heads": self.known.kv_width // self.head_width,
            "head_dim": self.head_width,
        }
        ends = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": None}
        return getattr(transformers, f"{self.family}Config")(
            **sizes, **ends, max_position_embeddings=POSITIONS, tie_word_embeddings=self.is_tied, dtype="bfloat16"
        )


SHAPES = {
    shape.known.name: shape
    for shape in (
        Shape(KnownModel("tiny", 94.7e3, 2, 64, 32, 128, 64), "Qwen3", vocabulary=320, head_width=32),
        Shape(_BY_NAME["Qwen2.5-1.5B"], "Qwen2"),
        Shape(_BY_NAME["Qwen3-4B"], "Qwen3"),
        Shape(_BY_NAME["Qwen3-8B"], "Qwen3", is_tied=False),
    )
}
"""``tiny`` is for trying the benchmark out where there is no device."""


def save(shape: Shape, directory: Path, device: str) -> Path:
    """Make the model on the device, and write it, in bfloat16, as ``from_pretrained`` and vLLM read it."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(shape.config(), dtype=torch.bfloat16)
    model.generation_config.eos_token_id = None
    model.save_pretrained(directory)
    return directory
