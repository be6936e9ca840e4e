"""Cuts micro-batches of similar lengths as samples arrive, so that the gradient can start before the batch is whole.

Invariant every_sample_is_in_exactly_one_micro_batch: between two flushes, what went in came out once.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate

from consumers.batching.samples import MicroBatch, TrainingSample, collate
from consumers.batching.settings import BatchingSettings


@dataclass
class MicroBatcher:
    """Holds samples until ``lookahead`` budgets are there, then cuts those that fill one budget with least padding."""

    settings: BatchingSettings
    pending: list[TrainingSample] = field(default_factory=list)

    def add(self, samples: Iterable[TrainingSample]) -> list[MicroBatch]:
        """Take samples in; the micro-batches that became full."""
        self.pending += samples
        self._sort()
        full: list[MicroBatch] = []
        while self._tokens() > self.settings.token_budget * self.settings.lookahead and len(self.pending) > 1:
            full.append(self._cut(self._densest()))
        return full

    def flush(self) -> list[MicroBatch]:
        """Everything still held, as micro-batches within the budget."""
        rest: list[MicroBatch] = []
        while self.pending:
            rest.append(self._cut(0))
        return rest

    def clear(self) -> None:
        """Forget what is held."""
        self.pending.clear()

    def _sort(self) -> None:
        self.pending.sort(key=lambda item: (-item.sample.length, item.sample.ref.trajectory_id))

    def _tokens(self) -> int:
        return sum(item.sample.length for item in self.pending)

    def _rows(self, longest: int) -> int:
        """Samples whose padded size stays within the budget; one if it exceeds it alone."""
        return max(1, self.settings.token_budget // max(1, longest))

    def _densest(self) -> int:
        """Where the run of samples starts that fills a budget with the smallest share of padding.

        Cutting the longest instead would leave only short ones for the next long one to be padded with.
        """
        sums = [0, *accumulate(item.sample.length for item in self.pending)]
        best, best_share = 0, 0.0
        for start, item in enumerate(self.pending):
            rows = self._rows(item.sample.length)
            if start + rows > len(self.pending):
                break  # shorter ones need even more rows
            share = (sums[start + rows] - sums[start]) / max(1, rows * item.sample.length)
            if share > best_share:
                best, best_share = start, share
        return best

    def _cut(self, start: int) -> MicroBatch:
        end = start + self._rows(self.pending[start].sample.length)
        taken = self.pending[start:end]
        del self.pending[start:end]
        return collate(taken)
