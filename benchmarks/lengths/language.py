"""The language models of the comparison.

``language_model`` is a Qwen2 of two layers, 64 wide, that reads bytes and has never read any: it starts from random
weights. ``language_model_smollm2`` starts from SmolLM2-135M-Instruct, as ``lengths.base_model`` would.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.lengths.trial import completions_of, loop_of
from benchmarks.lengths.workload import Policy, Task
from streamrl.producers.lengths.learned.predictor import LearnedLengths
from streamrl.producers.lengths.settings import LengthSettings


def save_small(folder: Path) -> Path:
    """Random weights and a tokenizer of bytes, as ``from_pretrained`` reads them."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2Model

    torch.manual_seed(0)
    alphabet = {"<pad>": 0} | {letter: 1 + n for n, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    config: Any = Qwen2Config(
        vocab_size=len(alphabet),
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=1026,
    )
    Qwen2Model(config).save_pretrained(folder)
    special = {"pad_token": "<pad>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    return folder


def fine_tuned(
    policy: Policy, tasks: Sequence[Task], seed: int, epochs: float, scratch: Path, base: Path | None = None
) -> LearnedLengths:
    """A predictor over a model, fine-tuned once to the completions that ``trial.teach`` teaches.

    ``base``: what it starts from; none: the small one.
    """
    import torch

    from streamrl.producers.lengths.learned.language_model import FineTuning
    from streamrl.producers.lengths.learned.offline import fit_language_model

    torch.set_num_threads(1)
    fit_language_model(
        completions_of(policy, tasks, seed),
        base or save_small(scratch / "base"),
        scratch / "models",
        0.9,
        0.0,
        FineTuning(epochs=epochs),
    )
    settings = LengthSettings(predictor="language_model", model_dir=scratch / "models", refit="off")
    return LearnedLengths(settings, loop_of(policy))
