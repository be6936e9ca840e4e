"""How long after the end of a fault the run was on its way again, by the broker's clock. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from tests.chaos.checking.books import Books


@dataclass(frozen=True)
class FaultTime:
    """When a fault began and ended, in seconds since the epoch. ``target``: the process that was hit, if one was."""

    fault: str
    began: float
    ended: float
    target: str = ""


@dataclass(frozen=True)
class Recovery:
    """Seconds from the end of a fault to the next optimizer step, and to the next trajectory; none: the run was over.

    ``capacity_s``: to the next trajectory of the worker that was hit.
    """

    fault: str
    step_s: float | None
    trajectory_s: float | None
    capacity_s: float | None = None


def recoveries(books: Books, times: Sequence[FaultTime]) -> list[Recovery]:
    """One for each fault that had the time between its beginning and its recovery to itself."""
    found = [(time, recovery(books, time)) for time in times]
    return [
        each
        for time, each in found
        if not any(
            other is not time and other.began < time.ended + (each.step_s or 0.0) and other.ended > time.began
            for other in times
        )
    ]


def recovery(books: Books, time: FaultTime) -> Recovery:
    """Read off the times at which the broker stored records."""
    steps = [entry.stored_at for entry in books.reports if entry.report.micro_batches]
    trajectories = [record.stored_at for record in books.produced.values()]
    of_target = [record.stored_at for record in books.produced.values() if record.worker_id == time.target]
    return Recovery(
        time.fault, _after(steps, time.ended), _after(trajectories, time.ended), _after(of_target, time.ended)
    )


def _after(moments: list[float], moment: float) -> float | None:
    later = [each - moment for each in moments if each > moment]
    return round(min(later), 3) if later else None
