"""The dispatcher's status: a snapshot for the log and for displays. Pure."""

from dataclasses import dataclass

from streamrl.producers.dispatch.scheduler import Schedulers
from streamrl.producers.dispatch.state import DispatchState
from streamrl.producers.lengths.calibration import CalibrationReport
from streamrl.schemas.identifiers import PolicyVersion


@dataclass(frozen=True, slots=True)
class WorkerQueueStatus:
    """A worker's share of the plan: unsent prompts, and completions that it is to run at once."""

    worker_id: str
    concurrency: int
    is_reduced: bool
    unsent: int


@dataclass(frozen=True, slots=True)
class OrdersStatus:
    """Counts of groups: ``admitted``, ``reordered``, ``moved`` and ``given_up`` so far; ``in_flight`` now.

    ``missing``: samples not yet on the topic; ``passed_over``: prompts that were drawn and not ordered.
    """

    admitted: int
    reordered: int
    moved: int
    given_up: int
    in_flight: int
    missing: int
    passed_over: int = 0


@dataclass(frozen=True, slots=True)
class PlanStatus:
    """The window that is being sent.

    ``unsent``: prompts drawn and not ordered; ``plans``: plans adopted so far; ``stolen``: prompts that a worker took
    from another one's queue; ``predicted_s`` and ``actual_s``: seconds from drawing to the last sample, of the window
    that ended last.
    """

    unsent: int
    queues: tuple[WorkerQueueStatus, ...]
    plans: int
    stolen: int
    predicted_s: float | None
    actual_s: float | None


@dataclass(frozen=True, slots=True)
class DispatcherStatus:
    """A snapshot for logs and displays.

    ``speed``: decode steps that the workers make, as a multiple of their curves; ``speeds``: the same for each worker.
    """

    version: PolicyVersion | None
    mode: str
    cursor: int
    workers_ready: int
    orders: OrdersStatus
    plan: PlanStatus
    speed: float
    speeds: dict[str, float]
    lengths: CalibrationReport

    def fields(self) -> dict[str, object]:
        """The fields of a log line."""
        orders, plan = self.orders, self.plan
        return {
            "version": str(self.version),
            "mode": self.mode,
            "cursor": self.cursor,
            "in_flight": orders.in_flight,
            "missing": orders.missing,
            "workers": self.workers_ready,
            "reordered": orders.reordered,
            "moved": orders.moved,
            "passed_over": orders.passed_over,
            "unsent": plan.unsent,
            "queues": {queue.worker_id: queue.unsent for queue in plan.queues},
            "reduced_concurrency": {queue.worker_id: queue.concurrency for queue in plan.queues if queue.is_reduced},
            "plans": plan.plans,
            "stolen": plan.stolen,
            "predicted_finish_s": _rounded(plan.predicted_s),
            "actual_finish_s": _rounded(plan.actual_s),
            "decode_speed": round(self.speed, 3),
            "decode_speeds": {name: round(speed, 3) for name, speed in self.speeds.items()},
            **self.lengths.fields(),
        }


def status_of(state: DispatchState, scheduler: Schedulers, now: float) -> DispatcherStatus:
    """A snapshot of the dispatcher."""
    return DispatcherStatus(
        version=state.ledger.current,
        mode=state.mode,
        cursor=state.cursor,
        workers_ready=len(state.fleet.ready(now)),
        orders=OrdersStatus(
            admitted=state.admitted,
            reordered=state.reordered,
            moved=state.moved,
            given_up=state.given_up,
            in_flight=state.ledger.in_flight,
            missing=sum(len(flight.missing) for flight in state.flights.unfinished()),
            passed_over=state.passed_over,
        ),
        plan=PlanStatus(
            unsent=scheduler.unsent,
            queues=tuple(
                WorkerQueueStatus(queue.worker_id, queue.concurrency, queue.is_reduced, len(queue.items))
                for queue in scheduler.queues()
            ),
            plans=scheduler.plans,
            stolen=scheduler.stolen,
            predicted_s=state.plan_accuracy.predicted_s,
            actual_s=state.plan_accuracy.actual_s,
        ),
        speed=state.progress.speed,
        speeds=state.progress.speeds,
        lengths=state.calibration.report(),
    )


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 2)
