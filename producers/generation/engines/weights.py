"""Weights on disk against the model that shall take them: every check is done before anything is loaded.

Invariant: weights_that_do_not_fit_are_refused_whole (names, shapes and kinds of all tensors are compared first).
"""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from producers.generation.engines.facts import TensorFacts
from schemas.errors import WeightsError

_FLOATING = {"F64", "F32", "F16", "BF16"}
_KINDS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_PREFIX_BYTES = 8
"""Before the header: its length."""


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
            weights.update(mapped_tensors(file))
        except (OSError, RuntimeError, ValueError, KeyError) as error:
            raise WeightsError(f"expected a readable safetensors file, got {file}: {error}; fetch it again") from error
    return weights


def mapped_tensors(file: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file whose header was checked, mapped and not copied.

    safetensors' own ``get_tensor`` leaves two small objects behind for each tensor: megabytes an hour in a worker that
    adopts weights all the time.
    """
    with file.open("rb") as stored:
        size = int.from_bytes(stored.read(_PREFIX_BYTES), "little")
        header = json.loads(stored.read(size))
    content = torch.from_file(str(file), shared=False, size=file.stat().st_size, dtype=torch.uint8)
    header.pop("__metadata__", None)
    tensors = {}
    for name, facts in header.items():
        kind = _KINDS[facts["dtype"]]
        begin, end = (_PREFIX_BYTES + size + offset for offset in facts["data_offsets"])
        raw = content[begin:end]
        aligned = raw.clone() if begin % kind.itemsize else raw
        tensors[name] = aligned.view(kind).reshape(facts["shape"])
    return tensors


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
