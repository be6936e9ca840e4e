"""Generation by itself, as simulated with a trainer that takes no time: what the fit starts from.

All times of a decode curve are multiplied by a factor f, so a batch takes f times as long. So each stage is simulated
once, and the fit does without it.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.simulation.papers import LAMINAR, STREAMRL, LaminarRow, StreamRow
from benchmarks.simulation.parameters import laminar, streamrl
from benchmarks.simulation.plant import Plant, System, Workload
from benchmarks.simulation.world import World

QUANTILES = 33
NEUTRAL = {"train_gpu_s_per_token": 1e-15, "train_exponent": 0.0}
"""The trainer takes no time."""


def laminar_stages() -> Iterator[tuple[LaminarRow, str]]:
    """Of figure 11's fitted rows."""
    for row in LAMINAR:
        for name in ("verl", "one_step", "areal", "laminar") if row.published else ():
            yield row, name
        if (row.model, row.gpus) == ("32B", 128):
            yield row, "laminar_without_repack"


def laminar_stage(row: LaminarRow, name: str) -> dict[str, Any]:
    """Seconds of a batch; or tokens a second of replicas that are never held back."""
    if name in ("verl", "one_step"):
        return _named(row, name) | {"batch_s": _batch_s(row, name)}
    return _named(row, name) | {"rate": _rate(row, name)}


def _named(row: LaminarRow | StreamRow, name: str) -> dict[str, Any]:
    return {"model": row.model, "gpus": row.gpus, "system": name}


def stage(of: tuple[LaminarRow | StreamRow, str]) -> dict[str, Any]:
    """One of either."""
    row, name = of
    return laminar_stage(row, name) if isinstance(row, LaminarRow) else streamrl_stage(row, name)


def _batch_s(row: LaminarRow, name: str) -> float:
    plant, work, system = laminar(row, name, NEUTRAL)
    system = replace(system, mode="synchronous", adoption="barrier")
    return World(_at_once(plant), work, system, 0).run(1).step_s(0)


def _at_once(plant: Plant) -> Plant:
    return replace(plant, sync_s=0.0, stall_s=0.0, adopt_s=0.0, arrivals_s=())


def _rate(row: LaminarRow, name: str) -> float:
    plant, work, system = laminar(row, "laminar" if name == "areal" else name, NEUTRAL)
    gpus = row.split(name)[1] // (row.split("laminar")[1] // plant.replicas)
    plant = replace(_at_once(plant), replicas=gpus)
    # Enough for every replica to begin a third batch.
    steps = max(4, min(12, 3 * plant.replicas * plant.slots // work.samples))
    found = World(plant, work, system, 0).run(steps)
    return found.rate(steps // 2)


def streamrl_stages() -> Iterator[tuple[StreamRow, str]]:
    """Of figure 8's fitted rows."""
    for row in STREAMRL:
        for name in ("colocation", "sync", "async") if row.published else ():
            yield row, name


def streamrl_stage(row: StreamRow, name: str) -> dict[str, Any]:
    """When a batch's completions end, by their share of its tokens; or seconds of a batch that is generated beside the
    next one.
    """
    plant, work, system = streamrl(row, name, NEUTRAL)
    plant = _at_once(plant)
    found = {"lengths": row.lengths, **_named(row, name), "tokens": work.tokens}
    if name == "async":
        return found | {"batch_s": World(plant, work, system, 0).run(6).step_s(2)}
    return found | {"ends_s": _ends(plant, work, replace(system, mode="synchronous"))}


def _ends(plant: Plant, work: Workload, system: System) -> list[float]:
    found = World(plant, work, replace(system, trains="batch"), 0).run(1).wholes
    times, tokens = (np.array(column, float) for column in zip(*found, strict=True))
    shares = np.cumsum(tokens) / tokens.sum()
    return [float(value) for value in np.interp(np.linspace(0, 1, QUANTILES), shares, times)]
