"""Tiny models with fixed random weights and a tokenizer of letters, in the format of `from_pretrained`."""

import string
from pathlib import Path
from typing import Any, Literal


def save_tiny(folder: Path, kind: Literal["causal", "encoder"] = "causal") -> Path:
    import torch
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    letters = ["[PAD]", "[UNK]", *string.printable]
    raw = Tokenizer(models.WordLevel({letter: index for index, letter in enumerate(letters)}, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    fast: Any = PreTrainedTokenizerFast
    tokenizer = fast(tokenizer_object=raw, pad_token="[PAD]", unk_token="[UNK]")
    sizes: dict[str, Any] = {
        "vocab_size": len(letters),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
    }
    torch.manual_seed(0)
    model: Any
    if kind == "causal":
        model = Qwen2ForCausalLM(Qwen2Config(**sizes, num_attention_heads=2, num_key_value_heads=2))
    else:
        model = BertModel(BertConfig(**sizes, num_attention_heads=2))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
