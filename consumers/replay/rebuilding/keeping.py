"""Writes a rebuilt step to a directory of the user's choice, for looking at its tensors. Never into a run's own."""

from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from schemas.errors import UserError


def keep_tensors(directory: Path, step: int, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
    """``directory/step_<step>/<name>.safetensors`` for each named set of tensors.

    Raises:
        UserError: the directory cannot be written to.
    """
    target = directory / f"step_{step}"
    try:
        target.mkdir(parents=True, exist_ok=True)
        for name, found in tensors.items():
            contiguous = {key: tensor.detach().cpu().contiguous() for key, tensor in found.items()}
            save_file(contiguous, target / f"{name}.safetensors", metadata={"format": "pt"})
    except OSError as error:
        raise UserError(f"expected a writable directory for --keep, got {target}: {error.strerror}") from error
