"""Decides when to draw a window of prompts, when to plan it again, and which prompt goes next to which worker. Pure;
times in seconds.

Invariants:
- every_prompt_is_sent_once: an item is in the pool, in one worker's queue, or was taken; never in two places;
- free_slots_take_from_other_queues: a worker with a free slot and an empty queue takes an item from the queue that
  would be the last to finish, unless the strategy is static;
- estimates_are_advice_only: estimates choose a bucket, a worker and the order within a window. They do not affect which
  prompts are sent, nor that all prompts of a window are sent before any later one;
- a_window_is_sent_before_the_next_is_drawn.

With a staleness bound of 0 or 1, a full batch may be sent at once when a version was announced, and its last completion
ends the batch for all workers. So the window waits until every worker can take part. With a larger bound an early
finish gains nothing as long as the bound does not limit admission, so a plan gives up no capacity for one.

The mode determines the objective of a plan (``Scheduler._objective``):

- ``synchronous``: training starts when the batch is complete, so the last completion counts;
- ``stream``: the trainer takes groups as they end, so it should have enough work early and little at the end;
- ``one_step_async``, ``trajectory_async``: the trainer also takes groups as they end, and has earlier groups to train
  first. Groups that end before it is ready for them are early enough, and empty slots would delay later groups.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from streamrl.producers.dispatch.fleet import OVERCOMMIT, Candidate
from streamrl.producers.dispatch.plans import Item, Objective, Plan, WorkerCapacity, fits_cache, predicted_s
from streamrl.producers.dispatch.progress import Remaining
from streamrl.producers.dispatch.settings import DispatchSettings
from streamrl.producers.dispatch.state import DispatchState
from streamrl.producers.dispatch.strategies import STATIC, STRATEGIES, WITH_OBJECTIVE, full_rate
from streamrl.schemas.profiles import DecodeCurve
from streamrl.schemas.trajectories import LengthEstimate, OrderingChance, Prompt

WEIGHT_SYNC_TIMEOUT_S = 5.0
"""Most seconds that a window waits until all workers have new weights, with a staleness bound of 0 or 1."""
OUTGROWN_CHECK_S = 0.1
"""Seconds between two checks for completions that outgrew their estimates: each check reads all running ones."""
TOLERANCE = 1.05
"""Factor by which a finish may exceed the planned time before all unsent prompts are planned again."""


@dataclass(frozen=True, slots=True)
class PendingPrompt:
    """A prompt that was drawn and not yet ordered. ``chance``: see ``WorkOrder``."""

    position: int
    prompt: Prompt
    group_id: str
    estimate: LengthEstimate
    chance: OrderingChance | None = None


@dataclass(slots=True)
class WorkerQueue:
    """The unsent part of a worker's share of the plan."""

    worker_id: str
    concurrency: int
    is_reduced: bool
    items: deque[Item]
    tokens: int

    def has_room(self, worker: Candidate, samples: int, overcommit: float) -> bool:
        """Whether the worker may be sent the samples now. Only workers that use all slots get orders ahead of need."""
        if self.is_reduced:
            return worker.has_room_within(samples, self.concurrency)
        return worker.has_room(samples, overcommit)


