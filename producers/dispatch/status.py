"""What the dispatcher shows of itself."""

from dataclasses import dataclass

from producers.dispatch.scheduler import Scheduler
from producers.dispatch.state import DispatchState
from producers.lengths.calibration import CalibrationReport
from schemas.identifiers import PolicyVersion


@dataclass(frozen=True, slots=True)
class LaneStatus:
    """A worker's share of the plan: prompts not sent yet, and completions that it shall run at once."""

    worker_id: str
    concurrency: int
    is_reduced: bool
    unsent: int


@dataclass(frozen=True, slots=True)
class DispatcherStatus:
    """A snapshot for logs and displays. ``in_flight`` counts groups, ``missing`` samples not yet on the topic.

    ``unsent``: prompts drawn and not ordered; ``stolen``: those that another worker than planned took. ``predicted_s``
    and ``actual_s``: from drawing to the last sample, of the window that ended last.
    """

    version: PolicyVersion | None
    mode: str
    cursor: int
    admitted: int
    reordered: int
    given_up: int
    in_flight: int
    missing: int
    workers_ready: int
    unsent: int
    lanes: tuple[LaneStatus, ...]
    plans: int
    stolen: int
    predicted_s: float | None
    actual_s: float | None
    speed: float
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
            "unsent": self.unsent,
            "queues": {lane.worker_id: lane.unsent for lane in self.lanes},
            "reduced_lanes": {lane.worker_id: lane.concurrency for lane in self.lanes if lane.is_reduced},
            "plans": self.plans,
            "stolen": self.stolen,
            "predicted_finish_s": _rounded(self.predicted_s),
            "actual_finish_s": _rounded(self.actual_s),
            "decode_speed": round(self.speed, 3),
            **self.lengths.fields(),
        }


def status_of(state: DispatchState, scheduler: Scheduler, now: float) -> DispatcherStatus:
    """A snapshot."""
    return DispatcherStatus(
        version=state.ledger.current,
        mode=state.mode,
        cursor=state.cursor,
        admitted=state.admitted,
        reordered=state.reordered,
        given_up=state.given_up,
        in_flight=state.ledger.in_flight,
        missing=sum(len(flight.missing) for flight in state.flights.unfinished()),
        workers_ready=len(state.fleet.ready(now)),
        unsent=len(scheduler.lanes),
        lanes=tuple(
            LaneStatus(lane.worker_id, lane.concurrency, lane.is_reduced, len(lane.queue)) for lane in scheduler.lanes
        ),
        plans=scheduler.plans,
        stolen=scheduler.lanes.stolen,
        predicted_s=state.outcomes.predicted_s,
        actual_s=state.outcomes.actual_s,
        speed=state.progress.speed,
        lengths=state.calibration.report(),
    )


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 2)
