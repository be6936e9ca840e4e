"""Tensors of a weights file, mapped into memory."""

import json
from pathlib import Path

import torch

_PREFIX_BYTES = 8
"""A safetensors file begins with the length of its JSON header as a little-endian 64-bit integer."""
KINDS = {
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
"""By safetensors' names."""


def mapped_tensors(file: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file whose header was checked, mapped and not copied.

    safetensors' own ``get_tensor`` leaves two small objects behind for each tensor: megabytes an hour in a worker that
    adopts weights all the time.
    """
    with file.open("rb") as stored:
        size = int.from_bytes(stored.read(_PREFIX_BYTES), "little")
        header = json.loads(stored.read(size))
    # shared=False maps privately: pages are read when they are first touched, and no write would reach the file.
    content = torch.from_file(str(file), shared=False, size=file.stat().st_size, dtype=torch.uint8)
    header.pop("__metadata__", None)
    tensors = {}
    for name, facts in header.items():
        kind = KINDS[facts["dtype"]]
        # data_offsets are counted from the first byte behind the header.
        begin, end = (_PREFIX_BYTES + size + offset for offset in facts["data_offsets"])
        raw = content[begin:end]
        # A view as another type must begin at a multiple of its size; the header may leave the first tensor elsewhere.
        aligned = raw.clone() if begin % kind.itemsize else raw
        tensors[name] = aligned.view(kind).reshape(facts["shape"])
    return tensors
