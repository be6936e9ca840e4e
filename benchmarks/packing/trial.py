"""Ways to make micro-batches of the same trajectories, and what each wastes."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.packing.rounds import Round, deal, split_to_multiple, waiting_share
from streamrl.consumers.batching.micro_batches import (
    LOOKAHEAD,
    CostModel,
    MicroBatch,
    MicroBatcher,
    TrainingSample,
    cheapest_runs,
    collate,
)
from streamrl.consumers.batching.settings import BatchingSettings
from streamrl.consumers.training.metrics import PaddingMetrics
from streamrl.schemas.settings import LoopSettings

RANKS = (2, 4, 8)
Way = Callable[[Sequence[TrainingSample], BatchingSettings], list[MicroBatch]]


def at_random(arrivals: Sequence[TrainingSample], settings: BatchingSettings) -> list[MicroBatch]:
    """Filled in the order of arrival, each until the next sample would exceed the budget."""
    found: list[MicroBatch] = []
    pending: list[TrainingSample] = []
    for item in arrivals:
        width = max(each.sample.length for each in (*pending, item))
        if pending and (len(pending) + 1) * width > settings.token_budget:
            found.append(collate(pending))
            pending = []
        pending.append(item)
    return [*found, collate(pending)]


def streamed(
    arrivals: Sequence[TrainingSample], settings: BatchingSettings, lookahead: float = LOOKAHEAD
) -> list[MicroBatch]:
    """As the trainer cuts them when there are always more samples than it can compute."""
    batcher = MicroBatcher(settings, lookahead=lookahead)
    found = [batch for item in arrivals for batch in batcher.hold([item])]
    return found + batcher.flush()


def streamed_to_an_idle_trainer(arrivals: Sequence[TrainingSample], settings: BatchingSettings) -> list[MicroBatch]:
    """As the trainer cuts them when it has nothing to do after each sample."""
    batcher = MicroBatcher(settings)
    found: list[MicroBatch] = []
    for item in arrivals:
        found += batcher.hold([item])
        if (batch := batcher.cut_for_idle()) is not None:
            found.append(batch)
    return found + batcher.flush()


def whole(arrivals: Sequence[TrainingSample], settings: BatchingSettings) -> list[MicroBatch]:
    """As the trainer cuts them in ``synchronous`` mode: all samples are known."""
    batcher = MicroBatcher(settings, whole_batches=True)
    batcher.hold(arrivals)
    return batcher.flush()


def streamed_packs(arrivals: Sequence[TrainingSample], settings: BatchingSettings) -> list[MicroBatch]:
    """As ``streamed``, with ``training.packing = "varlen"``."""
    batcher = MicroBatcher(settings, packing="varlen")
    found = [batch for item in arrivals for batch in batcher.hold([item])]
    return found + batcher.flush()


@dataclass(frozen=True)
class Waste:
    """Of one way. ``padding``: share of positions; ``fill``: tokens of a micro-batch; ``excess``: cost of padding and
    launches, over that of the samples by themselves; ``waiting``: by number of ranks, as they come and as dealt.
    """

    padding: float
    by_bucket: dict[str, float]
    micro_batches: int
    fill: float
    excess: float
    waiting: dict[str, float]
    us_per_sample: float

    def row(self) -> dict[str, Any]:
        """For the result file."""
        numbers = {f"padding_{name}": value for name, value in self.by_bucket.items()} | {
            f"waiting_{name}": value for name, value in self.waiting.items()
        }
        return {
            "padding": round(self.padding, 4),
            "micro_batches": self.micro_batches,
            "mean_fill_tokens": round(self.fill),
            "cost_over_useful": round(self.excess, 4),
            "us_per_sample": round(self.us_per_sample, 1),
            **{name: round(value, 4) for name, value in numbers.items()},
        }


def try_out(way: Way, arrivals: Sequence[TrainingSample], settings: BatchingSettings) -> Waste:
    """Cut, and look at what came of it."""
    began = time.process_time()
    batches = way(arrivals, settings)
    taken_s = time.process_time() - began
    model = CostModel.of(settings.token_budget)
    padding = PaddingMetrics()
    for batch in batches:
        padding.observe(batch, shards=LoopSettings.shards)
    found = padding.summary()
    costs = [_cost(model, *batch.input_ids.shape) for batch in batches]
    useful = sum(float(model.of_sequences(batch.lengths).sum()) for batch in batches)
    return Waste(
        padding=found["padding/all"],
        by_bucket={name.removeprefix("padding/"): value for name, value in found.items() if "bucket" in name},
        micro_batches=len(batches),
        fill=sum(batch.num_tokens for batch in batches) / len(batches),
        excess=sum(costs) / useful - 1,
        waiting=_waiting(batches, costs, settings, is_whole=way is whole),
        us_per_sample=taken_s / len(arrivals) * 1e6,
    )


def try_out_packed(arrivals: Sequence[TrainingSample], settings: BatchingSettings) -> Waste:
    """The same of sequences that are packed without padding: launches are all that is wasted."""
    began = time.process_time()
    packs = streamed_packs(arrivals, settings)
    taken_s = time.process_time() - began
    model = CostModel.of(settings.token_budget)
    useful = [float(model.of_sequences(pack.lengths).sum()) for pack in packs]
    costs = [model.fixed + own for own in useful]
    found: dict[str, float] = {}
    for ranks in RANKS:
        found[f"{ranks}_as_they_come"] = waiting_share(costs, _as_they_come(len(costs), ranks))
        found[f"{ranks}_dealt"] = waiting_share(costs, deal(costs, ranks))
    return Waste(
        padding=0.0,
        by_bucket={},
        micro_batches=len(packs),
        fill=sum(pack.num_tokens for pack in packs) / len(packs),
        excess=sum(costs) / sum(useful) - 1,
        waiting=found,
        us_per_sample=taken_s / len(arrivals) * 1e6,
    )


def _waiting(
    batches: Sequence[MicroBatch], costs: Sequence[float], settings: BatchingSettings, *, is_whole: bool
) -> dict[str, float]:
    found: dict[str, float] = {}
    for ranks in RANKS:
        found[f"{ranks}_as_they_come"] = waiting_share(costs, _as_they_come(len(costs), ranks))
        dealt = _evened_costs(batches, settings, ranks) if is_whole else list(costs)
        found[f"{ranks}_dealt"] = waiting_share(dealt, deal(dealt, ranks))
    return found


def _as_they_come(count: int, ranks: int) -> list[Round]:
    numbers = [*range(count), *[None] * (-count % ranks)]
    return [tuple(numbers[first : first + ranks]) for first in range(0, len(numbers), ranks)]


def _evened_costs(batches: Sequence[MicroBatch], settings: BatchingSettings, ranks: int) -> list[float]:
    """Of the whole batch, cut into as many micro-batches as make whole rounds."""
    model = CostModel.of(settings.token_budget)
    lengths = np.sort(np.concatenate([batch.lengths for batch in batches]))[::-1]
    runs = split_to_multiple(cheapest_runs(lengths, settings.token_budget, model), ranks)
    return [_cost(model, run.end - run.start, int(lengths[run.start])) for run in runs]


def _cost(model: CostModel, rows: int, width: int) -> float:
    """Of a micro-batch of so many sequences, padded to ``width`` tokens each."""
    return model.fixed + rows * (model.linear * width + model.quadratic * width * width)
