"""Results of a replay, as plain values for tables and JSON, without tensors and texts."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from streamrl.consumers.training.ports import StepOutcome
from streamrl.inspection.replay.comparing import TensorEquality, TrajectoryContribution, UpdateComparison

Verdict = Literal["bit-equal", "differs", "not recorded"]


@dataclass(frozen=True)
class MetricPair:
    """A metric as the trainer recorded it (None: it was not finite, or not recorded), and its value in the replay."""

    name: str
    recorded: float | None
    rebuilt: float

    @property
    def equal(self) -> bool:
        """Whether both are equal to the last bit. A value that is not finite equals None."""
        return self.recorded == self.rebuilt or (self.recorded is None and not math.isfinite(self.rebuilt))


@dataclass(frozen=True)
class RebuiltStep:
    """A step taken again under the run's own settings.

    ``version``: the weights after the step (before it, if the trainer refused the step). ``start``: the restore point,
    in words; ``steps_between``: number of steps replayed between it and this step; ``differing_between``: those of them
    whose result is not as recorded. ``problem``: why the replay did not apply the gradient, empty if it did;
    ``recorded_problem``: the same, by the trainer. ``gradient_norms``: L2 norms by tensor. ``left_out``: trajectories
    that are not in the gradient, and why.
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
        """``bit-equal`` if the recorded weights are equal. Without recorded weights the metrics decide.

        Equal metrics do not prove equal weights. So the verdict is then ``not recorded``; or ``bit-equal`` if the step
        was refused, because a refused step has no weights.
        """
        # If only one of trainer and replay applied the gradient, they differ, even if all tensors are equal.
        if bool(self.problem) != self.refused or not all(tensor.equal for tensor in self.tensors):
            return "differs"
        if self.tensors:
            return "bit-equal"
        if not all(pair.equal for pair in self.metrics):
            return "differs"
        return "bit-equal" if self.refused else "not recorded"

    def is_near(self, tolerance: float) -> bool:
        """Whether loss and gradient norm are within this relative tolerance of the record, and a refusal is the same.

        For steps of several ranks: a replay on one rank sums in another order, so the last bits may differ.
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
        """A metric by name; NaN if the replay has none."""
        found = next((pair for pair in self.metrics if pair.name == name), None)
        return found or MetricPair(name, None, math.nan)


@dataclass(frozen=True)
class WhatIf:
    """The same step from the same weights under ``changes``. ``metrics``: (original, what-if) by name.

    ``problem``: why the what-if did not apply its gradient; empty if it did. ``update``: both updates compared; None if
    one of the two was not applied.
    """

    changes: tuple[str, ...]
    problem: str
    metrics: Mapping[str, tuple[float, float]]
    update: UpdateComparison | None
    rows: tuple[TrajectoryContribution, ...]


@dataclass(frozen=True)
class StepReplay:
    """One step, and the what-if if one was requested."""

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
    """``culprits``: minimal sets whose share of the gradient is above ``threshold`` or not finite, largest first.

    An extreme reward changes the advantages of its whole group, so it may make other members culprits, too.
    ``gradient_norm``: of the whole step. ``median``: of the recorded norms before the step; None if the threshold was
    given. ``without_culprits``: the norm without the culprits, with the whole step's scale. ``ranking``: all rows,
    largest share first. ``computed``: number of gradients that were computed.
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
    """A step's metrics that depend only on weights and batch, and not on time or machine."""
    return tuple(MetricPair(name, recorded.get(name), value) for name, value in sorted(outcome.metrics.items()))
