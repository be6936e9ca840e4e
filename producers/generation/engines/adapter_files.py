"""A published low-rank adapter as a worker takes it: checked against the model that the worker has loaded.

The base is loaded once. Invariant an_adapter_belongs_to_its_base: the base's weights have the sha256 that the adapter's
manifest names, or nothing of it is used.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from transformers.utils.hub import cached_file

from streamrl.producers.generation.engines.model_files import TensorFacts
from streamrl.schemas.errors import WeightsError
from streamrl.schemas.weights import ADAPTER, manifest_in, merged_weight, weights_sha256
from streamrl.weights.tensors import mapped_tensors

_PREFIX, _A, _B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"


class LowRankPair(NamedTuple):
    """Of a layer [out, in]: A [r, in] and B [out, r]."""

    a: torch.Tensor
    b: torch.Tensor


@dataclass(frozen=True)
class PublishedAdapter:
    """``pairs``: by the name of the tensor they are added to, ``scale`` times B A."""

    directory: Path
    rank: int
    scale: float
    pairs: Mapping[str, LowRankPair]

    @torch.no_grad()
    def merged(self, base: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors that they change, added up."""
        return {name: merged_weight(base[name], a, b, self.scale) for name, (a, b) in self.pairs.items()}


@cache
def base_identity(model_path: str) -> str:
    """sha256 of the weights of the model that is loaded, from its files, which are read once.

    Raises:
        WeightsError: it has no files that could tell.
    """
    found = cached_file(model_path, "config.json")
    if found is None:
        raise WeightsError(f"expected a model's files at {model_path}, got none; give a directory")
    return weights_sha256(Path(found).parent)


def read_adapter(directory: Path, tensors: Mapping[str, TensorFacts], model_path: str) -> PublishedAdapter | None:
    """The adapter in a version's directory; None where it holds whole weights. ``model_path``: of the model loaded.

    Raises:
        WeightsError: it belongs to another base, or does not fit the model.
    """
    manifest = manifest_in(directory)
    if manifest is None or manifest.adapter is None:
        return None
    told = manifest.adapter
    if (found := base_identity(model_path)) != told.base_sha256:
        raise WeightsError(
            f"expected the base of the adapter (sha256 {told.base_sha256[:12]}) as this worker's model, got one of "
            f"sha256 {found[:12]}; set model.path to the trainer's, with the same files"
        )
    stored = mapped_tensors(directory / ADAPTER)
    pairs = {}
    for name, a in stored.items():
        if name.endswith(_A):
            weight = f"{name.removeprefix(_PREFIX).removesuffix(_A)}.weight"
            pairs[weight] = _pair(directory, weight, a, stored.get(name.replace(_A, _B)), tensors.get(weight))
    if 2 * len(pairs) != len(stored):
        raise WeightsError(f"expected pairs of adapters in {directory / ADAPTER}, got {len(stored)} tensors")
    return PublishedAdapter(directory, told.rank, told.scale, pairs)


def _pair(
    directory: Path, weight: str, a: torch.Tensor, b: torch.Tensor | None, facts: TensorFacts | None
) -> LowRankPair:
    if facts is None or b is None:
        missing = "such a layer in the model" if facts is None else "its other half"
        raise WeightsError(f"expected {missing} for the adapter of {weight} in {directory}, got none")
    if (b.shape[0], a.shape[1]) != facts.shape or b.shape[1] != a.shape[0]:
        raise WeightsError(
            f"expected an adapter of {weight} {facts.shape} in {directory}, got {tuple(b.shape)} × {tuple(a.shape)}"
        )
    return LowRankPair(a, b)
