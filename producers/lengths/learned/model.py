"""A fitted model with its version, and the versioned files it is kept in. Safetensors: nothing in them can run.

It does not know prompts; ``policy_version`` is the newest policy it was fitted to.
"""

import contextlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import structlog
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from producers.lengths.learned.features import LAYOUT, ROW_WIDTH, text_features
from producers.lengths.learned.forest import Forest
from schemas.errors import MalformedFrame
from schemas.messages.prompts import Prompt

log = structlog.get_logger()

KEPT_FILES = 3
_NAME = re.compile(r"lengths-(\d{8})\.safetensors")
_ARRAYS = {"feature": "int32", "threshold": "float64", "children": "int32", "value": "float64", "roots": "int32"}
Levels = Mapping[str, tuple[float, int]]


@dataclass(frozen=True, slots=True)
class LengthModel:
    """``forest`` gives the median and the upper quantile; ``version`` counts fits; ``observations`` were fitted to."""

    forest: Forest
    version: int
    policy_version: int
    observations: int

    @property
    def name(self) -> str:
        """How estimates call it."""
        return f"learned/v{self.version}"

    def quantiles(self, prompt: Prompt) -> tuple[float, float]:
        """Median and upper of the logarithm of length over its data set's level, by the prompt's text."""
        median, upper = map(float, self.forest.predict(text_features(prompt)))
        return median, upper


class _About(BaseModel):
    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)

    layout: int
    depth: int
    version: int = Field(ge=1)
    policy_version: int = Field(ge=0)
    observations: int = Field(ge=0)
    levels: dict[str, tuple[float, int]]


def save(model: LengthModel, levels: Levels, folder: Path) -> Path:
    """Write the next file of the folder, whole or not at all; the oldest ones go.

    Raises:
        OSError: it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"lengths-{model.version:08d}.safetensors"
    about = _About(
        layout=LAYOUT,
        depth=model.forest.depth,
        version=model.version,
        policy_version=model.policy_version,
        observations=model.observations,
        levels=dict(levels),
    )
    unfinished = path.with_suffix(f".{os.getpid()}.part")
    save_file({name: getattr(model.forest, name) for name in _ARRAYS}, unfinished, {"about": about.model_dump_json()})
    unfinished.replace(path)
    for _, old in _files(folder)[KEPT_FILES:]:
        old.unlink(missing_ok=True)
    return path


def load_newest(folder: Path, newer_than: int = 0) -> tuple[LengthModel, Levels] | None:
    """The newest file that can be used; none if there is none. Files that cannot be used are left alone."""
    for version, path in _files(folder):
        if version <= newer_than:
            break
        try:
            return load(path)
        except (MalformedFrame, OSError) as error:
            log.warning("length model left aside", path=str(path), error=str(error))
    return None


def load(path: Path) -> tuple[LengthModel, Levels]:
    """Read one file.

    Raises:
        MalformedFrame: it is not a length model, or one over other features.
    """
    try:
        with safe_open(path, "np") as file:
            about = _About.model_validate(json.loads((file.metadata() or {}).get("about", "")))
            arrays = {name: file.get_tensor(name) for name in _ARRAYS}
    except (SafetensorError, ValidationError, ValueError) as error:
        raise MalformedFrame(f"expected a length model in {path}, got: {error}; delete it") from error
    if about.layout != LAYOUT or any(arrays[name].dtype != np.dtype(dtype) for name, dtype in _ARRAYS.items()):
        raise MalformedFrame(f"expected a length model of layout {LAYOUT} in {path}, got {about.layout}; delete it")
    forest = Forest(depth=about.depth, **arrays)
    forest.check(ROW_WIDTH, quantiles=2)
    return LengthModel(forest, about.version, about.policy_version, about.observations), about.levels


def _files(folder: Path) -> list[tuple[int, Path]]:
    """Newest first."""
    found: list[tuple[int, Path]] = []
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            if match := _NAME.fullmatch(path.name):
                found.append((int(match[1]), path))
    return sorted(found, reverse=True)
