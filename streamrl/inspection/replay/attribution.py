"""Finds the trajectories that cause a gradient spike: sets whose share of the step's gradient exceeds a threshold.

The gradient of a set S is g(S) = s × sum over S of the gradient of a trajectory's summed token losses, from the weights
that the step started from and with the whole step's scale s. So g of all trajectories is the step's gradient, and
||g(S)|| measures the share of S in it. A set "fails" if ||g(S)|| is above the threshold or not finite.

Minimal failing sets are found by delta debugging (ddmin, Zeller and Hildebrandt 2002), with bisection as its first
steps: one culprit among n takes about 2 log2(n) gradients instead of n. Norms do not add up, since shares may cancel
each other. So sets are tried, and not only single trajectories.

Invariant each_result_is_a_minimal_failing_set: each result is 1-minimal, that is, it fails, and it does not fail if any
one of its members is removed.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Generic, TypeVar

from streamrl.inspection.replay.comparing import TrajectoryContribution, measure_contributions
from streamrl.inspection.replay.replayer import Replayer
from streamrl.inspection.replay.results import BisectionResult, GradientOutlier
from streamrl.inspection.replay.scratch_policy import ScratchPolicy
from streamrl.inspection.replay.steps import Step, StepBatch, StepLog, recorded_batch, segment_with
from streamrl.schemas.errors import UserError
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.reports import RefusedStep

T = TypeVar("T")

STEPS_BEFORE = 20
"""Number of steps whose recorded norms give the median: enough for a median, few enough to follow training."""
TIMES_MEDIAN = 10.0
"""A gradient norm this many times above the median is a spike, well above the noise between steps."""


async def find_gradient_outliers(
    replayer: Replayer, log: StepLog, step: Step, lineage: int | None = None, above: float | None = None
) -> BisectionResult:
    """The culprits of one step. ``above``: the threshold; None: ``TIMES_MEDIAN`` times the norm's median before it.

    Raises:
        UserError: no earlier norm is recorded, or the step cannot be rebuilt.
    """
    median = None if above is not None else median_norm(log, step.step, lineage)
    threshold = above if above is not None else TIMES_MEDIAN * (median or 0.0)
    prepared = await replayer.prepare(log, step, lineage)
    groups = await replayer.groups(step)
    batch = recorded_batch(groups, step.micro_batches, replayer.config.algorithm, prepared.policy.limits)
    found = await replayer.compute(
        _search,
        prepared.policy,
        batch,
        PolicyVersion(step.version.lineage, step.step - 1),
        threshold,
        replayer.progress,
    )
    return replace(found, step=step.step, refused=isinstance(step, RefusedStep), median=median)


def median_norm(log: StepLog, step: int, lineage: int | None = None) -> float:
    """Median of the recorded gradient norms of the ``STEPS_BEFORE`` steps before a step.

    Raises:
        UserError: none of them has a recorded norm.
    """
    chain = log.chain(lineage)
    versions = [
        PolicyVersion(segment.lineage, number)
        for number in range(max(1, step - STEPS_BEFORE), step)
        if (segment := segment_with(chain, number)) is not None
    ]
    norms = [
        norm
        for version in versions
        if (report := log.reports.get(version)) is not None and (norm := report.metrics.get("grad_norm")) is not None
    ]
    if not norms:
        raise UserError(f"expected recorded gradient norms of steps before {step}, got none; give --above NORM")
    return statistics.median(norms)


def _search(
    policy: ScratchPolicy, batch: StepBatch, version: PolicyVersion, threshold: float, progress: Callable[[str], None]
) -> BisectionResult:
    # Every subset has the whole step's scale. With a scale of its own, its norm would not be its share of the step.
    scale = policy.scale(batch)
    computed: list[float] = []

    def norm(names: list[str]) -> float:
        value = policy.gradient_norm(batch.keeping(names), scale) if names else 0.0
        computed.append(value)
        progress(f"gradient of {len(names)} trajectories: {value:.4g}")
        return value

    def fails(names: list[str]) -> bool:
        return not norm(names) <= threshold  # written so that NaN fails

    everything = batch.trajectory_ids
    rows = {row.trajectory_id: row for row in measure_contributions(policy, batch, version, with_gradients=True)}
    computed += [0.0] * len(rows)  # each row's own norm took one gradient
    culprits = DeltaDebugging(everything, fails).culprits()
    named = {name for culprit in culprits for name in culprit}
    whole = norm(everything)
    return BisectionResult(
        step=0,
        refused=False,
        gradient_norm=whole,
        threshold=threshold,
        median=None,
        culprits=tuple(
            tuple(_outlier(rows[name], batch) for name in sorted(culprit, key=lambda name: _by_share(rows[name])))
            for culprit in sorted(culprits, key=lambda names: min(_by_share(rows[name]) for name in names))
        ),
        # Computed, because norms cannot be subtracted: ||g(A)|| - ||g(B)|| is not ||g(A without B)||.
        without_culprits=norm([name for name in everything if name not in named]) if named else whole,
        ranking=tuple(sorted(rows.values(), key=_by_share)),
        computed=len(computed),
    )


def _by_share(row: TrajectoryContribution) -> float:
    """Sort key: norms that are not finite come first, then the largest."""
    # NaN has no order: with it as the key, the result would be random.
    norm = row.gradient_norm or 0.0
    return -norm if math.isfinite(norm) else -math.inf


def _outlier(row: TrajectoryContribution, batch: StepBatch) -> GradientOutlier:
    trajectory = batch.samples[row.trajectory_id].sample.trajectory
    return GradientOutlier(row, trajectory.group_id, trajectory.prompt_text, trajectory.completion_text)


@dataclass
class DeltaDebugging(Generic[T]):
    """ddmin over ``items``. ``fails`` says whether a subset, in its original order, fails; called once per subset."""

    items: Sequence[T]
    fails: Callable[[list[T]], bool]
    answers: dict[tuple[int, ...], bool] = field(default_factory=dict)

    def culprits(self) -> list[list[T]]:
        """Minimal failing subsets, one after the other, until the remaining items do not fail."""
        left = list(range(len(self.items)))
        found: list[list[T]] = []
        while left and self._fails(left):
            smallest = self._minimal(left)
            found.append([self.items[index] for index in smallest])
            left = [index for index in left if index not in smallest]
        return found

    def _minimal(self, failing: list[int]) -> list[int]:
        parts = 2
        while len(failing) > 1:
            # Try each part alone. From three parts on, also try all but one part. If none fails, use finer parts.
            chunks = _split(failing, parts)
            rests = [[index for index in failing if index not in chunk] for chunk in chunks]
            if (chunk := next((each for each in chunks if self._fails(each)), None)) is not None:
                failing, parts = chunk, 2
            elif parts > 2 and (rest := next((each for each in rests if self._fails(each)), None)) is not None:
                failing, parts = rest, parts - 1
            # Every part is one member, and without any one of them the set does not fail: it is 1-minimal.
            elif parts >= len(failing):
                break
            else:
                parts = min(2 * parts, len(failing))
        return failing

    def _fails(self, subset: list[int]) -> bool:
        # The same subset may occur as a part and as a rest, and each test costs a backward pass over the subset.
        key = tuple(subset)
        if key not in self.answers:
            self.answers[key] = self.fails([self.items[index] for index in subset])
        return self.answers[key]


def _split(items: list[int], parts: int) -> list[list[int]]:
    # Edge i is at floor(n · i / parts): sizes of parts differ by one at most.
    edges = [len(items) * number // parts for number in range(parts + 1)]
    return [items[start:end] for start, end in pairwise(edges) if end > start]
