"""The dispatcher of the simulation: the real one's state and scheduler, told what it would read on the topics.

Knows neither timelines nor the trainer.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from deploy.planning.simulation.clockwork import Clockwork
from deploy.planning.simulation.work import Plant, Supply, Work
from producers.dispatch.scheduler import Scheduler
from producers.dispatch.state import DispatchState
from producers.dispatch.window.orders import OrderForm
from schemas.identifiers import PolicyVersion
from schemas.messages.reports import Heartbeat, StepReport, WorkerState
from schemas.messages.trajectories import FinishReason, Trajectory, VersionSpan

LINEAGE = 1


class SimulatedDispatcher:
    """``send`` gives a group, and its place among all that were admitted, to the worker of a number."""

    def __init__(self, plant: Plant, clock: Clockwork, supply: Supply, send: Callable[[int, Work, int], None]) -> None:
        self._plant, self._clock, self._supply, self._send = plant, clock, supply, send
        self._state = DispatchState(plant.loop, plant.dispatch, supply.predictor, plant.dispatch_curve)
        self._scheduler = Scheduler(self._state, plant.dispatch)
        self._form = OrderForm(plant.loop, seed=None)
        self._turn_due: float | None = None
        self._turned_at = 0.0

    def stepped(self, number: int, groups: tuple[str, ...]) -> None:
        """A step was reported."""
        report = StepReport(
            algorithm="plan",
            step=number,
            version=PolicyVersion(LINEAGE, number),
            manifest_sha256=None,
            group_ids=groups,
            micro_batches=(),
            metrics={},
            sent_at=self._now,
        )
        self._state.observe(report, self._now)
        self._turn_in(self._plant.latencies.turn_s)

    def adopted(self, worker: int, version: int) -> None:
        """A heartbeat says what a worker holds."""
        heartbeat = Heartbeat(
            worker_id=_name(worker),
            incarnation="1",
            state=WorkerState.READY,
            engine="emulated",
            version=PolicyVersion(LINEAGE, version),
            capacity=self._plant.slots,
            running=1,
            waiting=0,
            generated_tokens=0,
            finished_trajectories=0,
            tokens_per_s=0.0,
            sequence=version,
            sent_at=self._now,
        )
        self._state.observe(heartbeat, self._now)
        self._turn_in(self._plant.latencies.turn_s)

    def finished(self, worker: int, work: Work, sample_index: int, version: int) -> None:
        """A completion is on the topic."""
        flight = self._state.flights.get(work.group_id)
        if flight is None:
            return
        length, limit = work.lengths[sample_index], self._plant.loop.max_completion_length
        held = PolicyVersion(LINEAGE, version)
        known: dict[str, Any] = {
            "group_id": work.group_id,
            "sample_index": sample_index,
            "position": work.position,
            "worker_id": _name(worker),
            "dataset": flight.order.prompt.dataset,
            "finish_reason": FinishReason.LENGTH if length >= limit else FinishReason.STOP,
            "token_ids": range(length),
            "version_spans": (VersionSpan(version=held, start=0, end=length),),
            "admitted_version": held,
        }
        trajectory = Trajectory.model_construct(**known)  # nothing of it is sent, and its tokens are only counted
        self._state.observe(trajectory, self._now)
        self._turn_in(self._plant.latencies.turn_s)

    @property
    def _now(self) -> float:
        """Seconds of the wall clock."""
        return self._clock.now / self._plant.time_scale

    def _turn_in(self, seconds: float) -> None:
        due = self._clock.now + seconds
        if self._turn_due is None or due < self._turn_due:
            self._turn_due = due
            self._clock.at(due, partial(self._turn, due))

    def _turn(self, due: float) -> None:
        if self._turn_due != due:
            return
        self._turn_due = None
        self._state.fleet.extend_leases(self._now - self._turned_at)
        self._turned_at = self._now
        self._order()
        settings = self._plant.dispatch
        idle_s = settings.poll_s if len(self._scheduler.lanes) else max(settings.poll_s, settings.adoption_patience_s)
        self._turn_in(idle_s * self._plant.time_scale)

    def _order(self) -> None:
        """What a turn of the real dispatcher does, without its bus."""
        state, scheduler = self._state, self._scheduler
        scheduler.begin_turn(self._now)
        if wanted := scheduler.wanted():
            scheduler.add([self._supply.draft(position) for position in state.positions.next(wanted)])
        if scheduler.wants_plan():
            scheduler.adopt(scheduler.planner()())
        while (found := scheduler.next()) is not None:
            draft, worker = found
            order = self._form.first(draft, worker, state.created_at(self._now), state.ledger.next_due)
            state.admit(order, worker, self._now)
            scheduler.sent(worker)
            number, work = int(worker.worker_id), self._supply.work(draft)
            self._clock.after(self._plant.latencies.order_s, partial(self._send, number, work, state.admitted))
        if scheduler.wanted():
            self._turn_in(self._plant.latencies.turn_s)


def _name(worker: int) -> str:
    return f"{worker:03}"