class WorkerQueues:
    """The drawn and unsent prompts, queued by worker; idle workers take items from other queues.

    ``pool``: items without a worker; ``curve_of``: a worker's present decode curve; ``remaining``: expected tokens left
    of the completions that a worker has.
    """

    def __init__(
        self,
        curve_of: Callable[[str], DecodeCurve],
        overcommit: float,
        remaining: Callable[[str], Remaining],
        *,
        is_static: bool,
    ) -> None:
        self._curve_of = curve_of
        self._overcommit = overcommit
        self._remaining = remaining
        self._is_static = is_static
        self._queues: dict[str, WorkerQueue] = {}
        self._turn = 0
        self.pool: list[Item] = []
        self.stolen = 0

    def __len__(self) -> int:
        return len(self.pool) + sum(len(queue.items) for queue in self._queues.values())

    def __iter__(self) -> Iterator[WorkerQueue]:
        return iter(self._queues.values())

    def get(self, worker_id: str) -> WorkerQueue | None:
        """A worker's queue, if the plan has one for it."""
        return self._queues.get(worker_id)

    def add(self, items: Iterable[Item]) -> None:
        """Add new items, without a worker yet."""
        self.pool.extend(items)

    def release(self, worker_id: str) -> None:
        """Return a worker's unsent items to the pool; it takes nothing more."""
        queue = self._queues.pop(worker_id, None)
        if queue is not None:
            self.pool.extend(queue.items)

    def unsent(self) -> list[Item]:
        """All unsent items, in the order of their prompts."""
        return sorted(
            (*self.pool, *(item for queue in self._queues.values() for item in queue.items)), key=lambda item: item.key
        )

    def adopt(self, plan: Plan) -> None:
        """Follow this plan for all items from now on."""
        self.pool = []
        self._queues = {
            share.worker.worker_id: WorkerQueue(
                share.worker.worker_id,
                share.concurrency,
                share.is_reduced,
                deque(share.items),
                sum(item.load for item in share.items),
            )
            for share in plan.shares
        }

    def next(self, workers: Sequence[Candidate]) -> tuple[Item, Candidate] | None:
        """The next item to send and its worker, one of ``workers``; None if no worker has room.

        Workers take turns. A worker whose queue is empty takes from another queue.
        """
        idle = []
        # Start with the worker after the one that was served last.
        for step in range(len(workers)):
            worker = workers[(self._turn + step) % len(workers)]
            queue = self._queues.get(worker.worker_id)
            if queue is None:
                continue
            if not queue.items:
                idle.append((worker, queue))
            elif self._has_room(worker, queue, queue.items[0], self._overcommit):
                self._turn += step + 1
                return self._take(queue, 0), worker
        for worker, queue in () if self._is_static else idle:
            if (item := self._stolen_for(worker, queue)) is not None:
                return item, worker
        return None

    def _has_room(self, worker: Candidate, queue: WorkerQueue, item: Item, overcommit: float) -> bool:
        """Whether the worker may be sent this item now, by its slots and its cache; an idle worker takes any item.

        The cache is not overcommitted: an engine starts a completion if the prompt fits, and would evict it later.
        """
        if not queue.has_room(worker, item.samples, overcommit):
            return False
        if worker.kv_tokens is None or not worker.sequences:
            return True
        # As if all waiting completions started now: steps left, and the negative of the tokens in the cache.
        held = self._remaining(worker.worker_id)
        batch = [(left, -context) for left, context in zip((*held.running, *held.waiting), held.contexts, strict=True)]
        return fits_cache([*batch, *((length, -item.prompt) for length in item.lengths)], worker.kv_tokens)

    def _stolen_for(self, worker: Candidate, queue: WorkerQueue) -> Item | None:
        """An item for an idle worker, from another queue: the longest one that ends sooner here.

        Without a free slot the worker takes items only from a queue that is longer than its concurrency.
        """
        # The queue that would be empty last.
        victim = max((other for other in self._queues.values() if other.items), key=self._busy_s, default=None)
        if victim is None:
            return None
        # Items of a long queue are taken ahead of need; those of a short queue only for a free slot.
        ahead = self._overcommit if len(victim.items) > victim.concurrency else 1.0
        if not self._has_room(worker, queue, victim.items[0], ahead):
            return None
        # An item that takes longer here than the victim is busy would end later here than there.
        within, step_s = self._busy_s(victim), self._curve_of(queue.worker_id).batch_s(queue.concurrency)
        fits = (number for number, item in enumerate(victim.items) if item.longest * step_s <= within)
        self.stolen += 1
        return self._take(victim, next(fits, len(victim.items) - 1))

    def _busy_s(self, queue: WorkerQueue) -> float:
        """Seconds of work of a queue at its concurrency b: tokens × t(b) / b."""
        tokens = queue.tokens + self._remaining(queue.worker_id).tokens
        return tokens * self._curve_of(queue.worker_id).batch_s(queue.concurrency) / queue.concurrency

    @staticmethod
    def _take(queue: WorkerQueue, number: int) -> Item:
        item = queue.items[number]
        del queue.items[number]
        queue.tokens -= item.load
        return item


@dataclass(frozen=True, slots=True)
class TimedPlan:
    """A plan, and the seconds until its predicted finish by the workers' decode curves."""

    plan: Plan
    finish_s: float


