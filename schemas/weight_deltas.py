"""Lossless differences between two weight files of equal size: only the changes of one training step.

Both files are read as little-endian integers of ``unit`` bytes, the size of a weight. The difference is
d = new - old modulo 2^(8 unit), which is 0 where a weight kept its bits. In bfloat16 most weights keep theirs: a step
of AdamW moves a weight by about the learning rate, and bfloat16 has 8 bits of precision. d is mapped to an unsigned
number that is small where |d| is small (zigzag). Its bytes are stored in planes, all low bytes first, so that a
compressor finds the zeros together.

A file is a header and blocks. Each block is the difference of the next ``BLOCK_BYTES`` of the two files, in one of
three kinds: unchanged, sparse (the gaps between changed weights, and their d) or dense (d of all weights). This module
knows no tensors: any two files of equal size have a difference.

Invariant applying_deltas_gives_the_newer_file: applying gives the newer file's bytes, or another checksum than the
manifest's.
"""

import hashlib
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import cramjam
import numpy as np
import numpy.typing as npt

from streamrl.schemas.errors import WeightsError

MAGIC = b"SRLDELT1"
_HEADER = struct.Struct("<8sBQ")
"""Magic, unit in bytes, size of each file in bytes."""
_BLOCK = struct.Struct("<BII")
"""Kind of the block, number of its changed weights, and bytes of its payload."""
BLOCK_BYTES = 8 << 20
"""Bytes of the file in one block: a few copies fit into a processor's cache, and larger blocks compress no better."""
UNCHANGED, SPARSE, DENSE = range(3)
SPARSE_BELOW = 0.2
"""Share of changed weights up to which a block is sparse.

A place in a sparse block costs about log2(e / share) bits. A dense block costs about the entropy of the share. The
costs are equal at a share between 0.1 and 0.33, and sparse blocks are faster.
"""
LEVEL = 1
"""Compression level of zstd: the bytes that remain after the planes are nearly random, and higher levels gain 2 %."""
UNITS: dict[int, Any] = {1: np.dtype("<u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<u8")}

Integers = npt.NDArray[Any]


def write_delta(base: Path, new: Path, unit: int, target: Path, limit: int | None = None) -> bool:
    """Write the difference of two files of equal size; False, and no file, if it is longer than ``limit`` bytes.

    Raises:
        ValueError: the files differ in size.
        OSError: a file cannot be read or written.
    """
    size = new.stat().st_size
    if base.stat().st_size != size:
        raise ValueError(f"expected files of equal size, got {base.stat().st_size} and {size} bytes")
    written = 0
    with target.open("wb") as out:
        written += out.write(_HEADER.pack(MAGIC, unit, size))
        for old, young in zip(_chunks(base, size), _chunks(new, size), strict=True):
            written += out.write(_encoded(_integers(old, unit), _integers(young, unit)))
            if limit is not None and written > limit:
                break
    if limit is not None and written > limit:
        target.unlink()
        return False
    return True


def apply_deltas(base: Path, deltas: Sequence[Path], target: Path) -> str:
    """Apply differences to a file one after the other, write the result, and return its sha256.

    Raises:
        WeightsError: a difference is damaged or belongs to files of another size.
        OSError: a file cannot be read or written.
    """
    size, digest = base.stat().st_size, hashlib.sha256()
    opened = [delta.open("rb") for delta in deltas]
    try:
        units = [_read_header(file, size) for file in opened]
        with target.open("wb") as out:
            for chunk in _chunks(base, size):
                block = chunk.copy()
                for file, unit in zip(opened, units, strict=True):
                    _apply_block(file, _integers(block, unit))
                out.write(block.data)
                digest.update(block.data)
        if any(file.read(1) for file in opened):
            raise WeightsError("expected a difference of weights to end after its last block, got more bytes")
    finally:
        for file in opened:
            file.close()
    return digest.hexdigest()


def _chunks(path: Path, size: int) -> Iterator[npt.NDArray[np.uint8]]:
    if size:
        mapped = np.memmap(path, dtype=np.uint8, mode="r", shape=(size,))
        for begin in range(0, size, BLOCK_BYTES):
            yield mapped[begin : begin + BLOCK_BYTES]


