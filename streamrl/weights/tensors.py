"""Tensors of a weights file, mapped into memory."""

import json
from pathlib import Path

import torch

_PREFIX_BYTES = 8
"""A safetensors file starts with the length of its JSON header, a little-endian 64-bit integer."""
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
"""torch's types by the names that safetensors gives them."""


def map_tensors(file: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file, by name. They are mapped, not copied. The caller has checked the file's header.

    safetensors' own ``get_tensor`` leaks two small objects per tensor: megabytes an hour in a worker that adopts
    weights all the time.
    """
    with file.open("rb") as stored:
        size = int.from_bytes(stored.read(_PREFIX_BYTES), "little")
        header = json.loads(stored.read(size))
    # shared=False maps privately: a page is read when it is first touched, and a write would not reach the file.
    content = torch.from_file(str(file), shared=False, size=file.stat().st_size, dtype=torch.uint8)
    header.pop("__metadata__", None)
    tensors = {}
    for name, facts in header.items():
        kind = KINDS[facts["dtype"]]
        # data_offsets are counted from the first byte after the header.
        start, end = (_PREFIX_BYTES + size + offset for offset in facts["data_offsets"])
        raw = content[start:end]
        # A view as another type must start at a multiple of that type's size. After an odd header, tensors may not.
        aligned = raw.clone() if start % kind.itemsize else raw
        tensors[name] = aligned.view(kind).reshape(facts["shape"])
    return tensors
