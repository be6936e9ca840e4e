"""Measures each trajectory's contribution to a step, and compares two computations of a step. Changes no weights.

A contribution is a share. With s = 1 / (the loss's denominator), the step's loss is the sum over its trajectories of
s × (a trajectory's summed token losses), and its gradient is the sum of their gradients. So the shares add up.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from streamrl.consumers.batching.micro_batches import MicroBatch
from streamrl.consumers.ingest.filters import staleness
from streamrl.consumers.training.policy import digests_of
from streamrl.inspection.replay.scratch_policy import ScratchPolicy
from streamrl.inspection.replay.steps import StepBatch
from streamrl.schemas.identifiers import PolicyVersion

LARGEST_DIFFERENCES = 8
"""Tensors that a comparison of updates names: about as many as one layer has."""
# The name up to the first number: ``model.layers.3`` of ``model.layers.3.self_attn.q_proj.weight``.
_NUMBERED_LAYER = re.compile(r"^(.*?\.\d+)(?:\.|$)")


@dataclass(frozen=True)
class TrajectoryContribution:
    """One trajectory's contribution to a step.

    ``loss``: its share; all shares add up to the step's loss. ``ratio_mean``, ``ratio_max``: policy at the start of the
    step ÷ behaviour policy, over the trained tokens. ``tokens``: number of trained tokens.
    """

    trajectory_id: str
    partition: int
    offset: int
    reward: float
    advantage: float
    tokens: int
    loss: float
    ratio_mean: float
    ratio_max: float
    staleness: int
    gradient_norm: float | None = None


def measure_contributions(
    policy: ScratchPolicy,
    batch: StepBatch,
    version: PolicyVersion,
    *,
    with_gradients: bool = False,
    progress: Callable[[str], None] = lambda line: None,
) -> list[TrajectoryContribution]:
    """The contribution of each row of a step, in order. ``version``: the version of the policy's weights."""
    scale = policy.scale(batch)
    norms = own_gradient_norms(policy, batch, scale, progress) if with_gradients else {}
    return [
        row for micro_batch in batch.micro_batches for row in _rows(policy, micro_batch, batch, scale, version, norms)
    ]


def own_gradient_norms(
    policy: ScratchPolicy, batch: StepBatch, scale: float, progress: Callable[[str], None] = lambda line: None
) -> dict[str, float]:
    """Norm of each trajectory's share of the step's gradient."""
    names = batch.trajectory_ids
    norms: dict[str, float] = {}
    # A forward and a backward pass for each trajectory: in a batch, the gradients would add up.
    for number, name in enumerate(names, 1):
        norms[name] = policy.gradient_norm(batch.keeping([name]), scale)
        if number % 16 == 0 or number == len(names):
            progress(f"gradients of {number}/{len(names)} trajectories")
    return norms


def _rows(
    policy: ScratchPolicy,
    micro_batch: MicroBatch,
    batch: StepBatch,
    scale: float,
    version: PolicyVersion,
    norms: dict[str, float],
) -> Iterator[TrajectoryContribution]:
    for ref, row in zip(micro_batch.refs, policy.learner.row_losses(micro_batch), strict=True):
        item = batch.samples[ref.trajectory_id]
        # A row has sums over its trained tokens: loss = s · sum of token losses, mean ratio = sum / tokens.
        yield TrajectoryContribution(
            *ref,
            reward=batch.rewards[ref.trajectory_id],
            advantage=item.advantage,
            tokens=row.tokens,
            loss=row.loss * scale,
            ratio_mean=row.ratio / max(row.tokens, 1),
            ratio_max=row.ratio_max,
            staleness=staleness(item.sample.trajectory, version),
            gradient_norm=norms.get(ref.trajectory_id),
        )


@dataclass(frozen=True)
class TensorEquality:
    """A weight tensor after the step. ``equal``: by digest, else by value; ``max_abs_difference``: None if the original
    is not available.
    """

    name: str
    equal: bool
    max_abs_difference: float | None


