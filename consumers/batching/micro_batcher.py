"""Cuts micro-batches of similar lengths as samples arrive, so that the gradient can start before the batch is whole.

Invariant every_sample_is_in_exactly_one_micro_batch: between two flushes, what went in came out once.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from consumers.batching.samples import MicroBatch, TrainingSample, collate
from consumers.batching.settings import BatchingSettings


@dataclass
class MicroBatcher:
    """Holds samples until ``lookahead`` budgets are there, then cuts the longest ones that fill one budget."""

    settings: BatchingSettings
    pending: list[TrainingSample] = field(default_factory=list)

    def add(self, samples: Iterable[TrainingSample]) -> list[MicroBatch]:
        """Take samples in; the micro-batches that became full."""
        self.pending += samples
        full: list[MicroBatch] = []
        while self._padded() > self.settings.token_budget * self.settings.lookahead and len(self.pending) > 1:
            full.append(self._cut())
        return full

    def flush(self) -> list[MicroBatch]:
        """Everything still held, as micro-batches within the budget."""
        rest: list[MicroBatch] = []
        while self.pending:
            rest.append(self._cut())
        return rest

    def clear(self) -> None:
        """Forget what is held."""
        self.pending.clear()

    def _padded(self) -> int:
        return len(self.pending) * max((item.sample.length for item in self.pending), default=0)

    def _cut(self) -> MicroBatch:
        """The longest samples whose padded size stays within the budget; one alone if it exceeds it."""
        self.pending.sort(key=lambda item: (-item.sample.length, item.sample.ref.trajectory_id))
        rows = max(1, self.settings.token_budget // max(1, self.pending[0].sample.length))
        taken, self.pending = self.pending[:rows], self.pending[rows:]
        return collate(taken)
