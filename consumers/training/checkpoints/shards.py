"""An optimizer's state in several files, one for each rank that held a part of it.

Each file is plain safetensors with its rank's rows of every tensor. Stacking a tensor's pieces in the order of the
ranks gives the whole tensor. FSDP2 cuts along the first dimension in the same way, so any number of ranks can read what
another number wrote. Values that are not cut, such as a count of steps, are in the first rank's file only.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from streamrl.schemas.errors import CheckpointError

WHOLE = "optimizer.safetensors"
"""The file of a trainer without ranks."""
_PART = re.compile(r"optimizer-(\d{5})-of-(\d{5})\.safetensors$")


def part_name(rank: int, ranks: int) -> str:
    """The file of one rank's rows."""
    return f"optimizer-{rank:05}-of-{ranks:05}.safetensors"


def optimizer_files(paths: Iterable[str]) -> list[str]:
    """The paths that hold the optimizer's state, in the order of the ranks.

    Raises:
        CheckpointError: there is no complete set.
    """
    paths = list(paths)
    if whole := [path for path in paths if path.rpartition("/")[2] == WHOLE]:
        return whole
    parts = {
        (int(match[1]), int(match[2])): path for path in paths if (match := _PART.fullmatch(path.rpartition("/")[2]))
    }
    ranks = max((of for _, of in parts), default=0)
    if not parts or sorted(parts) != [(rank, ranks) for rank in range(ranks)]:
        raise CheckpointError(f"expected {WHOLE}, or the file of each rank, among the files, got {sorted(paths)}")
    return [parts[key] for key in sorted(parts)]


class PiecedTensors(Mapping[str, Tensor]):
    """Tensors by name, assembled from files on each access; nothing is kept in memory."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths_of: dict[str, list[tuple[Path, int]]] = {}
        for path in paths:
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118 — it has no iterator of its own
                    shape = file.get_slice(name).get_shape()
                    self._paths_of.setdefault(name, []).append((path, shape[0] if shape else 0))

    def __getitem__(self, name: str) -> Tensor:
        pieces = [_whole(path, name) for path, _ in self._paths_of[name]]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def __contains__(self, name: object) -> bool:
        return name in self._paths_of  # ``Mapping`` would read the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths_of)

    def __len__(self) -> int:
        return len(self._paths_of)

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows ``start`` (inclusive) to ``stop`` (exclusive) of a tensor; no others are read."""
        found: list[Tensor] = []
        offset = 0
        for path, count in self._paths_of[name]:
            first, last = max(start - offset, 0), min(stop - offset, count)
            if first < last:
                with safe_open(path, "pt") as file:
                    found.append(file.get_slice(name)[first:last])
            offset += count
        return torch.cat(found) if found else self[name][:0]


def read_optimizer(paths: Sequence[Path]) -> Mapping[str, Tensor]:
    """The state in these files: in memory if there is a single one, otherwise read on access."""
    return load_file(paths[0]) if len(paths) == 1 else PiecedTensors(paths)


def _whole(path: Path, name: str) -> Tensor:
    with safe_open(path, "pt") as file:
        tensor: Tensor = file.get_tensor(name)
        return tensor