def _integers(chunk: npt.NDArray[np.uint8], unit: int) -> Integers:
    """The chunk's bytes as integers of the unit; as single bytes if the chunk is no multiple of the unit."""
    return chunk.view(UNITS[unit] if len(chunk) % unit == 0 else UNITS[1])


def _encoded(old: Integers, new: Integers) -> bytes:
    changed = np.flatnonzero(new != old)
    if not len(changed):
        return _BLOCK.pack(UNCHANGED, 0, 0)
    if len(changed) <= SPARSE_BELOW * len(new):
        # The first place, then the distance of each place from the one before. 32 bits hold every place of a block.
        gaps = np.diff(changed, prepend=0).astype(UNITS[4])
        parts = [gaps, _zigzag(new[changed] - old[changed])]
        kind = SPARSE
    else:
        parts, kind = [_zigzag(new - old)], DENSE
    payload = b"".join(_packed(part) for part in parts)
    return _BLOCK.pack(kind, len(changed), len(payload)) + payload


def _apply_block(file: BinaryIO, block: Integers) -> None:
    """Add the difference of the file's next block to the integers."""
    head = file.read(_BLOCK.size)
    if len(head) != _BLOCK.size:
        raise WeightsError("expected another block in a difference of weights, got the end of the file")
    kind, count, length = _BLOCK.unpack(head)
    payload = file.read(length)
    if len(payload) != length or count > len(block) or kind > DENSE:
        raise WeightsError("expected a whole block in a difference of weights, got a damaged one")
    if kind == UNCHANGED:
        return
    take = _unpacking(payload)
    if kind == SPARSE:
        places = np.cumsum(take(UNITS[4], count), dtype=np.int64)
        if count and int(places[-1]) >= len(block):
            raise WeightsError("expected the places of changed weights within their block, got one beyond it")
        block[places] += _unzigzag(take(block.dtype, count))
    else:
        block += _unzigzag(take(block.dtype, len(block)))


def _zigzag(difference: Integers) -> Integers:
    """0, -1, 1, -2, 2 become 0, 1, 2, 3, 4, and so on."""
    # In two's complement: twice the number, with all bits inverted if it was negative.
    return (difference << 1) ^ (0 - (difference >> (8 * difference.itemsize - 1)))


def _unzigzag(mapped: Integers) -> Integers:
    return (mapped >> 1) ^ (0 - (mapped & 1))


def _packed(numbers: Integers) -> bytes:
    """The numbers' bytes in planes, low bytes first. Each plane is its length and its bytes, compressed separately."""
    planes = np.ascontiguousarray(numbers).view(np.uint8).reshape(-1, numbers.itemsize).T  # [unit, numbers]
    packed = b""
    for plane in planes:
        data = bytes(cramjam.zstd.compress(np.ascontiguousarray(plane).data, level=LEVEL)) if plane.any() else b""
        packed += len(data).to_bytes(4, "little") + data
    return packed


def _unpacking(payload: bytes) -> Callable[[Any, int], Integers]:
    """A function that reads ``count`` numbers of a type from the payload, from where its last call ended."""
    position = 0

    def take(kind: Any, count: int) -> Integers:
        nonlocal position
        planes = np.zeros((kind.itemsize, count), dtype=np.uint8)  # a plane of zeros has no bytes
        for plane in planes:
            length = int.from_bytes(payload[position : position + 4], "little")
            data, position = payload[position + 4 : position + 4 + length], position + 4 + length
            if length:
                _decompress(data, plane)
        return np.ascontiguousarray(planes.T).reshape(-1).view(kind)

    return take


def _decompress(data: bytes, plane: npt.NDArray[np.uint8]) -> None:
    try:
        size = cramjam.zstd.decompress_into(data, plane.data)
    except cramjam.DecompressionError as error:
        raise WeightsError(f"expected a difference of weights that unpacks, got: {error}") from error
    if size != len(plane):
        raise WeightsError(f"expected {len(plane)} numbers in a difference of weights, got {size}")


def _read_header(file: BinaryIO, size: int) -> int:
    raw = file.read(_HEADER.size)
    if len(raw) != _HEADER.size or not raw.startswith(MAGIC):
        raise WeightsError("expected a difference of weights, got a file without its header")
    _, unit, of_size = _HEADER.unpack(raw)
    if unit not in UNITS or of_size != size:
        raise WeightsError(f"expected a difference of files of {size} bytes, got one of {of_size} (unit {unit})")
    return int(unit)
