"""Measures how the processes of a run share this machine's cores: how much they slow each other, and what all the
processes cost that neither decode nor train.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import tomli_w

from streamrl.inspection.environment import usable_cores
from streamrl.observability.usage import cpu_s_by_process
from streamrl.planning.prediction import StageEstimate
from streamrl.producers.prompts.sources import open_source
from streamrl.schemas.errors import StreamRLError
from streamrl.settings.layers import is_setting_variable
from streamrl.settings.loading import as_tree
from streamrl.settings.tree import Settings

_NEIGHBOUR = """
import os, sys
import torch

torch.set_num_threads(1)
square = torch.rand(256, 256)
print("computes", flush=True)
while os.getppid() == int(sys.argv[1]):
    for _ in range(20):
        square = torch.tanh(square @ square / 256)
"""
"""A program that keeps a core busy with products of matrices, as models do, as long as its parent lives."""


@contextmanager
def neighbours(number: int) -> Iterator[None]:
    """Keep ``number`` cores busy during the block, with one process each."""
    command = [sys.executable, "-c", _NEIGHBOUR, str(os.getpid())]
    started = [subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) for _ in range(number)]
    try:
        for process in started:
            assert process.stdout is not None
            process.stdout.readline()
        yield
    finally:
        for process in started:
            process.kill()
            process.communicate()


@dataclass
class SharingMeter:
    """Measures the same work with and without neighbours on the other cores."""

    cores: int = field(default_factory=usable_cores)
    alone_s: float = field(init=False, default=0.0)
    crowded_s: float = field(init=False, default=0.0)
    cpu_s: float = field(init=False, default=0.0)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Time work that has the machine alone."""
        spent, started_at = family_cpu_s(os.getpid()), time.perf_counter()
        yield
        self.alone_s = time.perf_counter() - started_at
        self.cpu_s = family_cpu_s(os.getpid()) - spent

    @contextmanager
    def crowded(self) -> Iterator[None]:
        """Time the same work while each other core computes."""
        with neighbours(self.cores - 1):
            started_at = time.perf_counter()
            yield
            self.crowded_s = time.perf_counter() - started_at

    @property
    def used(self) -> float:
        """Cores that the work keeps busy."""
        return min(float(self.cores), max(self.cpu_s / self.alone_s, 0.1))

    @property
    def full_speed(self) -> float:
        """Its speed if as many cores are busy as there are, relative to its speed alone."""
        # With work that uses several cores, more processes computed than there are cores, and took turns.
        turns = max(1.0, (self.cores - 1 + self.used) / self.cores)
        return min(1.0, self.alone_s / self.crowded_s * turns)


def family_cpu_s(root: int) -> float:
    """Seconds of processor time so far, of a process and all below it."""
    return sum(cpu_s_by_process(root).values())


# What a run costs beside decoding and training: a real run, whose engines and trainer only wait. It runs at two paces,
# which separates what each trajectory costs from what the processes cost even without any.

MEASURED_S = 8.0
STEP_S = 1.5
FASTER = 4.0
STARTING_S = 300.0
"""Seconds until a run must have made its first steps; a start takes about ten on a machine with nothing else to do."""
PARTS = ("loop", "dispatch", "batching", "lengths")
"""Sections whose settings decide what broker and dispatcher do."""
PROMPTS = 1000
"""Made-up prompts, since a user's may be refused by the emulated engine, which counts tokens by characters."""


@dataclass(frozen=True)
class RunCosts:
    """Seconds of a core for each trajectory, and cores that are busy at all times.

    ``worker_cpu_s_per_trajectory``: of the seconds for a trajectory, those of its worker.
    """

    cpu_s_per_trajectory: float
    cores_per_run: float
    worker_cpu_s_per_trajectory: float = 0.0


@dataclass(frozen=True)
class RunWindow:
    """Some seconds of a run: its trajectories, and the processor time that it spent, and of that its workers."""

    trajectories: int
    seconds: float
    cpu_s: float
    worker_cpu_s: float = 0.0

    @property
    def rate(self) -> float:
        """Trajectories a second."""
        return self.trajectories / self.seconds

    @property
    def busy(self) -> float:
        """Cores that were busy."""
        return self.cpu_s / self.seconds


