"""Cuts micro-batches of similar lengths as samples arrive, so that the gradient can start before the batch is whole.

Invariant every_sample_is_in_exactly_one_micro_batch: between two flushes, what went in came out once.
"""

from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from consumers.batching.costs import CostModel, Lengths
from consumers.batching.packing import Run, best_run, cheapest_runs
from consumers.batching.samples import MicroBatch, TrainingSample, collate
from consumers.batching.settings import BatchingSettings


class _Held(NamedTuple):
    """A sample in the order of the shelf: longest first, then by name."""

    minus_length: int
    trajectory_id: str
    item: TrainingSample


@dataclass
class MicroBatcher:
    """Holds samples until there is a choice among ``lookahead`` budgets of them, then cuts the run with least padding.

    ``whole_batches``: nothing is cut before the flush, which then sees all samples of the step.
    """

    settings: BatchingSettings
    whole_batches: bool = False
    _held: list[_Held] = field(default_factory=list)
    _tokens: int = 0

    def add(self, samples: Iterable[TrainingSample]) -> list[MicroBatch]:
        """Take samples in; the micro-batches that are due."""
        for item in samples:
            length = item.sample.length
            insort(self._held, _Held(-length, item.sample.ref.trajectory_id, item))
            self._tokens += length
        due: list[MicroBatch] = []
        while not self.whole_batches and self._tokens > self.settings.token_budget * self.settings.lookahead:
            due.append(self._cut_best())
        return due

    def cut_for_idle(self) -> MicroBatch | None:
        """The best micro-batch now, because nothing else is there to be done; none if less than a budget is held."""
        is_enough = self._tokens >= self.settings.token_budget and not self.whole_batches
        return self._cut_best() if is_enough else None

    def flush(self) -> list[MicroBatch]:
        """Everything still held, as the cheapest micro-batches within the budget, longest samples first."""
        runs = cheapest_runs(self._lengths(), self.settings.token_budget, CostModel.of(self.settings))
        rest = [self._collated(run) for run in runs]
        self.clear()
        return rest

    def clear(self) -> None:
        """Forget what is held."""
        self._held.clear()
        self._tokens = 0

    def _cut_best(self) -> MicroBatch:
        run = best_run(self._lengths(), self.settings.token_budget, CostModel.of(self.settings))
        batch = self._collated(run)
        del self._held[run.start : run.end]
        self._tokens -= batch.num_tokens
        return batch

    def _lengths(self) -> Lengths:
        return np.array([-each.minus_length for each in self._held], dtype=np.int64)

    def _collated(self, run: Run) -> MicroBatch:
        return collate([each.item for each in self._held[run.start : run.end]])
