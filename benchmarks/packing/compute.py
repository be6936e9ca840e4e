"""What padding costs in processor time: the same samples forward and backward, padded and packed, by one scorer.

*Packed* is ``training.packing = "varlen"``: documents stand one behind the other in one row, positions begin anew with
each, and attention stays within a document. On a CPU attention is called once for each, which costs it calls that a
kernel for all of them would save.
"""

import copy
import statistics
import time
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.packing.trial import at_random, streamed, streamed_packs, whole
from streamrl.consumers.algorithms.losses import CompletionScorer
from streamrl.consumers.batching.micro_batches import MicroBatch, TrainingSample
from streamrl.consumers.batching.settings import BatchingSettings
from streamrl.consumers.training.model import open_scorer
from streamrl.consumers.training.settings import TrainingSettings

PACKED = "packed"
WAYS = {"at random": at_random, "streamed": streamed, "whole batch": whole, PACKED: streamed_packs}


def loss_of(scorer: CompletionScorer, batch: MicroBatch) -> Tensor:
    """Minus the sum of advantage-weighted log-probs of what ``loss_mask`` marks; a scalar."""
    mask = torch.tensor(batch.loss_mask)
    mask[:, 0] = 0.0
    logprobs, _ = scorer(torch.as_tensor(batch.input_ids), mask, torch.as_tensor(batch.temperatures))
    return -(logprobs * torch.as_tensor(batch.advantages).unsqueeze(1) * mask).sum()


def computed(
    model: Any,
    arrivals: Sequence[TrainingSample],
    settings: BatchingSettings,
    repetitions: int,
    names: Collection[str] = tuple(WAYS),
    *,
    in_bfloat16: bool = False,
) -> Iterator[dict[str, Any]]:
    """A row for each of these ways: processor seconds of all samples once, forward and backward, over those packed.

    Ways take turns, and only seconds of one turn are compared. ``in_bfloat16``: as ``training.dtype`` has it, the
    weights in float32.
    """
    # Of a copy: a model that packs has another attention from then on.
    padded, packed = CompletionScorer(model), open_scorer(copy.deepcopy(model), TrainingSettings(packing="varlen"))
    cuts = {name: way(arrivals, settings) for name, way in WAYS.items() if name in names}
    tokens = sum(item.sample.length for item in arrivals)
    seconds: dict[str, list[float]] = {name: [] for name in cuts}
    for turn in range(repetitions + 1):
        order = list(seconds)
        for name in order[turn % len(order) :] + order[: turn % len(order)]:
            began = time.process_time()
            for batch in cuts[name]:
                with torch.autocast("cpu", torch.bfloat16, enabled=in_bfloat16):
                    loss = loss_of(packed if name == PACKED else padded, batch)
                loss.backward()
            seconds[name].append(time.process_time() - began)
    for name, found in seconds.items():
        # The first turn is not counted: memory is allocated, and kernels are chosen.
        ratios = [own / other for own, other in zip(found[1:], seconds[PACKED][1:], strict=True)]
        middle = statistics.median(found[1:])
        yield {
            "way": name,
            "micro_batches": len(cuts[name]),
            "cpu_seconds": round(middle, 3),
            "tokens_per_cpu_second": round(tokens / middle),
            "over_packed": round(statistics.median(ratios) - 1, 4),
            "over_packed_range": [round(min(ratios) - 1, 4), round(max(ratios) - 1, 4)],
        }
