"""A tiny random Qwen2 and hand-made samples."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from streamrl.consumers.batching.micro_batches import MicroBatch
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.reports import RecordRef
from streamrl.schemas.trajectories import FinishReason, Trajectory
from tests.fakes import messages

VOCABULARY = 23
FIRST = PolicyVersion(1, 0)
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}
"""Of a configuration, whichever architecture it is of."""


def tiny_config(**changes: Any) -> Qwen2Config:
    return Qwen2Config(**(SMALL | {"tie_word_embeddings": True} | changes))


def save_tiny_model(directory: Path, **changes: Any) -> Path:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    Qwen2ForCausalLM(tiny_config(**changes)).save_pretrained(directory)
    (directory / "tokenizer_config.json").write_text('{"model_max_length": 64}')
    return directory


def make_trajectory(
    group_id: str = "p/0/0",
    sample_index: int = 0,
    *,
    num_generations: int = 2,
    reward: float = 1.0,
    prompt: Sequence[int] = (1, 2, 3),
    tokens: Sequence[int] = (4, 5, 6, 7),
    version: PolicyVersion = FIRST,
    finish_reason: FinishReason = FinishReason.STOP,
    created_at: float = 0.0,
) -> Trajectory:
    length = len(tokens)
    return messages.trajectory(
        group_id,
        sample_index,
        length,
        num_generations=num_generations,
        prompt_token_ids=np.array(prompt, dtype="<i4"),
        token_ids=np.array(tokens, dtype="<i4"),
        logprobs=np.full(length, -3.0, dtype="<f4"),
        rewards={"exact": reward},
        version=version,
        finish_reason=finish_reason,
        created_at=created_at,
    )


def make_micro_batch(
    count: int, seed: int = 0, *, temperature: float = 1.0, advantages: Sequence[float] | None = None
) -> MicroBatch:
    """Random sequences: three prompt tokens, then one to nine completion tokens."""
    random = np.random.default_rng(seed)
    lengths = random.integers(4, 13, size=count)
    input_ids = np.zeros((count, int(lengths.max())), dtype=np.int64)
    masks = np.zeros_like(input_ids, dtype=np.float32)
    behaviour = np.zeros_like(masks)
    for row, length in enumerate(lengths):
        input_ids[row, :length] = random.integers(1, VOCABULARY, size=length)
        masks[row, 3:length] = 1.0
        behaviour[row, 3:length] = -random.uniform(2.5, 3.8, size=length - 3)
    return MicroBatch(
        input_ids=input_ids,
        loss_mask=masks,
        behaviour_logprobs=behaviour,
        advantages=np.array(random.normal(size=count) if advantages is None else advantages, dtype=np.float32),
        lengths=lengths.astype(np.int64),
        refs=tuple(RecordRef(f"p/{seed}/0/{row}", 0, row) for row in range(count)),
        temperatures=np.full(count, temperature, dtype=np.float32),
    )


def split_micro_batch(batch: MicroBatch, sizes: Sequence[int]) -> list[MicroBatch]:
    """The same samples in several micro-batches, in order."""
    parts = []
    start = 0
    for size in sizes:
        parts.append(batch.take(range(start, start + size)))
        start += size
    return parts
