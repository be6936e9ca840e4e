"""What a run's topics say of it: when each trajectory began and ended and where, and each optimizer step's report."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bus.history import History
from schemas.reports import StepReport
from schemas.topics import STEPS, TRAJECTORIES
from schemas.trajectories import Trajectory


@dataclass(frozen=True)
class Recording:
    """One row per trajectory, ordered by position; times in seconds since the epoch, of the wall clock.

    ``trained_in``: the number of the step, -1 for none. ``reports``: the step reports, the one of step 0 first.
    """

    positions: NDArray[np.int64]
    workers: NDArray[np.str_]
    lengths: NDArray[np.int64]
    predicted: NDArray[np.int64]
    created_at: NDArray[np.float64]
    started_at: NDArray[np.float64]
    finished_at: NDArray[np.float64]
    trained_in: NDArray[np.int64]
    reports: tuple[StepReport, ...]


async def read_recording(history: History, run: str) -> Recording:
    """Read the topics of a run that has ended."""
    reports = await _reports(history, run)
    step_of = {group: report.step for report in reports for group in report.group_ids}
    rows = []
    async for record in history.records(TRAJECTORIES.full_name(run)):
        message = record.message()
        assert isinstance(message, Trajectory), "the topic holds nothing else"
        rows.append(_Row.of(message, step_of.get(message.group_id, -1)))
    rows.sort(key=lambda row: row.position)
    return Recording(
        positions=np.array([row.position for row in rows], np.int64),
        workers=np.array([row.worker for row in rows], np.str_),
        lengths=np.array([row.length for row in rows], np.int64),
        predicted=np.array([row.predicted for row in rows], np.int64),
        created_at=np.array([row.created_at for row in rows], np.float64),
        started_at=np.array([row.started_at for row in rows], np.float64),
        finished_at=np.array([row.finished_at for row in rows], np.float64),
        trained_in=np.array([row.trained_in for row in rows], np.int64),
        reports=tuple(reports),
    )


@dataclass(frozen=True, slots=True)
class _Row:
    """A trajectory without its tokens."""

    position: int
    worker: str
    length: int
    predicted: int
    created_at: float
    started_at: float
    finished_at: float
    trained_in: int

    @classmethod
    def of(cls, trajectory: Trajectory, step: int) -> "_Row":
        """What is kept."""
        return cls(
            trajectory.position,
            trajectory.worker_id,
            len(trajectory.token_ids),
            trajectory.predicted_length,
            trajectory.created_at,
            trajectory.started_at,
            trajectory.finished_at,
            step,
        )


async def _reports(history: History, run: str) -> list[StepReport]:
    found = {}
    async for record in history.records(STEPS.full_name(run)):
        message = record.message()
        if isinstance(message, StepReport):
            found[message.step] = message
    return [found[step] for step in sorted(found)]
