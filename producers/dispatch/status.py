"""What the dispatcher shows of itself: a snapshot for the log and for displays. Pure."""

from dataclasses import dataclass

from streamrl.producers.dispatch.scheduler import ArmSchedulers
from streamrl.producers.dispatch.state import DispatchState
from streamrl.producers.lengths.calibration import CalibrationReport
from streamrl.schemas.identifiers import PolicyVersion


@dataclass(frozen=True, slots=True)
class WorkerQueueStatus:
    """A worker's share of the plan: prompts not sent yet, and completions that it shall run at once."""

    worker_id: str
    concurrency: int
    is_reduced: bool
    unsent: int


@dataclass(frozen=True, slots=True)
class DispatcherStatus:
    """A snapshot for logs and displays. ``in_flight`` counts groups, ``missing`` samples not yet on the topic.

    ``unsent``: prompts drawn and not ordered; ``stolen``: those that another worker than planned took. ``predicted_s``
    and ``actual_s``: from drawing to the last sample, of the window that ended last. ``speed``: decode steps that the
    workers make, as a multiple of what their curves say; ``speeds``: of each.
    """

    version: PolicyVersion | None
    mode: str
    cursor: int
    admitted: int
    reordered: int
    moved: int
    given_up: int
    in_flight: int
    missing: int
    workers_ready: int
    unsent: int
    queues: tuple[WorkerQueueStatus, ...]
    plans: int
    stolen: int
    predicted_s: float | None
    actual_s: float | None
    speed: float
    speeds: dict[str, float]
    lengths: CalibrationReport

    def fields(self) -> dict[str, object]:
        """For a line of the log."""
        return {
            "version": str(self.version),
            "mode": self.mode,
            "cursor": self.cursor,
            "in_flight": self.in_flight,
            "missing": self.missing,
            "workers": self.workers_ready,
            "reordered": self.reordered,
            "moved": self.moved,
            "unsent": self.unsent,
            "queues": {queue.worker_id: queue.unsent for queue in self.queues},
            "reduced_concurrency": {queue.worker_id: queue.concurrency for queue in self.queues if queue.is_reduced},
            "plans": self.plans,
            "stolen": self.stolen,
            "predicted_finish_s": _rounded(self.predicted_s),
            "actual_finish_s": _rounded(self.actual_s),
            "decode_speed": round(self.speed, 3),
            "decode_speeds": {name: round(speed, 3) for name, speed in self.speeds.items()},
            **self.lengths.fields(),
        }


def status_of(state: DispatchState, scheduler: ArmSchedulers, now: float) -> DispatcherStatus:
    """A snapshot."""
    return DispatcherStatus(
        version=state.ledger.current,
        mode=state.mode,
        cursor=state.cursor,
        admitted=state.admitted,
        reordered=state.reordered,
        moved=state.moved,
        given_up=state.given_up,
        in_flight=state.ledger.in_flight,
        missing=sum(len(flight.missing) for flight in state.flights.unfinished()),
        workers_ready=len(state.fleet.ready(now)),
        unsent=scheduler.unsent,
        queues=tuple(
            WorkerQueueStatus(queue.worker_id, queue.concurrency, queue.is_reduced, len(queue.items))
            for queue in scheduler.queues()
        ),
        plans=scheduler.plans,
        stolen=scheduler.stolen,
        predicted_s=state.plan_accuracy.predicted_s,
        actual_s=state.plan_accuracy.actual_s,
        speed=state.progress.speed,
        speeds=state.progress.speeds,
        lengths=state.calibration.report(),
    )


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 2)
