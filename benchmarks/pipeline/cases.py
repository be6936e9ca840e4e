"""What is measured: a workload, a mode, a dispatch strategy, a ranker, and the ceiling the issue gives for them."""

import re
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from benchmarks.pipeline.workload.workload import WORKLOADS, Workload

Mode = Literal["synchronous", "stream", "one_step_async", "trajectory_async"]
Ranker = Literal["perfect", "learned", "none"]


def slug(name: str) -> str:
    """A name for files and topics."""
    return re.sub("[^a-z0-9]", "-", name)


@dataclass(frozen=True)
class Case:
    """``ceiling``: its throughput as a multiple of the synchronous mode's with round robin, with perfect knowledge.

    ``warm_up`` steps are dropped and ``steps`` measured. ``options``: further values of ``[lengths]``. ``slowed``: the
    time scale is divided by it, for a ranker that learns: the processor time it takes is real and is not scaled.
    """

    workload: Workload
    mode: Mode
    dispatch: str
    ranker: Ranker = "none"
    ceiling: float | None = None
    warm_up: int = 1
    steps: int = 4
    options: dict[str, Any] = field(default_factory=dict)
    slowed: float = 1.0

    @property
    def name(self) -> str:
        """For files, topics and --only."""
        ranker = "" if self.ranker == "none" else f"-{self.ranker}"
        return slug(f"{self.workload.name}-{self.mode}-{self.dispatch}{ranker}")

    @property
    def predictor(self) -> str:
        """The value of ``lengths.predictor``."""
        return {"perfect": "trace", "learned": "learned", "none": "constant"}[self.ranker]


A, B = WORKLOADS["a"], WORKLOADS["b"]
HEAVIER = replace(A, name="sweep/p99_over_median=30", groups_per_step=1024, p99_over_median=30.0)
SLOWED = 2.5
FEWER = replace(A, name="sweep/workers=4", groups_per_step=512, workers=4)
CASES = (
    Case(A, "synchronous", "round_robin", ceiling=1.0),
    Case(A, "synchronous", "skewness_aware", "perfect", steps=3),
    Case(A, "synchronous", "skewness_aware", "learned", warm_up=4, steps=3, slowed=SLOWED),
    Case(A, "stream", "round_robin", ceiling=1.60, steps=3),
    Case(A, "stream", "skewness_aware", "perfect", ceiling=1.86),
    Case(A, "stream", "skewness_aware", "learned", ceiling=1.86, warm_up=4, slowed=SLOWED),
    Case(A, "one_step_async", "round_robin", ceiling=1.61, warm_up=2),
    Case(A, "one_step_async", "skewness_aware", "perfect", ceiling=2.20, warm_up=2),
    Case(A, "one_step_async", "skewness_aware", "learned", ceiling=2.20, warm_up=4, slowed=SLOWED),
    Case(A, "trajectory_async", "round_robin", ceiling=2.65, warm_up=4, steps=5),
    Case(A, "trajectory_async", "skewness_aware", "perfect", ceiling=2.65, warm_up=4, steps=5),
    Case(B, "synchronous", "round_robin", ceiling=1.0, steps=8),
    Case(B, "trajectory_async", "skewness_aware", "perfect", ceiling=6.8, warm_up=20, steps=24),
    Case(HEAVIER, "synchronous", "round_robin", steps=1),
    Case(HEAVIER, "one_step_async", "skewness_aware", "perfect", warm_up=2, steps=2),
    Case(FEWER, "synchronous", "round_robin", steps=1),
    Case(FEWER, "one_step_async", "skewness_aware", "perfect", warm_up=2, steps=2),
)
"""``synchronous`` with round robin is what the others of its workload are compared with. The last four check points of
the sweeps.
"""