class Scheduler:
    """Sends a window of prompts to the workers of one ``policy``.

    ``_ready``: workers that take orders, as of this turn.
    """

    def __init__(self, state: DispatchState, settings: DispatchSettings, policy: str = "") -> None:
        self._state = state
        self._policy = policy
        self._settings = settings
        self._loop = state.loop
        self._is_static = settings.strategy in STATIC
        self._pending: dict[int, PendingPrompt] = {}
        self._ready: list[Candidate] = []
        self._turn_at = self._checked_at = 0.0
        self._due_at = 0.0
        self._waiting_since: float | None = None
        self._blocked_since: dict[str, float] = {}
        self.plans = 0
        self.queues = WorkerQueues(state.progress.curve_of, OVERCOMMIT, self._remaining, is_static=self._is_static)

    def begin_turn(self, now: float) -> None:
        """Read the workers' present state, and return the prompts of workers that cannot take orders to the pool."""
        self._turn_at = now
        self._ready = [
            worker for worker in self._state.candidates(now) if worker.capacity > 0 and worker.policy == self._policy
        ]
        admissible = {worker.worker_id for worker in self._admissible()}
        for worker in self._ready:
            if worker.worker_id in admissible:
                self._blocked_since.pop(worker.worker_id, None)
            else:
                self._blocked_since.setdefault(worker.worker_id, now)
        ready = {worker.worker_id for worker in self._ready}
        # Iterate over a copy, because release removes queues.
        for queue in list(self.queues):
            # A blocked worker's weights are too old for admission. A short wait is cheaper than a new plan.
            blocked_s = now - self._blocked_since.get(queue.worker_id, now)
            if queue.worker_id not in ready or (admissible and blocked_s > WEIGHT_SYNC_TIMEOUT_S):
                self.queues.release(queue.worker_id)

    def wanted(self) -> int:
        """How many prompts to draw now: 0 if some are unsent, no worker has room, or workers still adopt weights."""
        admissible = self._admissible()
        samples, overcommit = self._loop.num_generations, OVERCOMMIT
        if len(self.queues) or not any(worker.has_room(samples, overcommit) for worker in admissible):
            return 0
        # The window is sent at once, so a worker that cannot take part yet would idle until the next one.
        if self._loop.staleness_bound <= 1 and len(admissible) < len(self._ready):
            self._waiting_since = self._turn_at if self._waiting_since is None else self._waiting_since
            if self._turn_at - self._waiting_since < WEIGHT_SYNC_TIMEOUT_S:
                return 0
        self._waiting_since = None
        # As many as the newest weights allow; admission is checked again for each order.
        room = max(self._state.ledger.room(version) for version in {worker.version for worker in admissible})
        return min(self._loop.groups_per_step, room)

    def add(self, prompts: Sequence[PendingPrompt]) -> None:
        """Add a window that was drawn."""
        self._state.plan_accuracy.begin([prompt.group_id for prompt in prompts], self._turn_at)
        self.take_over(prompts)

    def take_over(self, prompts: Sequence[PendingPrompt]) -> None:
        """Add prompts of a drawn window that other schedulers were to send and did not."""
        self._pending |= {prompt.position: prompt for prompt in prompts}
        self.queues.add(map(self._item, prompts))

    def hand_over(self) -> list[PendingPrompt]:
        """Remove and return all unsent prompts."""
        items = self.queues.unsent()
        self.queues.adopt(Plan(()))
        return [self._pending.pop(item.key) for item in items]

    def _item(self, prompt: PendingPrompt) -> Item:
        longest = self._loop.max_completion_length
        tokens, upper = min(prompt.estimate.median, longest), min(prompt.estimate.upper, longest)
        prompt_tokens = self._state.prompt_tokens(prompt.prompt)
        return Item(prompt.position, tokens, self._loop.num_generations, upper, prompt_tokens)

    def wants_plan(self) -> bool:
        """Whether a prompt has no worker, a worker has no queue, or a long completion upsets the plan."""
        if not len(self.queues) or not self._admissible():
            return False
        is_new = any(self.queues.get(worker.worker_id) is None for worker in self._admissible())
        return bool(self.queues.pool) or is_new or self._is_upset()

    def _is_upset(self) -> bool:
        """Whether a completion that outgrew its estimate is expected to end after the planned finish."""
        if self._is_static or self._turn_at - self._checked_at < OUTGROWN_CHECK_S:
            return False
        self._checked_at = now = self._turn_at
        for worker in self._ready:
            remaining = self._remaining(worker.worker_id)
            if remaining.outgrown:
                step_s = self._state.progress.curve_of(worker.worker_id).batch_s(len(remaining.running))
                # A new plan can take it into account, as long as prompts are unsent.
                if now + max(remaining.outgrown) * step_s > self._due_at:
                    return True
        return False

    def planner(self) -> Callable[[], TimedPlan]:
        """A function that makes the plan. It is slow for many items, and may run in a thread."""
        # Copies of everything that the plan depends on, because a thread may run the function.
        items, workers = self.queues.unsent(), [self._worker(worker) for worker in self._admissible()]
        strategy = STRATEGIES[self._settings.strategy]
        if with_objective := WITH_OBJECTIVE.get(self._settings.strategy):
            strategy = partial(with_objective, objective=self._objective(items, workers))

        def planned() -> TimedPlan:
            # Checked before it is adopted: the present queues are replaced only by a plan that has every item once.
            plan = strategy(items, workers).checked(items, workers)
            return TimedPlan(plan, predicted_s(plan))

        return planned

    def _worker(self, worker: Candidate) -> WorkerCapacity:
        held, name = self._remaining(worker.worker_id), worker.worker_id
        curve = self._state.progress.curve_of(name)
        return WorkerCapacity(
            name, worker.capacity, held.running, held.waiting, curve, worker.kv_tokens, contexts=held.contexts
        )

    def _objective(self, items: Sequence[Item], workers: Sequence[WorkerCapacity]) -> Objective:
        """The objective for this mode; see the module's docstring."""
        if self._loop.mode == "synchronous":
            return Objective()
        trainer = self._state.trainer
        return Objective(trainer.s_per_token, trainer.free_in_s(self._turn_at), self._slack_s(items, workers))

    def _slack_s(self, items: Sequence[Item], workers: Sequence[WorkerCapacity]) -> float:
        """Seconds for which later groups that admission still allows keep all slots busy.

        Finishing before that gains nothing. Groups × mean load of a group / Σ (slots / t(slots)). With fixed batches
        these groups are all sampled while the previous batch is trained, and then the next batch is.
        """
        if self._loop.has_fixed_batches:
            left = len(items) + self._loop.groups_per_step
        else:
            left = self._loop.max_groups_in_flight - self._state.ledger.in_flight - len(items)
        return max(0, left) * sum(item.load for item in items) / len(items) / full_rate(workers)

    def adopt(self, planned: TimedPlan) -> None:
        """Follow this plan from now on."""
        self.plans += 1
        self.queues.adopt(planned.plan)
        self._state.plan_accuracy.planned(planned.finish_s)
        self._due_at = self._turn_at + TOLERANCE * planned.finish_s

    def next(self) -> tuple[PendingPrompt, Candidate] | None:
        """The next prompt to order and the worker for it; None if no worker has room for it."""
        found = self.queues.next(self._admissible())
        if found is None:
            return None
        item, worker = found
        return self._pending.pop(item.key), worker

    def sent(self, worker: Candidate) -> None:
        """Update a worker's load after an order for it: the next choice depends on the load."""
        heartbeat = self._state.fleet.get(worker.worker_id)
        assert heartbeat is not None, "a ready worker has a heartbeat"
        number = next(n for n, ready in enumerate(self._ready) if ready.worker_id == worker.worker_id)
        self._ready[number] = self._state.candidate(heartbeat)

    def _admissible(self) -> list[Candidate]:
        # Asked once per version: there are few versions and many workers.
        may_admit = {version: self._state.ledger.may_admit(version) for version in {w.version for w in self._ready}}
        return [worker for worker in self._ready if may_admit[worker.version]]

    def _remaining(self, worker_id: str) -> Remaining:
        return self._state.progress.remaining(worker_id, self._turn_at)


