"""What computing a sequence costs, in units of a token's own cost: its length, and its square's share. Pure."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from consumers.batching.settings import BatchingSettings

Lengths = NDArray[np.int64]
Costs = NDArray[np.float64]


@dataclass(frozen=True)
class CostModel:
    """cost(L) = linear * L + quadratic * L * L for a sequence of L tokens, and ``launch`` for each micro-batch."""

    linear: float
    quadratic: float
    launch: float

    @classmethod
    def of(cls, settings: BatchingSettings) -> "CostModel":
        """The units are such that a sequence as long as the token budget costs as much as the budget has tokens."""
        budget, share = settings.token_budget, settings.quadratic_share
        return cls(1 - share, share / budget, settings.launch_share * budget)

    def of_sequences(self, lengths: Lengths) -> Costs:
        """Of each sequence by itself; float64 (N)."""
        return self.linear * lengths + self.quadratic * np.square(lengths, dtype=np.float64)

    def of_rows(self, rows: int, width: int) -> float:
        """Of a micro-batch of so many sequences, padded to ``width`` tokens each."""
        return self.launch + rows * (self.linear * width + self.quadratic * width * width)
