"""What a recording says: rates over the steady steps, and where the time of workers and trainer went. Pure.

Everything is in emulated seconds; ``time_scale`` of them make one of the wall clock.
"""

from dataclasses import dataclass
from statistics import fmean

import numpy as np

from benchmarks.pipeline.running.recording import Recording


@dataclass(frozen=True)
class Figures:
    """``generation_s``: from a step's first order to its last trajectory, mean; of use in the synchronous mode.

    ``slots_busy``: share of all slots' time in which they decode; ``staleness``: the oldest trained token, in steps.
    """

    trajectories_per_s: float
    tokens_per_s: float
    step_s: float
    generation_s: float
    slots_busy: float
    trainer_busy: float
    staleness: float


def figures(recording: Recording, *, warm_up: int, steps: int, slots: int, time_scale: float) -> Figures:
    """Figures of ``steps`` steps after the first ``warm_up``."""
    reports = recording.reports[warm_up : warm_up + steps + 1]
    assert len(reports) == steps + 1, f"expected {warm_up + steps} steps, got {len(recording.reports) - 1}"
    began, ended = reports[0].sent_at, reports[-1].sent_at
    seconds = (ended - began) * time_scale
    counted = np.isin(recording.trained_in, [report.step for report in reports[1:]])
    busy = occupancy(recording, began, ended, bins=2000, slots=slots)
    trained = sum(report.metrics.get("emulated/train_s", 0.0) for report in reports[1:])
    return Figures(
        trajectories_per_s=float(counted.sum()) / seconds,
        tokens_per_s=float(recording.lengths[counted].sum()) / seconds,
        step_s=seconds / steps,
        generation_s=time_scale * fmean(_generated_s(recording, report.step) for report in reports[1:]),
        slots_busy=float(np.mean(list(busy.values()))) / slots,
        trainer_busy=trained / seconds,
        staleness=max(report.metrics.get("off_policy/max", 0.0) for report in reports[1:]),
    )


def occupancy(
    recording: Recording, began: float, ended: float, *, bins: int, slots: int
) -> dict[str, "np.typing.NDArray[np.float64]"]:
    """Running completions by worker at the middle of each bin of a stretch of the wall clock.

    A completion counts from when the engine had its request; those beyond the slots wait in the engine.
    """
    moments = began + (np.arange(bins) + 0.5) * (ended - began) / bins
    found = {}
    for worker in np.unique(recording.workers):
        own = recording.workers == worker
        starts, ends = np.sort(recording.started_at[own]), np.sort(recording.finished_at[own])
        held = np.searchsorted(starts, moments, side="right") - np.searchsorted(ends, moments, side="right")
        found[str(worker)] = np.minimum(held, slots).astype(np.float64)
    return found


def _generated_s(recording: Recording, step: int) -> float:
    own = recording.trained_in == step
    return float(recording.finished_at[own].max() - recording.created_at[own].min())