@dataclass(frozen=True, slots=True)
class WindowPlans:
    """The plans of the schedulers that wanted one, by policy."""

    plans: tuple[tuple[str, TimedPlan], ...]

    @property
    def finish_s(self) -> float:
        """Seconds until the last plan is predicted to finish."""
        return max((planned.finish_s for _, planned in self.plans), default=0.0)


class Schedulers:
    """One scheduler for each policy whose workers sample; in a run with one policy there is one scheduler.

    ``PolicyDispatch`` says which policy's workers sample a prompt's group. The window is sent completely before the
    next is drawn, so the policy with the least room for its share sets the pace. Unsent prompts are distributed again
    when the shares change, or when a policy gains its first worker or loses its last.
    """

    def __init__(self, state: DispatchState, settings: DispatchSettings) -> None:
        self._state = state
        self._settings = settings
        self._by_policy = {"": Scheduler(state, settings)}
        self._policies_with_workers: frozenset[str] = frozenset()
        self._distributed_for: tuple[dict[str, float], frozenset[str]] = ({}, frozenset())
        self._planning: tuple[str, ...] = ()

    @property
    def unsent(self) -> int:
        """Prompts drawn and not sent."""
        return sum(len(one.queues) for one in self._by_policy.values())

    @property
    def plans(self) -> int:
        """Plans adopted so far."""
        return sum(one.plans for one in self._by_policy.values())

    @property
    def stolen(self) -> int:
        """Items so far that a worker took from another one's queue."""
        return sum(one.queues.stolen for one in self._by_policy.values())

    def queues(self) -> Iterator[WorkerQueue]:
        """The queues of all workers."""
        return (queue for one in self._by_policy.values() for queue in one.queues)

    def begin_turn(self, now: float) -> None:
        """Read the present shares of the policies and the state of the workers."""
        shares = dict(self._state.policies.shares)
        # Without shares it does not matter which policies have workers.
        self._policies_with_workers = self._state.fleet.policies(now) if shares else frozenset()
        if (distributed_for := (shares, self._policies_with_workers & {"", *shares})) != self._distributed_for:
            self._distributed_for = distributed_for
            self._redistribute(shares)
        for one in self._by_policy.values():
            one.begin_turn(now)

    def _redistribute(self, shares: Iterable[str]) -> None:
        unsent = [prompt for one in self._by_policy.values() for prompt in one.hand_over()]
        for policy in self._by_policy.keys() - {"", *shares}:
            del self._by_policy[policy]
        for policy in shares:
            self._by_policy.setdefault(policy, Scheduler(self._state, self._settings, policy))
        for policy, prompts in self._sorted(sorted(unsent, key=lambda prompt: prompt.position)).items():
            self._by_policy[policy].take_over(prompts)

    def _sorted(self, prompts: Iterable[PendingPrompt]) -> dict[str, list[PendingPrompt]]:
        found: dict[str, list[PendingPrompt]] = {}
        for prompt in prompts:
            policy = self._state.policies.sampling(prompt.group_id, self._policies_with_workers)
            found.setdefault(policy, []).append(prompt)
        return found

    def wanted(self) -> int:
        """How many prompts to draw now; 0 as long as any policy has unsent ones."""
        return 0 if self.unsent else max(one.wanted() for one in self._by_policy.values())

    def add(self, prompts: Sequence[PendingPrompt]) -> None:
        """Add a window that was drawn."""
        for policy, mine in self._sorted(prompts).items():
            self._by_policy[policy].add(mine)

    def wants_plan(self) -> bool:
        """Whether any scheduler wants a plan."""
        self._planning = tuple(policy for policy, one in self._by_policy.items() if one.wants_plan())
        return bool(self._planning)

    def planner(self) -> Callable[[], WindowPlans]:
        """See ``Scheduler.planner``; for the schedulers that want a plan."""
        planners = [(policy, self._by_policy[policy].planner()) for policy in self._planning]
        return lambda: WindowPlans(tuple((policy, make()) for policy, make in planners))

    def adopt(self, planned: WindowPlans) -> None:
        """Follow these plans from now on."""
        for policy, plan in planned.plans:
            self._by_policy[policy].adopt(plan)

    def next(self) -> tuple[PendingPrompt, Candidate] | None:
        """The next prompt to order and the worker for it; None if no worker has room for it."""
        return next((found for one in self._by_policy.values() if (found := one.next()) is not None), None)

    def sent(self, worker: Candidate) -> None:
        """Update a worker's load after an order for it."""
        self._by_policy[worker.policy].sent(worker)
