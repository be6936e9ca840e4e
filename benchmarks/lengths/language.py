"""The language model of the comparison: a Qwen2 of two layers, 64 wide, that reads bytes and has never read any.

It starts from random weights, because no weights come with this repository; a pretrained one starts further ahead.
"""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.lengths.trial import loop_of
from benchmarks.lengths.workload import Policy, Task
from producers.lengths.learned.predictor import LearnedLengths
from producers.lengths.predictor import ObservedCompletion
from producers.lengths.settings import LengthSettings


def save_small(folder: Path) -> Path:
    """Random weights and a tokenizer of bytes, as ``from_pretrained`` reads them."""
    import torch
    from transformers import Qwen2Config, Qwen2Model

    from streamrl.demo.task import build_tokenizer

    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    config: Any = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=1026,
    )
    Qwen2Model(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def fine_tuned(policy: Policy, tasks: Sequence[Task], seed: int, epochs: float, scratch: Path) -> LearnedLengths:
    """A predictor over the model, fine-tuned to the completions that ``trial.teach`` teaches."""
    import torch

    from producers.lengths.language_model import FineTuning
    from producers.lengths.offline import fit_language_model

    torch.set_num_threads(1)
    rng = random.Random(f"teach/{seed}/0")
    completions = [
        ObservedCompletion(task.prompt, f"{task.prompt.prompt_id}/0", policy.sample(task, rng))
        for task in tasks
        for _ in range(policy.samples)
    ]
    fit_language_model(
        completions, save_small(scratch / "base"), scratch / "models", 0.9, 0.0, FineTuning(epochs=epochs)
    )
    settings = LengthSettings(predictor="language_model", model_dir=scratch / "models", refit="off")
    return LearnedLengths(settings, loop_of(policy))
