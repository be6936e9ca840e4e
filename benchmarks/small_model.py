"""A Qwen2 of a million parameters with random weights, and a tokenizer of one token a character.

Heads of 32 are the smallest that vLLM's CPU attention takes. What it says is noise; what it costs is not.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

VOCABULARY = 320
PAD, END = 0, 1


def build(positions: int, seed: int = 0, **changes: Any) -> Any:
    """The model, for contexts of so many tokens; ``changes``: to its config."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    config: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": positions,
        "tie_word_embeddings": True,
        "eos_token_id": END,
        "pad_token_id": PAD,
        "bos_token_id": None,
    }
    return Qwen2ForCausalLM(Qwen2Config(**config | changes))


def save(model: Any, directory: Path, ends: Sequence[int] = (END,)) -> Path:
    """A directory for ``from_pretrained`` and vLLM; ``ends``: tokens that end a completion, if any do."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # Printable ASCII behind pad and end; what else a prompt has becomes the pad token.
    pad, end = "<pad>", "<eos>"
    characters = {chr(code): 2 + number for number, code in enumerate(range(32, 127))}
    tokenizer = Tokenizer(models.WordLevel({pad: PAD, end: END, **characters}, unk_token=pad))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=pad, eos_token=end).save_pretrained(directory)
    model.save_pretrained(directory)
    set_ends(directory, ends)
    return directory


def set_ends(directory: Path, ends: Sequence[int]) -> None:
    """Let a saved model's completions end with these tokens; with none, as long as they may be."""
    named = ends[0] if len(ends) == 1 else list(ends) or None
    files: dict[str, tuple[str, Any]] = {
        "config.json": ("eos_token_id", named),
        "generation_config.json": ("eos_token_id", named),
    }
    files["tokenizer_config.json"] = ("eos_token", "<eos>" if END in ends else None)
    for name, (key, value) in files.items():
        content = json.loads((directory / name).read_text())
        (directory / name).write_text(json.dumps(content | {key: value}))
