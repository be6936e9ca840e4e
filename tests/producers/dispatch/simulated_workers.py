"""Workers in virtual time: the real state and scheduler, and workers that sample as the emulated engine does.

Heartbeats, orders and trajectories arrive at once, or ``delay_s`` later; lengths are the true ones, not the estimates.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from streamrl.planning.virtual_time import Events
from streamrl.producers.dispatch.dispatcher import build_order, build_reorder
from streamrl.producers.dispatch.scheduler import PendingPrompt, Scheduler
from streamrl.producers.dispatch.settings import DispatchSettings
from streamrl.producers.dispatch.state import DispatchState, OtherRoles
from streamrl.producers.generation.engines.emulated import EmulatedBatch, EmulatedSequence, TokensSampled
from streamrl.producers.lengths.predictor import ConstantLength
from streamrl.schemas.profiles import DecodeCurve, DecodeSettings
from streamrl.schemas.reports import WorkerState
from streamrl.schemas.settings import LoopSettings
from streamrl.schemas.trajectories import LengthEstimate, Prompt, WorkOrder
from tests.producers.dispatch.dispatcher_harness import heartbeat, step_report, trajectory

CURVE = DecodeCurve(DecodeSettings())


@dataclass(eq=False)
class _Worker:
    """The emulated engine's own batch, what it samples, and when it is to be looked at next."""

    slots: int
    wake_at: float | None = None
    orders: dict[EmulatedSequence, tuple[WorkOrder, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.batch: EmulatedBatch[int] = EmulatedBatch(CURVE, self.slots, 0)


class SimulatedWorkers:
    """One batch of prompts with these lengths, predicted as told, over workers with so many slots each."""

    def __init__(
        self,
        lengths: Sequence[int],
        predicted: Sequence[int],
        strategy: str,
        *,
        workers: int = 8,
        slots: int = 64,
        delay_s: float = 0.0,
    ) -> None:
        longest = max(*lengths, *predicted)
        self.loop = LoopSettings(
            groups_per_step=len(lengths),
            num_generations=1,
            mode="synchronous",
            max_completion_length=longest,
            heartbeat_timeout_s=1e9,
        )
        self.settings = DispatchSettings(strategy=strategy)
        predictor, roles = ConstantLength(self.loop), OtherRoles(curve=CURVE)
        self.state = DispatchState(self.loop, self.settings, predictor, roles)
        self.scheduler = Scheduler(self.state, self.settings)
        self.lengths, self.predicted, self.delay_s = lengths, predicted, delay_s
        self.workers = {f"w{n}": _Worker(slots) for n in range(workers)}
        self.sent: list[WorkOrder] = []
        self.finished_at: dict[int, float] = {}
        self._events = Events()
        self._has_lost_one = False

    def run(self, *, dies_at: float | None = None) -> float:
        """Seconds until the last completion is there. ``dies_at``: when the first worker stops for good."""
        self.state.observe(step_report(0), 0.0)
        for name, worker in self.workers.items():
            self.state.observe(heartbeat(name, capacity=worker.slots), 0.0)
        if dies_at is not None:
            self._events.at(dies_at, self._die)
        self._serve()
        self._events.run(lambda: len(self.finished_at) == len(self.lengths))
        return max(self.finished_at.values())

    def _die(self) -> None:
        name = next(iter(self.workers))
        self.state.observe(heartbeat(name, state=WorkerState.STOPPED), self._events.now)
        self.workers.pop(name).wake_at = None
        self._has_lost_one = True
        self._serve()

    def _follow(self, worker: _Worker) -> None:
        worker.wake_at = worker.batch.next_wake()
        if worker.wake_at is not None:
            self._events.at(worker.wake_at, partial(self._advance, worker, worker.wake_at))

    def _advance(self, worker: _Worker, wake_at: float) -> None:
        if wake_at != worker.wake_at:
            return
        for event in worker.batch.advance(wake_at):
            if isinstance(event, TokensSampled):
                self._post(partial(self._produced, *worker.orders.pop(event.sequence)))
        self._follow(worker)

    def _post(self, arrive: Callable[[], None]) -> None:
        self._events.at(self._events.now + self.delay_s, arrive)

    def _produced(self, order: WorkOrder, index: int) -> None:
        now = self._events.now
        self.state.observe(trajectory(order, index, length=self.lengths[order.position]), now)
        self.finished_at.setdefault(order.position, now)
        self._serve()

    def _ordered(self, order: WorkOrder, index: int) -> None:
        if (worker := self.workers.get(order.worker_id)) is not None:
            sequence = EmulatedSequence(0, self.lengths[order.position])
            worker.orders[sequence] = order, index
            worker.batch.arrive(sequence, self._events.now)
            self._follow(worker)

    def _pending(self, position: int) -> PendingPrompt:
        median = self.predicted[position]
        estimate = LengthEstimate(median=median, upper=median, bucket=0, predictor="told")
        prompt = Prompt(prompt_id=f"toy/{position}", dataset="toy", content="question")
        return PendingPrompt(position, prompt, f"toy/{position}/0", estimate)

    def _serve(self) -> None:
        """What a turn of the dispatcher does."""
        now = self._events.now
        for flight in self.state.take_from_lost_workers(now) if self._has_lost_one else ():
            worker = self.state.choose(1, lambda held: True, now)
            if worker is not None:
                again = build_reorder(flight, worker)
                self.state.reassign(again, worker, now)
                self._send(again)
        self.scheduler.begin_turn(now)
        if wanted := self.scheduler.wanted():
            self.scheduler.add([self._pending(n) for n in self.state.positions.next(wanted) if n < len(self.lengths)])
        if self.scheduler.wants_plan():
            self.scheduler.adopt(self.scheduler.planner()())
        while (found := self.scheduler.next()) is not None:
            pending, worker = found
            order = build_order(
                self.loop,
                pending,
                worker,
                created_at=self.state.created_at(now),
                due_step=self.state.ledger.next_due,
                seed=None,
            )
            self.state.admit(order, worker, now)
            self.scheduler.sent(worker)
            self._send(order)

    def _send(self, order: WorkOrder) -> None:
        self.sent.append(order)
        for index in order.sample_indices:
            self._post(partial(self._ordered, order, index))
