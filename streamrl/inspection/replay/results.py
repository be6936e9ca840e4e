"""What a replay found out, as plain values for tables and JSON. Knows no tensors and no texts."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from streamrl.consumers.training.ports import StepOutcome
from streamrl.inspection.replay.comparing import TensorEquality, TrajectoryContribution, UpdateComparison

Verdict = Literal["bit-equal", "differs", "not recorded"]


@dataclass(frozen=True)
class MetricPair:
    """A number as the trainer recorded it (None: it was not finite, or not recorded) and as it came out now."""

    name: str
    recorded: float | None
    rebuilt: float

    @property
    def equal(self) -> bool:
        """Equal to the last bit; what is not finite is not recorded."""
        return self.recorded == self.rebuilt or (self.recorded is None and not math.isfinite(self.rebuilt))


@dataclass(frozen=True)
class RebuiltStep:
    """A step taken again under the run's own settings.

    ``version``: of the weights after it (before it, if it was refused).

    ``start``: what it was rebuilt from, over ``steps_between`` further steps, of which ``differing_between`` did not
    come out as recorded. ``problem``: why the gradient was not applied; empty if it was.
    """

    step: int
    version: str
    refused: bool
    start: str
    steps_between: int
    differing_between: tuple[int, ...]
    problem: str
    recorded_problem: str
    metrics: tuple[MetricPair, ...]
    tensors: tuple[TensorEquality, ...]
    gradient_norms: Mapping[str, float]
    rows: tuple[TrajectoryContribution, ...]
    left_out: tuple[tuple[str, str], ...]

    @property
    def verdict(self) -> Verdict:
        """Of the weights, if there is something to compare them with; else of the numbers.

        Equal numbers alone do not prove equal weights: then it is ``not recorded``, unless the step was refused and has
        no weights after it.
        """
        # Applied where it was refused, or the other way round: there is no need to look at the tensors.
        if bool(self.problem) != self.refused or not all(tensor.equal for tensor in self.tensors):
            return "differs"
        if self.tensors:
            return "bit-equal"
        if not all(pair.equal for pair in self.metrics):
            return "differs"
        return "bit-equal" if self.refused else "not recorded"

    def is_near(self, tolerance: float) -> bool:
        """Whether loss and gradient norm are as recorded up to this relative difference, and the step was taken alike.

        Of a step that several ranks took: their sums come in another order, so its last bits are not to be had.
        """
        pairs = [self.metric(name) for name in ("loss", "grad_norm")]
        near = all(
            pair.equal
            or (
                pair.recorded is not None
                and math.isclose(pair.recorded, pair.rebuilt, rel_tol=tolerance, abs_tol=tolerance / 100)
            )
            for pair in pairs
        )
        return near and bool(self.problem) == self.refused

    def metric(self, name: str) -> MetricPair:
        """A number by its name; NaN if it did not come out."""
        found = next((pair for pair in self.metrics if pair.name == name), None)
        return found or MetricPair(name, None, math.nan)


@dataclass(frozen=True)
class WhatIf:
    """The same step from the same weights under ``changes``. Numbers by name: (original, what-if).

    ``update`` None: one of the two was not applied.
    """

    changes: tuple[str, ...]
    problem: str
    metrics: Mapping[str, tuple[float, float]]
    update: UpdateComparison | None
    rows: tuple[TrajectoryContribution, ...]


@dataclass(frozen=True)
class StepReplay:
    """One step, and how it compares with a what-if if one was asked for."""

    rebuilt: RebuiltStep
    what_if: WhatIf | None = None


@dataclass(frozen=True)
class GradientOutlier:
    """A trajectory of a step, with its texts."""

    row: TrajectoryContribution
    group_id: str
    prompt: str
    completion: str


@dataclass(frozen=True)
class BisectionResult:
    """``culprits``: minimal sets whose share of the gradient alone is above ``threshold`` or not finite, largest first.

    A culprit of the same group as a larger one may be there for that one's reward, from which its advantage comes.
    ``median``: of the recorded norms before the step, None if the threshold was given. ``ranking``: all rows, largest
    share first. ``without_culprits``: norm of what is left, by the same scale. ``computed``: gradients that it took.
    """

    step: int
    refused: bool
    gradient_norm: float
    threshold: float
    median: float | None
    culprits: tuple[tuple[GradientOutlier, ...], ...]
    without_culprits: float
    ranking: tuple[TrajectoryContribution, ...]
    computed: int


def metric_pairs(outcome: StepOutcome, recorded: Mapping[str, float]) -> tuple[MetricPair, ...]:
    """The numbers of a step that are functions of weights and batch: none that measures time or place."""
    return tuple(MetricPair(name, recorded.get(name), value) for name, value in sorted(outcome.metrics.items()))
