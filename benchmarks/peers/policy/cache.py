"""The warm-started policy on disk, made once for each recipe. Loads no torch: training is another process.

Invariant a_cached_policy_is_whole: it appears under its name by one rename, when all its files are written.
"""

import hashlib
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from benchmarks.peers.policy.warm_start import WarmStartRecipe
from benchmarks.peers.tasks import FIXED_TEXTS, HELD_OUT_ONE_IN, PARTS
from bus.embedded.runtime import cache_root
from streamrl.demo.warm_start import appearing_whole


def ensure_policy(recipe: WarmStartRecipe) -> Path:
    """The directory of the warm-started policy; trains it first if it is not there (one or two minutes).

    Raises:
        subprocess.CalledProcessError: the training failed.
    """
    target = cache_root() / "models" / f"mixed-{fingerprint(recipe)}-seed{recipe.seed}"
    if target.is_dir():
        return target
    threads = {"OMP_NUM_THREADS": str(recipe.threads), "MKL_NUM_THREADS": str(recipe.threads)}
    with appearing_whole(target) as made:
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.peers.policy.warm_start"]
        subprocess.run([*command, str(made), json.dumps(asdict(recipe))], check=True, env={**os.environ, **threads})
    return target


def fingerprint(recipe: WarmStartRecipe) -> str:
    """Ten hex digits that change when the policy would."""
    parts = [asdict(recipe), [asdict(part) for part in PARTS], FIXED_TEXTS, HELD_OUT_ONE_IN]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:10]
