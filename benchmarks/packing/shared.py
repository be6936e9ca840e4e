"""How much faster a group is whose prompt is computed once: forward and backward, against separate documents.

The model has the shape of SmolLM2-135M in two of its 30 layers, with a vocabulary in proportion, so that layers and
output layer have their shares. Ways take turns, and only seconds of one turn are compared.
"""

import gc
import statistics
import time
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from streamrl.consumers.batching.settings import Packing
from streamrl.consumers.training.model import open_scorer
from streamrl.consumers.training.settings import TrainingSettings

LENGTHS = (32, 128, 512, 2048)
GROUPS = (4, 8, 16)
LAYERS, OF_LAYERS, VOCABULARY = 2, 30, 49_152
CELL_SECONDS = 6.0
"""Cells whose separate documents would take longer are skipped; all others together take about four minutes."""


def shared_rows(
    repetitions: int, lengths: Sequence[int] = LENGTHS, groups: Sequence[int] = GROUPS, limit_s: float = CELL_SECONDS
) -> Iterator[dict[str, Any]]:
    """A row for each length of prompt and completion and size of a group; ``speedup`` None: skipped as too long."""
    model = _model(2 * max(lengths))
    probe = _group(32, 32, 4)
    _seconds(model, "padded", probe)  # the first call chooses kernels
    s_per_token = _seconds(model, "padded", probe) / probe[0].numel()
    for size, prompt, completion in product(groups, lengths, lengths):
        tokens = size * (prompt + completion)
        ideal = tokens / (prompt + size * completion)
        row = {"prompt": prompt, "completion": completion, "group": size, "packing": "shared"}
        if s_per_token * tokens > limit_s:
            why = f"separate documents would take more than {limit_s:g} s"
            yield row | {"speedup": None, "ideal": round(ideal, 2), "of_ideal": None, "skipped": why}
            continue
        ratios, seconds = _ratios(model, _group(prompt, completion, size), repetitions)
        s_per_token, speedup = seconds / tokens, statistics.median(ratios)
        found = {"speedup": round(speedup, 2), "ideal": round(ideal, 2), "of_ideal": round(speedup / ideal, 3)}
        yield row | found | {"skipped": None}


def _ratios(model: Any, batch: tuple[Tensor, Tensor], repetitions: int) -> tuple[list[float], float]:
    """Seconds of separate documents over those of shared ones, of each turn; and the last turn's of separate ones."""
    ratios = []
    for _ in range(max(1, repetitions)):
        separate, shared = (_seconds(model, packing, batch) for packing in ("padded", "shared"))
        ratios.append(separate / shared)
    return ratios, separate


def _seconds(model: Any, packing: Packing, batch: tuple[Tensor, Tensor]) -> float:
    scorer = open_scorer(model, TrainingSettings(packing=packing))
    input_ids, mask = batch
    model.zero_grad(set_to_none=True)
    gc.collect()
    began = time.process_time()
    scorer(input_ids, mask, torch.ones(len(input_ids)))[0].sum().backward()
    return time.process_time() - began


def _group(prompt: int, completion: int, size: int) -> tuple[Tensor, Tensor]:
    """Token ids [G, P + C] of a group, and the mask of its completions."""
    random = torch.Generator().manual_seed(0)
    input_ids = torch.randint(0, VOCABULARY * LAYERS // OF_LAYERS, (size, prompt + completion), generator=random)
    input_ids[:, :prompt] = input_ids[0, :prompt]
    mask = torch.zeros(input_ids.shape)
    mask[:, prompt:] = 1.0
    return input_ids, mask


def _model(positions: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY * LAYERS // OF_LAYERS,
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=LAYERS,
            num_attention_heads=9,
            num_key_value_heads=3,
            max_position_embeddings=positions,
            tie_word_embeddings=True,
        )
    ).train()
