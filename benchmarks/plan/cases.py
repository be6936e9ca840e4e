"""The configurations: those that latencies were estimated from, and ten others that judge the prediction."""

from dataclasses import dataclass, field
from typing import Any

TIME_SCALE = 20.0
STEP_S, BATCH_SCALE = 0.01, 64.0


@dataclass(frozen=True)
class Case:
    """A run. ``ratio``: of training a token to generating it with all slots busy; ``skew``: p99 over the median."""

    name: str
    workers: int
    slots: int
    mode: str
    strategy: str
    groups: int
    samples: int
    ratio: float
    skew: float
    median: float = 500.0
    staleness: int = 1
    predictor: str = "trace"
    extra: dict[str, dict[str, Any]] = field(default_factory=dict)

    def tree(self) -> dict[str, Any]:
        """The configuration."""
        token_s = STEP_S * (1 + self.slots / BATCH_SCALE) / (self.workers * self.slots)
        tree: dict[str, dict[str, Any]] = {
            "run": {"workers": self.workers},
            "data": {"dataset": "chain_sum"},
            "loop": {
                "mode": self.mode,
                "groups_per_step": self.groups,
                "num_generations": self.samples,
                "max_completion_length": 20_000,
                "bucket_boundaries": [250, 500, 1000, 2000],
            },
            "lengths": {"predictor": self.predictor},
            "dispatch": {"strategy": self.strategy},
            "generation": {"engine": "emulated", "max_num_seqs": self.slots},
            "batching": {"token_budget": 16_384},
            "training": {"backend": "emulated"},
            "emulation": {
                "time_scale": TIME_SCALE,
                "decode": {"step_s": STEP_S, "batch_scale": BATCH_SCALE, "adopt_s": 0.1},
                "lengths": {"median_tokens": self.median, "p99_over_median": self.skew, "max_tokens": 20_000},
                "training": {
                    "forward_backward_s_per_token": self.ratio * token_s,
                    "optimizer_step_s": 0.5,
                    "export_s": 0.2,
                },
            },
        }
        if self.mode == "trajectory_async":
            tree["loop"]["max_staleness"] = self.staleness
        for section, values in self.extra.items():
            tree.setdefault(section, {}).update(values)
        return tree


TUNING = (
    Case("tuning: async", 4, 64, "trajectory_async", "least_loaded", 32, 8, 0.5, 10.0, 700.0),
    Case("tuning: synchronous", 4, 32, "synchronous", "lpt", 96, 2, 0.5, 5.0),
    Case("tuning: trainer-bound", 3, 32, "trajectory_async", "lpt", 64, 4, 1.6, 3.0, staleness=2),
)
JUDGED = (
    Case("2 workers, synchronous, round robin", 2, 32, "synchronous", "round_robin", 32, 4, 0.4, 4.0),
    Case("4 workers, stream, longest first", 4, 16, "stream", "lpt", 128, 1, 1.0, 10.0),
    Case("8 workers, one step async, skewness-aware", 8, 64, "one_step_async", "skewness_aware", 512, 1, 1.0, 10.0),
    Case("4 workers, async, trainer-bound", 4, 32, "trajectory_async", "least_loaded", 48, 4, 2.0, 6.0, staleness=2),
    Case("3 workers, async, stale", 3, 48, "trajectory_async", "skewness_aware", 64, 2, 0.3, 10.0, staleness=4),
    Case("6 workers, stream, very skewed", 6, 32, "stream", "skewness_aware", 192, 1, 0.8, 20.0, 300.0),
    Case("8 workers, synchronous, skewness-aware", 8, 32, "synchronous", "skewness_aware", 256, 1, 0.6, 8.0),
    Case("2 workers, one step async, hardly skewed", 2, 64, "one_step_async", "lpt", 24, 8, 0.5, 2.5),
    Case(
        "5 workers, async, lengths unknown", 5, 24, "trajectory_async", "round_robin", 60, 2, 0.7, 10.0,
        predictor="observed_quantiles",
    ),
    Case(
        "6 workers, stream, StreamRL's lengths", 6, 64, "stream", "round_robin", 40, 8, 0.7, 1.0,
        extra={"emulation": {"lengths": {"source": "histogram", "factor": 0.2}}},
    ),
)  # fmt: skip
