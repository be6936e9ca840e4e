"""Memory and file descriptors of processes over time, and how steeply they grow. Pure, but for reading /proc."""

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MIB = 1 << 20
WARM_UP_S = 60.0
SHORTEST_STRETCH_S = 30.0


@dataclass(frozen=True)
class Sample:
    """One process at one moment; ``at`` in seconds since the soak began, ``memory`` is the resident set in bytes."""

    role: str
    pid: int
    at: float
    memory: int
    descriptors: int


@dataclass(frozen=True)
class Slope:
    """Growth per hour over the longest stretch of one role without a restart, after its first minute."""

    role: str
    stretch_s: float
    memory_mib: float
    memory_mib_per_h: float
    descriptors: int
    descriptors_per_h: float

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def look_at(role: str, pid: int, at: float) -> Sample | None:
    """None for a process that has just ended; one that only waits to be reaped has no memory."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        descriptors = len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return None
    if pages == 0:
        return None
    return Sample(role, pid, round(at, 1), pages * os.sysconf("SC_PAGE_SIZE"), descriptors)


def slopes(samples: Sequence[Sample]) -> list[Slope]:
    """By role; a role that was never alive for long has none."""
    return [slope for role in sorted({sample.role for sample in samples}) if (slope := _slope(role, samples))]


def _slope(role: str, samples: Sequence[Sample]) -> Slope | None:
    lives: dict[int, list[Sample]] = {}
    for sample in samples:
        if sample.role == role:
            lives.setdefault(sample.pid, []).append(sample)
    longest = max(lives.values(), key=lambda life: life[-1].at - life[0].at)
    settled = [sample for sample in longest if sample.at >= longest[0].at + WARM_UP_S]
    if len(settled) < 2 or settled[-1].at - settled[0].at < SHORTEST_STRETCH_S:
        return None
    hours = [sample.at / 3600 for sample in settled]
    return Slope(
        role,
        round(settled[-1].at - settled[0].at, 1),
        round(settled[-1].memory / MIB, 1),
        round(least_squares(hours, [sample.memory / MIB for sample in settled]), 2),
        settled[-1].descriptors,
        round(least_squares(hours, [float(sample.descriptors) for sample in settled]), 2),
    )


def least_squares(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Slope of the line through the points with the least squared error."""
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - mean_x) ** 2 for x in xs)
    return sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread if spread else 0.0
