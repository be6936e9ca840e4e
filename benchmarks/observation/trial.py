"""One demo that learns nothing, so that its completions stay as they are, while somebody looks at it or nobody does."""

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from benchmarks.observation.viewers import all_of

TIMEOUT_S = 300
WARM_UP_STEPS = 10
"""In these a run fills its queues, and viewers come."""
STILL = "--training.learning_rate=1e-12"


@dataclass(frozen=True)
class Variant:
    """``overrides``: of the demo's settings; ``viewers``: who looks."""

    name: str
    means: str
    overrides: tuple[str, ...] = ()
    viewers: tuple[str, ...] = ()


METERED = ("--metrics.port=29310",)
VARIANTS = (
    Variant("off", "no endpoints, nobody looks"),
    Variant("metrics", "endpoints of every process, scraped every 5 s", METERED, ("scraper",)),
    Variant(
        "metrics, dashboard and top",
        "besides, `streamrl ui` with a page open and `streamrl top` on a terminal, on the same cores",
        METERED,
        ("scraper", "dashboard", "top"),
    ),
)


def step_seconds(variant: Variant, folder: Path, name: str, steps: int, seed: int) -> list[float]:
    """Seconds from one optimizer step to the next, without the first few.

    Raises:
        RuntimeError: the run did not take its steps.
    """
    run = folder / name
    where = (f"--run.name={name}", f"--run.directory={folder}", f"--training.max_steps={steps}", STILL)
    command = [sys.executable, "-m", "deploy.cli.app", "demo", "--seed", str(seed), *where, *variant.overrides]
    output = folder / f"{name}.log"
    with output.open("w") as log, subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT) as running:
        try:
            _first_step(run, running)
            with all_of(*variant.viewers, run=run):
                while len(_times(run)) < steps and running.poll() is None:
                    time.sleep(0.2)
            running.wait(TIMEOUT_S)
        finally:
            running.terminate()
    times = _times(run)
    if running.returncode or len(times) != steps:
        raise RuntimeError(
            f"expected {steps} steps of {variant.name!r}, got {len(times)}: {output.read_text()[-2000:]}"
        )
    return [later - earlier for earlier, later in pairwise(times)][WARM_UP_STEPS:]


def _first_step(run: Path, running: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not _times(run):
        if running.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"expected a first step of {run.name}, the demo ended or took too long")
        time.sleep(0.1)


def _times(run: Path) -> list[float]:
    metrics = run / "metrics.jsonl"
    return [json.loads(line)["time"] for line in metrics.read_text().splitlines()] if metrics.exists() else []
