"""Workers in virtual time: the real state and scheduler, and workers that decode along a curve.

Heartbeats, orders and trajectories arrive at once, or ``delay_s`` later; lengths are the true ones, not the estimates.
"""

import heapq
import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from streamrl.producers.dispatch.dispatcher import build_order, build_reorder
from streamrl.producers.dispatch.scheduler import PendingPrompt, Scheduler
from streamrl.producers.dispatch.settings import DispatchSettings
from streamrl.producers.dispatch.state import DispatchState, OtherRoles
from streamrl.producers.lengths.predictor import ConstantLength
from streamrl.producers.lengths.settings import LengthSettings
from streamrl.schemas.profiles import DecodeCurve, DecodeSettings
from streamrl.schemas.reports import WorkerState
from streamrl.schemas.settings import LoopSettings
from streamrl.schemas.trajectories import LengthEstimate, Prompt, WorkOrder
from tests.producers.dispatch.scene import heartbeat, step_report, trajectory

CURVE = DecodeCurve(DecodeSettings())


@dataclass
class _Worker:
    """A worker: what it runs, by the decode step at which it ends, and what waits for a slot."""

    slots: int
    at: float = 0.0
    steps: float = 0.0
    running: list[tuple[float, int, WorkOrder, int]] = field(default_factory=list)
    waiting: deque[tuple[WorkOrder, int]] = field(default_factory=deque)

    def next_end(self) -> float:
        if not self.running:
            return float("inf")
        return self.at + (self.running[0][0] - self.steps) * CURVE.batch_s(len(self.running))

    def advance(self, now: float) -> None:
        if self.running:
            self.steps += (now - self.at) / CURVE.batch_s(len(self.running))
        self.at = now


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
        predictor, roles = ConstantLength(LengthSettings(), self.loop), OtherRoles(curve=CURVE)
        self.state = DispatchState(self.loop, self.settings, predictor, roles)
        self.scheduler = Scheduler(self.state, self.settings)
        self.lengths, self.predicted, self.delay_s = lengths, predicted, delay_s
        self.workers = {f"w{n}": _Worker(slots) for n in range(workers)}
        self.sent: list[WorkOrder] = []
        self.finished_at: dict[int, float] = {}
        self._mail: list[tuple[float, int, WorkOrder, int, bool]] = []
        self._count = itertools.count()
        self._has_lost_one = False

    def run(self, *, dies_at: float | None = None) -> float:
        """Seconds until the last completion is there. ``dies_at``: when the first worker stops for good."""
        self.state.observe(step_report(0), 0.0)
        for name, worker in self.workers.items():
            self.state.observe(heartbeat(name, capacity=worker.slots), 0.0)
        self._serve(0.0)
        while len(self.finished_at) < len(self.lengths):
            name, worker = min(self.workers.items(), key=lambda pair: pair[1].next_end())
            now = min(worker.next_end(), self._mail[0][0] if self._mail else float("inf"))
            assert now < float("inf"), "nothing goes on"
            if dies_at is not None and now >= dies_at:
                self._die(dies_at)
                dies_at = None
            elif self._mail and now == self._mail[0][0]:
                self._deliver(now)
            else:
                self._finish(name, worker, now)
        return max(self.finished_at.values())

    def _die(self, now: float) -> None:
        name = next(iter(self.workers))
        self.state.observe(heartbeat(name, state=WorkerState.STOPPED), now)
        del self.workers[name]
        self._has_lost_one = True
        self._mail = [message for message in self._mail if message[4] or message[2].worker_id != name]
        heapq.heapify(self._mail)
        self._serve(now)

    def _finish(self, name: str, worker: _Worker, now: float) -> None:
        worker.advance(now)
        _, _, order, index = heapq.heappop(worker.running)
        self._refill(worker)
        self._post(now, order, index, is_back=True)

    def _refill(self, worker: _Worker) -> None:
        while worker.waiting and len(worker.running) < worker.slots:
            order, index = worker.waiting.popleft()
            heapq.heappush(
                worker.running, (worker.steps + self.lengths[order.position], next(self._count), order, index)
            )

    def _post(self, now: float, order: WorkOrder, index: int, *, is_back: bool) -> None:
        heapq.heappush(self._mail, (now + self.delay_s, next(self._count), order, index, is_back))

    def _deliver(self, now: float) -> None:
        _, _, order, index, is_back = heapq.heappop(self._mail)
        if is_back:
            length = self.lengths[order.position]
            self.state.observe(trajectory(order, index, length=length), now)
            self.finished_at.setdefault(order.position, now)
            self._serve(now)
        else:
            worker = self.workers[order.worker_id]
            worker.advance(now)
            worker.waiting.append((order, index))
            self._refill(worker)

    def _pending(self, position: int) -> PendingPrompt:
        median = self.predicted[position]
        estimate = LengthEstimate(median=median, upper=median, bucket=0, predictor="told")
        prompt = Prompt(prompt_id=f"toy/{position}", dataset="toy", content="question")
        return PendingPrompt(position, prompt, f"toy/{position}/0", estimate)

    def _serve(self, now: float) -> None:
        """What a turn of the dispatcher does."""
        for flight in self.state.take_from_lost_workers(now) if self._has_lost_one else ():
            worker = self.state.choose(1, lambda held: True, now)
            if worker is not None:
                again = build_reorder(flight, worker)
                self.state.reassign(again, worker, now)
                self._send(again, now)
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
            self._send(order, now)

    def _send(self, order: WorkOrder, now: float) -> None:
        self.sent.append(order)
        for index in order.sample_indices:
            self._post(now, order, index, is_back=False)
