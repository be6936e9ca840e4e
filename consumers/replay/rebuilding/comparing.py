"""Compares tensors and updates of two computations of one step. Knows neither where they come from nor why."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from consumers.training.policy import digests_of

MOVERS = 8
_NUMBERED = re.compile(r"^(.*?\.\d+)(?:\.|$)")


@dataclass(frozen=True)
class TensorEquality:
    """A weight after the step: ``equal`` by digest or by value; ``max_abs_difference`` if the original is at hand."""

    name: str
    equal: bool
    max_abs_difference: float | None


@dataclass(frozen=True)
class GroupUpdate:
    """Norms of the updates of the tensors of one layer or module, and the cosine between them (NaN: one is zero)."""

    group: str
    original: float
    what_if: float
    cosine: float


@dataclass(frozen=True)
class Mover:
    """A tensor and the norm of the difference of its two updates."""

    name: str
    difference: float
    original: float
    what_if: float


@dataclass(frozen=True)
class UpdateComparison:
    """Two updates from the same weights: in all, by group of tensors, and where they differ most."""

    original: float
    what_if: float
    cosine: float
    groups: tuple[GroupUpdate, ...]
    movers: tuple[Mover, ...]


def tensor_equality(
    rebuilt: Mapping[str, Tensor], digests: Mapping[str, str], originals: Mapping[str, Tensor] | None
) -> tuple[TensorEquality, ...]:
    """Every recorded tensor against the rebuilt one, by digest where there is one; a missing one differs.

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
    equal = found[name] == digests[name] if name in digests else difference == 0.0
    return TensorEquality(name, equal, difference)


def compared_updates(original: Mapping[str, Tensor], what_if: Mapping[str, Tensor]) -> UpdateComparison:
    """Both updates side by side. Norms and dot products are summed in float64."""
    sums: dict[str, tuple[float, ...]] = {}
    movers: list[Mover] = []
    for name, one in original.items():
        first, second = one.flatten().double(), what_if[name].flatten().double()
        products = (float(first @ first), float(second @ second), float(first @ second))
        before = sums.get(_group_of(name), (0.0, 0.0, 0.0))
        sums[_group_of(name)] = tuple(total + value for total, value in zip(before, products, strict=True))
        gap = float(torch.linalg.vector_norm(first - second))
        movers.append(Mover(name, gap, math.sqrt(products[0]), math.sqrt(products[1])))
    groups = tuple(GroupUpdate(name, *_norms_and_cosine(values)) for name, values in sums.items())
    whole = tuple(math.fsum(values[number] for values in sums.values()) for number in range(3))
    ranked = sorted(movers, key=lambda mover: -mover.difference)[:MOVERS]
    return UpdateComparison(*_norms_and_cosine(whole), groups=groups, movers=tuple(ranked))


def _norms_and_cosine(sums: tuple[float, ...]) -> tuple[float, float, float]:
    first, second = math.sqrt(sums[0]), math.sqrt(sums[1])
    return first, second, sums[2] / (first * second) if first and second else math.nan


def _group_of(name: str) -> str:
    """``model.layers.3`` for everything in that layer; the module for tensors outside numbered layers."""
    match = _NUMBERED.match(name)
    return match[1] if match else name.rpartition(".")[0] or name
