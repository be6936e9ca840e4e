"""Weights on disk against the model that shall take them: every check is done before anything is loaded.

Invariant: weights_that_do_not_fit_are_refused_whole (names, shapes and kinds of all tensors are compared first).
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from producers.generation.engines.facts import TensorFacts
from schemas.errors import WeightsError

_FLOATING = {"F64", "F32", "F16", "BF16"}


def check_weights(directory: Path, tensors: Mapping[str, TensorFacts]) -> dict[str, Path]:
    """Compare the headers of all safetensors files of a directory with a model's tensors.

    Returns:
        The file of each tensor. Of tied tensors any one suffices.

    Raises:
        WeightsError: a file is unreadable, or a tensor is missing, unknown, repeated or of another shape or kind.
    """
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise WeightsError(f"expected safetensors files in {directory}, got none; publish the version again")
    found: dict[str, Path] = {}
    for file in files:
        for name, shape, kind in _read_header(file):
            _check_tensor(name, shape, kind, tensors.get(name), file, repeated=name in found)
            found[name] = file
    owners = {tensors[name].owner for name in found}
    missing = [name for name, facts in tensors.items() if facts.owner not in owners]
    if missing:
        raise WeightsError(
            f"expected all {len(tensors)} tensors of the model in {directory}, "
            f"got none named {missing[0]!r} ({len(missing)} missing); publish a complete state dict"
        )
    return found


def read_weights(directory: Path, tensors: Mapping[str, TensorFacts]) -> dict[str, torch.Tensor]:
    """Check a directory of weights, then read it into memory.

    Raises:
        WeightsError: see ``check_weights``.
    """
    files = check_weights(directory, tensors)
    weights: dict[str, torch.Tensor] = {}
    for file in sorted(set(files.values())):
        try:
            with safe_open(file, framework="pt") as stored:
                weights.update({name: stored.get_tensor(name) for name in stored.keys()})  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise WeightsError(f"expected a readable safetensors file, got {file}: {error}; fetch it again") from error
    return weights


def _read_header(file: Path) -> list[tuple[str, tuple[int, ...], str]]:
    try:
        with safe_open(file, framework="pt") as stored:
            slices = {name: stored.get_slice(name) for name in stored.keys()}  # noqa: SIM118
            return [(name, tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()]
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"expected a readable safetensors file, got {file}: {error}; fetch it again") from error


def _check_tensor(
    name: str, shape: tuple[int, ...], kind: str, expected: TensorFacts | None, file: Path, *, repeated: bool
) -> None:
    if repeated:
        raise WeightsError(f"expected each tensor once, got {name!r} again in {file}; publish the version again")
    if expected is None:
        raise WeightsError(f"expected tensors of the model that is loaded, got {name!r} in {file}; use the same model")
    if shape != expected.shape:
        raise WeightsError(
            f"expected {name!r} of shape {expected.shape}, got {shape} in {file}; use the same model everywhere"
        )
    if (kind in _FLOATING) != expected.floating:
        wanted = "floating point" if expected.floating else "integer"
        raise WeightsError(f"expected {wanted} numbers in {name!r}, got {kind} in {file}; publish it in that type")
