"""Decides when a window of prompts is drawn, when it is planned anew, and what is sent next to whom. Pure; seconds.

Invariants:
- advice_only: estimates choose a bucket, a worker and the order within a window. Which prompts are sent, and that all
  of a window leave before any later one, holds without them;
- a_window_is_sent_before_the_next_is_drawn.

With a staleness bound of 0 or 1 a whole batch may go out at once when a version was announced, and its last completion
ends it for all: the window waits until every worker can take part. With more, no finish matters as long as the bound
does not hold anybody back, and a plan gives up no capacity for one that is earlier than that.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from producers.dispatch.fleet import Candidate
from producers.dispatch.plans import Item, Plan, Worker, predicted_finish
from producers.dispatch.settings import DispatchSettings
from producers.dispatch.state import DispatchState
from producers.dispatch.strategies import STRATEGIES, skewness_aware
from producers.dispatch.window import Draft, Lanes

LOOK_S = 0.1
"""Time between two looks for completions that outgrew their estimates."""
TOLERANCE = 1.05
"""How much later than planned a finish may become before everything unsent is planned anew."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan, and its predicted finish by the decode curve."""

    plan: Plan
    finish_s: float


class Scheduler:
    """The window of one life of the dispatcher. ``ready``: the workers that take orders, as of this turn."""

    def __init__(self, state: DispatchState, settings: DispatchSettings) -> None:
        self._state = state
        self._settings = settings
        self._loop = state.loop
        self._is_static = settings.strategy == "round_robin"
        self._drafts: dict[int, Draft] = {}
        self._ready: list[Candidate] = []
        self._turn_at = self._looked_at = 0.0
        self._due_at = 0.0
        self._waiting_since: float | None = None
        self._blocked_since: dict[str, float] = {}
        self.plans = 0
        self.lanes = Lanes(state.curve, settings.overcommit, self._outstanding, is_static=self._is_static)

    def begin_turn(self, now: float) -> None:
        """Look at the workers; what was planned for those that can take nothing is for others."""
        self._turn_at = now
        self._ready = [worker for worker in self._state.candidates(now) if worker.capacity > 0]
        able = {worker.worker_id for worker in self._able()}
        for worker in self._ready:
            if worker.worker_id in able:
                self._blocked_since.pop(worker.worker_id, None)
            else:
                self._blocked_since.setdefault(worker.worker_id, now)
        ready = {worker.worker_id for worker in self._ready}
        for lane in list(self.lanes):
            blocked_s = now - self._blocked_since.get(lane.worker_id, now)
            if lane.worker_id not in ready or (able and blocked_s > self._settings.adoption_patience_s):
                self.lanes.release(lane.worker_id)

    def wanted(self) -> int:
        """How many prompts to draw now: nothing as long as some are unsent, no worker has room, or some adopt yet."""
        able = self._able()
        samples, overcommit = self._loop.num_generations, self._settings.overcommit
        if len(self.lanes) or not any(worker.has_room(samples, overcommit) for worker in able):
            return 0
        if self._loop.staleness_bound <= 1 and len(able) < len(self._ready):
            self._waiting_since = self._turn_at if self._waiting_since is None else self._waiting_since
            if self._turn_at - self._waiting_since < self._settings.adoption_patience_s:
                return 0
        self._waiting_since = None
        room = max(self._state.ledger.room(version) for version in {worker.version for worker in able})
        return min(self._loop.groups_per_step, room)

    def add(self, drafts: Sequence[Draft]) -> None:
        """A window was drawn. Prompts of which an earlier life sent an order are left out."""
        new = [draft for draft in drafts if not self._was_ordered(draft.group_id)]
        self._drafts |= {draft.position: draft for draft in new}
        self._state.outcomes.begin([draft.group_id for draft in new], self._turn_at)
        self.lanes.add(map(self._item, new))

    def _was_ordered(self, group_id: str) -> bool:
        return group_id in self._state.positions.ordered or self._state.ledger.is_in_flight(group_id)

    def _item(self, draft: Draft) -> Item:
        longest = self._loop.max_completion_length
        tokens, upper = min(draft.estimate.median, longest), min(draft.estimate.upper, longest)
        return Item(draft.position, tokens, self._loop.num_generations, upper)

    def wants_plan(self) -> bool:
        """Whether prompts have no worker, a worker has no lane, or a completion upsets the plan."""
        if not len(self.lanes) or not self._able():
            return False
        is_new = any(self.lanes.get(worker.worker_id) is None for worker in self._able())
        return bool(self.lanes.pool) or is_new or self._is_upset()

    def _is_upset(self) -> bool:
        """A completion that outgrew its estimate will go on after everything else should be over."""
        if self._is_static or self._turn_at - self._looked_at < LOOK_S:
            return False
        self._looked_at = now = self._turn_at
        for worker in self._ready:
            remaining = self._state.progress.remaining(worker.worker_id, now)
            if remaining.outgrown:
                step_s = self._state.curve.batch_s(len(remaining.running)) / self._state.progress.speed
                if now + max(remaining.outgrown) * step_s > self._due_at:
                    return True
        return False

    def planner(self) -> Callable[[], Planned]:
        """What makes the plan: takes long for many items, and may run in a thread as long as nothing else happens."""
        items, curve = self.lanes.unsent(), self._state.curve
        workers = [self._worker(worker) for worker in self._able()]
        strategy = STRATEGIES[self._settings.strategy]
        if strategy is skewness_aware:
            strategy = partial(skewness_aware, patience_s=self._patience_s(items, workers))

        def planned() -> Planned:
            plan = strategy(items, workers, curve).checked(items, workers)
            return Planned(plan, predicted_finish(plan, curve))

        return planned

    def _worker(self, worker: Candidate) -> Worker:
        remaining = self._state.progress.remaining(worker.worker_id, self._turn_at)
        return Worker(worker.worker_id, worker.capacity, remaining.running, remaining.waiting)

    def _patience_s(self, items: Sequence[Item], workers: Sequence[Worker]) -> float:
        """How long the groups that admission still allows behind these will keep all slots busy.

        With fixed batches these are all sampled while the batch before them is trained, and the next one behind them.
        """
        if self._loop.has_fixed_batches:
            left = len(items) + self._loop.groups_per_step
        else:
            left = self._loop.max_groups_in_flight - self._state.ledger.in_flight - len(items)
        rate = sum(worker.slots / self._state.curve.batch_s(worker.slots) for worker in workers)
        return max(0, left) * sum(item.load for item in items) / len(items) / rate

    def adopt(self, planned: Planned) -> None:
        """Follow this plan."""
        self.plans += 1
        self.lanes.adopt(planned.plan)
        finish_s = planned.finish_s / self._state.progress.speed
        self._state.outcomes.planned(finish_s)
        self._due_at = self._turn_at + TOLERANCE * finish_s

    def next(self) -> tuple[Draft, Candidate] | None:
        """The next prompt to order and the worker for it; none if no worker has room for what it shall sample."""
        found = self.lanes.next(self._able())
        if found is None:
            return None
        item, worker = found
        return self._drafts.pop(item.key), worker

    def sent(self, worker: Candidate) -> None:
        """An order for this worker was taken into account."""
        heartbeat = self._state.fleet.get(worker.worker_id)
        assert heartbeat is not None, "it was ready"
        number = next(n for n, ready in enumerate(self._ready) if ready.worker_id == worker.worker_id)
        self._ready[number] = self._state.candidate(heartbeat)

    def _able(self) -> list[Candidate]:
        may_admit = {version: self._state.ledger.may_admit(version) for version in {w.version for w in self._ready}}
        return [worker for worker in self._ready if may_admit[worker.version]]

    def _outstanding(self, worker_id: str) -> int:
        return self._state.progress.remaining(worker_id, self._turn_at).tokens
