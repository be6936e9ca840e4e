"""What padding costs in processor time: the same samples forward and backward, padded as the trainer does and packed.

*Packed* is what trainers with variable-length attention do: sequences stand one behind the other in one row, positions
begin anew with each, and attention stays within a sequence. There is no kernel for that on a CPU, so attention is
called once for each sequence, which costs it calls that a kernel would save.
"""

import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from benchmarks.packing.trial import at_random, streamed, varlen_packs, whole
from consumers.algorithms.losses import CompletionScorer
from consumers.batching.micro_batches import MicroBatch, TrainingSample, collate
from consumers.batching.settings import BatchingSettings

PACKED = "one_call_a_sequence"
WAYS = {"at random": at_random, "streamed": streamed, "whole batch": whole}


class PackedModel:
    """A causal model over rows of several sequences. Its weights are the model's own."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._bounds: list[tuple[int, int]] = []
        ALL_ATTENTION_FUNCTIONS.register(PACKED, self._attend)

    def loss(self, samples: Sequence[TrainingSample]) -> Tensor:
        """Minus the sum of advantage-weighted log-probs of what ``loss_mask`` marks; a scalar."""
        batch = collate(list(samples))
        lengths = [int(length) for length in batch.lengths]
        ends = np.cumsum(lengths)
        self._bounds = [(int(end) - length, int(end)) for end, length in zip(ends, lengths, strict=True)]

        def packed(rows: Any) -> Tensor:  # [B, S] becomes [T], padding left out
            return torch.cat([torch.as_tensor(row[:length]) for row, length in zip(rows, lengths, strict=True)])

        input_ids, mask = packed(batch.input_ids), packed(batch.loss_mask)
        positions = torch.cat([torch.arange(length) for length in lengths])
        mask = mask * (positions > 0)
        trained = torch.nonzero(mask).squeeze(1)
        advantages = torch.as_tensor(batch.advantages).repeat_interleave(torch.tensor(lengths))[trained]
        self._model.set_attn_implementation(PACKED)
        try:
            states = self._model.get_decoder()(
                input_ids=input_ids.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False
            ).last_hidden_state[0]
        finally:
            self._model.set_attn_implementation("sdpa")
        logits = self._model.get_output_embeddings()(states[trained - 1]).float()
        targets = input_ids[trained].unsqueeze(1)
        logprobs = logits.gather(1, targets).squeeze(1) - torch.logsumexp(logits, dim=-1)
        return -(logprobs * advantages).sum()

    def _attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
    ) -> tuple[Tensor, None]:
        """[1, heads, T, size] each; causal within each sequence, and nothing between them."""
        repeats, scale = module.num_key_value_groups, options.get("scaling")
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
        pieces = [
            functional.scaled_dot_product_attention(
                query[:, :, start:end], key[:, :, start:end], value[:, :, start:end], is_causal=True, scale=scale
            )
            for start, end in self._bounds
        ]
        return torch.cat(pieces, dim=2).transpose(1, 2).contiguous(), None


def padded_loss(scorer: CompletionScorer, batch: MicroBatch) -> Tensor:
    """The same of a padded micro-batch, scored as the trainer scores it."""
    mask = torch.tensor(batch.loss_mask)
    mask[:, 0] = 0.0
    logprobs, _ = scorer(torch.as_tensor(batch.input_ids), mask, torch.as_tensor(batch.temperatures))
    return -(logprobs * torch.as_tensor(batch.advantages).unsqueeze(1) * mask).sum()


def computed(
    model: Any, arrivals: Sequence[TrainingSample], settings: BatchingSettings, repetitions: int
) -> Iterator[dict[str, Any]]:
    """A row for each way: processor seconds of all samples once, forward and backward, over those packed.

    Ways take turns, and only seconds of one turn are compared.
    """
    scorer, packed_model = CompletionScorer(model), PackedModel(model)
    cuts = {name: way(arrivals, settings) for name, way in WAYS.items()}
    packs = varlen_packs(arrivals, settings)
    seconds: dict[str, list[float]] = {name: [] for name in [*cuts, "packed"]}
    for turn in range(repetitions + 1):
        names = list(seconds)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            began = time.process_time()
            if name == "packed":
                for pack in packs:
                    packed_model.loss(pack).backward()
            else:
                for batch in cuts[name]:
                    padded_loss(scorer, batch).backward()
            seconds[name].append(time.process_time() - began)
            model.zero_grad(set_to_none=True)
    for name, found in seconds.items():
        # The first turn is not counted: memory is allocated, and kernels are chosen.
        ratios = [own / other for own, other in zip(found[1:], seconds["packed"][1:], strict=True)]
        yield {
            "way": name,
            "micro_batches": len(packs) if name == "packed" else len(cuts[name]),
            "cpu_seconds": round(statistics.median(found[1:]), 3),
            "over_packed": round(statistics.median(ratios) - 1, 4),
            "over_packed_range": [round(min(ratios) - 1, 4), round(max(ratios) - 1, 4)],
        }
