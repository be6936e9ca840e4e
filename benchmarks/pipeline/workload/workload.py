"""The workloads: so many workers and slots, so many prompts a step, lengths with a heavy tail."""

import math
import random
from dataclasses import dataclass, field
from statistics import NormalDist

from schemas.profiles import DecodeCurve, DecodeSettings

_P99 = NormalDist().inv_cdf(0.99)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """``cap``: most tokens of a completion. ``max_staleness``: of the mode ``trajectory_async``.

    ``train_ratio``: training time of a token as a multiple of its generation time with all slots busy.
    """

    name: str
    groups_per_step: int
    cap: int
    max_staleness: int
    workers: int = 8
    slots: int = 64
    median: float = 1000.0
    p99_over_median: float = 10.0
    train_ratio: float = 1.0
    decode: DecodeSettings = field(default_factory=DecodeSettings)

    @property
    def curve(self) -> DecodeCurve:
        """Seconds of a decode step by batch size."""
        return DecodeCurve(self.decode)

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second of all workers with all slots busy."""
        return self.workers * self.slots / self.curve.batch_s(self.slots)

    @property
    def train_s_per_token(self) -> float:
        """Emulated seconds of forward and backward for a token."""
        return self.train_ratio / self.tokens_per_s

    @property
    def sigma(self) -> float:
        """Standard deviation of the logarithm of a length."""
        return math.log(self.p99_over_median) / _P99

    def bounded(self, length: float) -> int:
        """Whole tokens, from 1 to the cap."""
        return max(1, min(self.cap, round(length)))

    def lengths(self, count: int, seed: int) -> list[int]:
        """Independent draws."""
        rng = random.Random(f"lengths/{seed}")
        return [self.bounded(self.median * math.exp(self.sigma * rng.gauss(0.0, 1.0))) for _ in range(count)]


WORKLOADS = {
    "a": Workload(name="a", groups_per_step=2048, cap=10_000, max_staleness=4),
    "b": Workload(name="b", groups_per_step=512, cap=20_000, max_staleness=16),
}
"""a: the throughput of the slots rules. b: the longest completion of a step does."""
