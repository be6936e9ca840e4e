"""The warm-started model on disk, made once for each recipe and seed. Loads no torch: training is another process.

Invariant a_cached_model_is_whole: a model appears under its name by one rename, when all its files are written.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from deploy.demo.task import HELD_OUT_ONE_IN, INSTRUCTION, OPTIONS, PROMPT_TEMPLATE
from deploy.demo.warm_start import Progress, WarmStartRecipe
from schemas.errors import ModelError

MAX_THREADS = 1


def ensure_warm_started_model(
    cache_dir: Path, seed: int, progress: Progress, recipe: WarmStartRecipe | None = None
) -> Path:
    """The directory of the warm-started model of a seed; trains it first if it is not there (about half a minute).

    Raises:
        ModelError: the training failed, or the cache cannot be written.
    """
    recipe = recipe or WarmStartRecipe()
    target = cache_dir / "models" / f"spell-backward-{_fingerprint(recipe)}-seed{seed}"
    if target.is_dir():
        progress(f"warm start: cached in {target}")
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".making-", ignore_cleanup_errors=True) as scratch:
            made = Path(scratch) / "model"
            _train(made, seed, recipe, progress)
            _publish(made, target)
    except OSError as error:
        raise ModelError(f"expected to write the demo's model to {target}, got: {error}; set STREAMRL_CACHE") from error
    return target


def _fingerprint(recipe: WarmStartRecipe) -> str:
    parts = [asdict(recipe), OPTIONS, HELD_OUT_ONE_IN, INSTRUCTION, PROMPT_TEMPLATE]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:10]


def _train(directory: Path, seed: int, recipe: WarmStartRecipe, progress: Progress) -> None:
    directory.mkdir()
    threads = str(min(MAX_THREADS, os.cpu_count() or 1))
    environment = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false"}
    arguments = [str(directory), str(seed), json.dumps(asdict(recipe))]
    with tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "deploy.demo.warm_start", *arguments],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=os.environ | environment,
        )
        with child:
            try:
                for line in child.stdout or ():
                    progress(line.rstrip())
            except BaseException:
                child.kill()
                raise
        if child.returncode != 0:
            errors.seek(0)
            last = (errors.read().strip().splitlines() or ["no output"])[-1]
            raise ModelError(f"expected the warm start of the demo's model to end well, got: {last}")


def _publish(made: Path, target: Path) -> None:
    """Another process may have been faster; its model is the same."""
    try:
        made.rename(target)
    except OSError:
        if not target.is_dir():
            raise