@dataclass(frozen=True)
class GroupUpdate:
    """Norms of two updates of one layer's or module's tensors, and the cosine between them (NaN if one is zero)."""

    group: str
    original: float
    what_if: float
    cosine: float


@dataclass(frozen=True)
class TensorDifference:
    """A tensor: the norm of the difference between its two updates, and the norms of both."""

    name: str
    difference: float
    original: float
    what_if: float


@dataclass(frozen=True)
class UpdateComparison:
    """Compares two updates u, v from the same weights: as a whole, by group of tensors, and where they differ most.

    Cosine: u·v / (||u|| ||v||); 1 is the same direction, 0 unrelated, -1 the opposite.
    """

    original: float
    what_if: float
    cosine: float
    groups: tuple[GroupUpdate, ...]
    movers: tuple[TensorDifference, ...]


def tensor_equality(
    rebuilt: Mapping[str, Tensor], digests: Mapping[str, str], originals: Mapping[str, Tensor] | None
) -> tuple[TensorEquality, ...]:
    """Compares every recorded tensor with the rebuilt one, by digest if there is one. A missing tensor differs.

    Originals in a narrower type are compared in that type.
    """
    names = sorted(set(digests) | set(originals or {}))
    found = digests_of({name: rebuilt[name] for name in names if name in rebuilt and name in digests})
    return tuple(_equality(name, rebuilt.get(name), digests, found, (originals or {}).get(name)) for name in names)


def _equality(
    name: str, rebuilt: Tensor | None, digests: Mapping[str, str], found: Mapping[str, str], original: Tensor | None
) -> TensorEquality:
    if rebuilt is None:
        return TensorEquality(name, False, None)
    difference = None
    if original is not None and original.shape == rebuilt.shape:
        gap = (rebuilt.to(original.dtype).float() - original.float()).abs()
        difference = float(gap.max()) if gap.numel() else 0.0
    # Digests of 0.0 and -0.0 differ, values do not. A NaN anywhere makes the difference NaN, and so unequal.
    equal = found[name] == digests[name] if name in digests else difference == 0.0
    return TensorEquality(name, equal, difference)


def compare_updates(original: Mapping[str, Tensor], what_if: Mapping[str, Tensor]) -> UpdateComparison:
    """Compare two updates. Norms and dot products are summed in float64."""
    # By group: u·u, v·v and u·v. They add up over tensors; norms and cosines do not.
    sums: dict[str, tuple[float, ...]] = {}
    differences: list[TensorDifference] = []
    for name, one in original.items():
        first, second = one.flatten().double(), what_if[name].flatten().double()
        products = (float(first @ first), float(second @ second), float(first @ second))
        before = sums.get(_group_of(name), (0.0, 0.0, 0.0))
        sums[_group_of(name)] = tuple(total + value for total, value in zip(before, products, strict=True))
        gap = float(torch.linalg.vector_norm(first - second))
        differences.append(TensorDifference(name, gap, math.sqrt(products[0]), math.sqrt(products[1])))
    groups = tuple(GroupUpdate(name, *_norms_and_cosine(values)) for name, values in sums.items())
    whole = tuple(math.fsum(values[number] for values in sums.values()) for number in range(3))
    ranked = sorted(differences, key=lambda tensor: -tensor.difference)[:LARGEST_DIFFERENCES]
    return UpdateComparison(*_norms_and_cosine(whole), groups=groups, movers=tuple(ranked))


def _norms_and_cosine(sums: tuple[float, ...]) -> tuple[float, float, float]:
    # cos(u, v) = u·v / (||u|| ||v||)
    first, second = math.sqrt(sums[0]), math.sqrt(sums[1])
    return first, second, sums[2] / (first * second) if first and second else math.nan


def _group_of(name: str) -> str:
    """``model.layers.3`` for a tensor in that layer; the module's name for a tensor outside numbered layers."""
    match = _NUMBERED_LAYER.match(name)
    return match[1] if match else name.rpartition(".")[0] or name
