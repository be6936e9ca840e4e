"""The models that are sampled: one so small that the way of its tokens weighs most, and a real one."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gateway.parts import POSITIONS


@dataclass(frozen=True)
class SampledModel:
    """``write``: puts it into a directory, without an end token, so that completions are as long as they may be.

    ``share``: of the tokens that the small one samples in a stretch, as a real one takes longer for each.
    """

    name: str
    dtype: str
    share: float
    write: Callable[[Path], None]


def _write_million(directory: Path) -> None:
    from benchmarks.small_model import build, save

    save(build(POSITIONS), directory, ends=())


def _write_smollm2(directory: Path) -> None:
    from benchmarks.small_model import set_ends
    from streamrl.init.smollm2 import ensure_smollm2

    shutil.copytree(ensure_smollm2(print), directory)
    set_ends(directory, ())


MILLION = SampledModel("a million parameters, random", "float32", 1.0, _write_million)
SMOLLM2 = SampledModel("SmolLM2-135M-Instruct", "bfloat16", 0.25, _write_smollm2)