def run_costs(settings: Settings, scratch: Path) -> RunCosts:
    """Measure runs with the settings' emulated costs; if a step would take longer than ``STEP_S``, at a faster pace.

    Raises:
        StreamRLError: a run ended, or made no steps in time.
    """
    stages = StageEstimate(settings, open_source(settings.data, run_seed=settings.run.seed), 1)
    step_s = max(stages.generation_s(settings.run.workers), stages.training_s(1))
    prompts = scratch / "emulated-prompts.jsonl"
    prompts.write_text("".join(f'{{"prompt": "{n} + 1 =", "answer": "{n + 1}"}}\n' for n in range(PROMPTS)))
    windows = []
    for number, faster in enumerate((1.0, FASTER)):
        config = scratch / f"emulated-{number}.toml"
        tree = _emulated(settings, max(1.0, step_s / STEP_S) * faster)
        tree["data"] = {"path": str(prompts)}
        tree["run"] |= {"directory": str(scratch), "name": config.stem}
        config.write_text(tomli_w.dumps(tree))
        windows.append(_window(config, scratch / config.stem / "metrics.jsonl", settings))
    return fit_run_costs(*windows)


def fit_run_costs(slow: RunWindow, fast: RunWindow) -> RunCosts:
    """The line through two windows: busy cores = ``cores_per_run`` + trajectories a second * ``cpu_s_per_trajectory``.

    Neither is below zero.
    """
    between = fast.rate - slow.rate
    per_trajectory, of_worker = 0.0, 0.0
    if between > 0:
        per_trajectory = min(max(0.0, (fast.busy - slow.busy) / between), fast.busy / fast.rate)
        of_worker = (fast.worker_cpu_s / fast.seconds - slow.worker_cpu_s / slow.seconds) / between
    always = max(0.0, (slow.busy + fast.busy - per_trajectory * (slow.rate + fast.rate)) / 2)
    return RunCosts(per_trajectory, always, min(max(0.0, of_worker), per_trajectory))


def _emulated(settings: Settings, time_scale: float) -> dict[str, dict[str, Any]]:
    tree = as_tree(settings)
    # Tokens come one by one, as a real engine has them, since workers look at each.
    decode = tree["emulation"]["decode"] | {"chunk_tokens": 1}
    return {
        "run": {"workers": settings.run.workers},
        **{name: tree[name] for name in PARTS if name in tree},
        "generation": {"engine": "emulated", "max_num_seqs": settings.generation.max_num_seqs},
        "training": {"backend": "emulated", "max_steps": 100_000},
        "emulation": tree["emulation"] | {"time_scale": time_scale, "decode": decode},
    }


def _window(config: Path, metrics: Path, settings: Settings) -> RunWindow:
    """What a run spends in ``MEASURED_S`` after its first steps, or until it has made another one."""
    log = config.with_suffix(".log")
    with log.open("w") as output:
        command = [sys.executable, "-m", "streamrl", "run", str(config)]
        run = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=own_environment())
    try:
        _wait_for_step(2 + settings.loop.staleness_bound, metrics, run, log)
        first, started_at, spent = _steps(metrics), time.monotonic(), cpu_s_by_process(run.pid)
        time.sleep(MEASURED_S)
        _wait_for_step(first + 1, metrics, run, log)  # on a starved machine, none may have come yet
        steps, seconds = _steps(metrics) - first, time.monotonic() - started_at
        since = {pid: cpu_s - spent.get(pid, 0.0) for pid, cpu_s in cpu_s_by_process(run.pid).items()}
        worker_cpu_s = sum(cpu_s for pid, cpu_s in since.items() if _is_worker(pid))
    finally:
        run.send_signal(signal.SIGINT)
        try:
            run.wait(30.0)
        except subprocess.TimeoutExpired:
            run.kill()
            run.wait()
    trajectories = steps * settings.loop.groups_per_step * settings.loop.num_generations
    return RunWindow(trajectories, seconds, sum(since.values()), worker_cpu_s)


def _is_worker(pid: int) -> bool:
    with suppress(psutil.Error):  # it has ended
        return ("streamrl", "worker") in pairwise(psutil.Process(pid).cmdline())
    return False


def own_environment() -> dict[str, str]:
    """The environment without settings: a measured run must not join a cluster that the user's runs join."""
    return {name: value for name, value in os.environ.items() if not is_setting_variable(name)}


def _wait_for_step(number: int, metrics: Path, run: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + STARTING_S
    while _steps(metrics) < number:
        if run.poll() is not None or time.monotonic() > deadline:
            said = log.read_text(errors="replace").strip()[-300:]
            raise StreamRLError(f"expected an emulated run to make steps within {STARTING_S:.0f} s, got: {said}")
        time.sleep(0.1)


def _steps(metrics: Path) -> int:
    with suppress(FileNotFoundError):
        return metrics.read_text().count("\n")
    return 0
