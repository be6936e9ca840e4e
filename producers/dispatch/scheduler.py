"""Decides when a window of prompts is drawn, when it is planned anew, and what is sent next to whom. Pure; seconds.

Invariants:
- every_prompt_dispatched_once: an item is in the pool, in one worker's queue, or was taken; never in two places;
- no_slot_waits_for_a_queue_elsewhere: a worker with a free slot and an empty queue takes from the queue that would
  otherwise be the last to finish, unless the strategy is static;
- advice_only: estimates choose a bucket, a worker and the order within a window. Which prompts are sent, and that all
  of a window leave before any later one, holds without them;
- a_window_is_sent_before_the_next_is_drawn.

With a staleness bound of 0 or 1 a whole batch may go out at once when a version was announced, and its last completion
ends it for all: the window waits until every worker can take part. With more, no finish matters as long as the bound
does not hold anybody back, and a plan gives up no capacity for one that is earlier than that.

What a plan is made for follows from the mode (``Scheduler._objective``):

- ``synchronous``: training begins when the batch is whole, so the last completion decides;
- ``stream``: the trainer takes groups as they end, so it is to have enough to do from early on and little at the end;
- ``one_step_async``, ``trajectory_async``: the same trainer, which has earlier groups before these. What is over before
  it comes to them is early enough, and slots that stay empty would cost the groups that come behind.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from streamrl.producers.dispatch.fleet import Candidate
from streamrl.producers.dispatch.plans import Item, Objective, Plan, WorkerCapacity, fits_cache, predicted_s
from streamrl.producers.dispatch.progress import Remaining
from streamrl.producers.dispatch.settings import DispatchSettings
from streamrl.producers.dispatch.state import DispatchState
from streamrl.producers.dispatch.strategies import STRATEGIES, full_rate, skewness_aware
from streamrl.schemas.profiles import DecodeCurve
from streamrl.schemas.trajectories import LengthEstimate, Prompt

OUTGROWN_CHECK_S = 0.1
"""Between two checks for completions that outgrew their estimates: each goes through all that run."""
TOLERANCE = 1.05
"""How much later than planned a finish may become before everything unsent is planned anew."""


@dataclass(frozen=True, slots=True)
class PendingPrompt:
    """A prompt that is not ordered yet."""

    position: int
    prompt: Prompt
    group_id: str
    estimate: LengthEstimate


@dataclass(slots=True)
class WorkerQueue:
    """What is left of a worker's share of the plan."""

    worker_id: str
    concurrency: int
    is_reduced: bool
    items: deque[Item]
    tokens: int

    def has_room(self, worker: Candidate, samples: int, overcommit: float) -> bool:
        """Whether the worker may be sent so many samples now; only where all slots are to be busy, some ahead."""
        if self.is_reduced:
            return worker.has_room_within(samples, self.concurrency)
        return worker.has_room(samples, overcommit)


class WorkerQueues:
    """What each worker shall sample and in what order, of the prompts drawn and not sent; and who takes from whom.

    ``pool``: items that no worker shall sample yet. ``curve_of``: a worker's decode steps as they are now;
    ``remaining``: expected tokens of what it holds already.
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
        """New items, with no worker yet."""
        self.pool.extend(items)

    def release(self, worker_id: str) -> None:
        """The worker takes nothing more; what it was not sent is for others."""
        queue = self._queues.pop(worker_id, None)
        if queue is not None:
            self.pool.extend(queue.items)

    def unsent(self) -> list[Item]:
        """All items, in the order of their prompts."""
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
        """The next item to send and the worker for it, of those that may take one now; none if none has room.

        Workers take turns; one whose queue is empty takes from another's.
        """
        idle = []
        # From the worker after the one that was served last.
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
        """Whether the worker may be sent this item now, by its slots and by its cache; an idle one takes any item.

        The cache is not overcommitted: an engine begins what it has prompts' room for, and would drop it again later.
        """
        if not queue.has_room(worker, item.samples, overcommit):
            return False
        if worker.kv_tokens is None or not worker.sequences:
            return True
        # As if all that waits began now: by the steps left, and how many steps ago its context would have been empty.
        held = self._remaining(worker.worker_id)
        batch = [(left, -context) for left, context in zip((*held.running, *held.waiting), held.contexts, strict=True)]
        return fits_cache([*batch, *((length, -item.prompt) for length in item.lengths)], worker.kv_tokens)

    def _stolen_for(self, worker: Candidate, queue: WorkerQueue) -> Item | None:
        """The longest waiting item that ends sooner here; for a free slot only, unless the other queue has plenty."""
        # The queue that would be empty last.
        victim = max((other for other in self._queues.values() if other.items), key=self._busy_s, default=None)
        if victim is None:
            return None
        # From a long queue items are taken ahead of need; of a short one, only what has a slot now.
        ahead = self._overcommit if len(victim.items) > victim.concurrency else 1.0
        if not self._has_room(worker, queue, victim.items[0], ahead):
            return None
        # An item that is longer than the victim is busy would end later here than it does there.
        within, step_s = self._busy_s(victim), self._curve_of(queue.worker_id).batch_s(queue.concurrency)
        fits = (number for number, item in enumerate(victim.items) if item.longest * step_s <= within)
        self.stolen += 1
        return self._take(victim, next(fits, len(victim.items) - 1))

    def _busy_s(self, queue: WorkerQueue) -> float:
        """Seconds of work at its concurrency b: tokens × t(b) / b."""
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
    """A plan, and its predicted finish by the workers' decode curves."""

    plan: Plan
    finish_s: float


class Scheduler:
    """The window of prompts that is being sent to the workers of one ``policy``.

    ``ready``: those that take orders, as of this turn.
    """

    def __init__(self, state: DispatchState, settings: DispatchSettings, policy: str = "") -> None:
        self._state = state
        self._policy = policy
        self._settings = settings
        self._loop = state.loop
        self._is_static = settings.strategy == "round_robin"
        self._pending: dict[int, PendingPrompt] = {}
        self._ready: list[Candidate] = []
        self._turn_at = self._checked_at = 0.0
        self._due_at = 0.0
        self._waiting_since: float | None = None
        self._blocked_since: dict[str, float] = {}
        self.plans = 0
        self.queues = WorkerQueues(
            state.progress.curve_of, settings.overcommit, self._remaining, is_static=self._is_static
        )

    def begin_turn(self, now: float) -> None:
        """Look at the workers; what was planned for those that can take nothing is for others."""
        self._turn_at = now
        self._ready = [
            worker for worker in self._state.candidates(now) if worker.capacity > 0 and worker.policy == self._policy
        ]
        able = {worker.worker_id for worker in self._able()}
        for worker in self._ready:
            if worker.worker_id in able:
                self._blocked_since.pop(worker.worker_id, None)
            else:
                self._blocked_since.setdefault(worker.worker_id, now)
        ready = {worker.worker_id for worker in self._ready}
        # A copy is walked: release takes queues out, and a dict must not change while it is iterated.
        for queue in list(self.queues):
            # Not able: its weights are too old to be admitted. A short wait for newer ones is cheaper than a new plan.
            blocked_s = now - self._blocked_since.get(queue.worker_id, now)
            if queue.worker_id not in ready or (able and blocked_s > self._settings.weight_sync_timeout_s):
                self.queues.release(queue.worker_id)

    def wanted(self) -> int:
        """How many prompts to draw now: nothing as long as some are unsent, no worker has room, or some adopt yet."""
        able = self._able()
        samples, overcommit = self._loop.num_generations, self._settings.overcommit
        if len(self.queues) or not any(worker.has_room(samples, overcommit) for worker in able):
            return 0
        # The window goes out at once, and who cannot take part yet would idle until the next.
        if self._loop.staleness_bound <= 1 and len(able) < len(self._ready):
            self._waiting_since = self._turn_at if self._waiting_since is None else self._waiting_since
            if self._turn_at - self._waiting_since < self._settings.weight_sync_timeout_s:
                return 0
        self._waiting_since = None
        # As much as the newest weights allow; each order is asked about again when it is sent.
        room = max(self._state.ledger.room(version) for version in {worker.version for worker in able})
        return min(self._loop.groups_per_step, room)

    def add(self, prompts: Sequence[PendingPrompt]) -> None:
        """A window was drawn. Prompts of which an earlier dispatcher sent an order are left out."""
        new = [prompt for prompt in prompts if not self._was_ordered(prompt.group_id)]
        self._state.plan_accuracy.begin([prompt.group_id for prompt in new], self._turn_at)
        self.take_over(new)

    def take_over(self, prompts: Sequence[PendingPrompt]) -> None:
        """Of a window that was drawn, what others were to send and did not."""
        self._pending |= {prompt.position: prompt for prompt in prompts}
        self.queues.add(map(self._item, prompts))

    def hand_over(self) -> list[PendingPrompt]:
        """All that is not sent, which is for others now."""
        items = self.queues.unsent()
        self.queues.adopt(Plan(()))
        return [self._pending.pop(item.key) for item in items]

    def _was_ordered(self, group_id: str) -> bool:
        return group_id in self._state.positions.ordered or self._state.ledger.is_in_flight(group_id)

    def _item(self, prompt: PendingPrompt) -> Item:
        longest = self._loop.max_completion_length
        tokens, upper = min(prompt.estimate.median, longest), min(prompt.estimate.upper, longest)
        prompt_tokens = self._state.prompt_tokens(prompt.prompt)
        return Item(prompt.position, tokens, self._loop.num_generations, upper, prompt_tokens)

    def wants_plan(self) -> bool:
        """Whether prompts have no worker, a worker has no queue, or a completion upsets the plan."""
        if not len(self.queues) or not self._able():
            return False
        is_new = any(self.queues.get(worker.worker_id) is None for worker in self._able())
        return bool(self.queues.pool) or is_new or self._is_upset()

    def _is_upset(self) -> bool:
        """A completion that outgrew its estimate will go on after everything else should be over."""
        if self._is_static or self._turn_at - self._checked_at < OUTGROWN_CHECK_S:
            return False
        self._checked_at = now = self._turn_at
        for worker in self._ready:
            remaining = self._remaining(worker.worker_id)
            if remaining.outgrown:
                step_s = self._state.progress.curve_of(worker.worker_id).batch_s(len(remaining.running))
                # The rest can be arranged around it only while it is unsent.
                if now + max(remaining.outgrown) * step_s > self._due_at:
                    return True
        return False

    def planner(self) -> Callable[[], TimedPlan]:
        """What makes the plan: takes long for many items, and may run in a thread as long as nothing else happens."""
        # Copies of all that the plan depends on: a thread may make it.
        items, workers = self.queues.unsent(), [self._worker(worker) for worker in self._able()]
        strategy = STRATEGIES[self._settings.strategy]
        if strategy is skewness_aware:
            strategy = partial(skewness_aware, objective=self._objective(items, workers))

        def planned() -> TimedPlan:
            # Checked before anybody adopts it: the queues of now are given up only for a plan that has every item once.
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
        """What the mode asks of a plan; see the top of the file."""
        if self._loop.mode == "synchronous":
            return Objective()
        trainer = self._state.trainer
        return Objective(trainer.s_per_token, trainer.free_in_s(self._turn_at), self._slack_s(items, workers))

    def _slack_s(self, items: Sequence[Item], workers: Sequence[WorkerCapacity]) -> float:
        """How long the groups that admission still allows behind these will keep all slots busy: a finish before that
        is worth nothing. Groups × mean load of a group / Σ (slots / t(slots)).

        With fixed batches these are all sampled while the batch before them is trained, and the next one behind them.
        """
        if self._loop.has_fixed_batches:
            left = len(items) + self._loop.groups_per_step
        else:
            left = self._loop.max_groups_in_flight - self._state.ledger.in_flight - len(items)
        return max(0, left) * sum(item.load for item in items) / len(items) / full_rate(workers)

    def adopt(self, planned: TimedPlan) -> None:
        """Follow this plan."""
        self.plans += 1
        self.queues.adopt(planned.plan)
        self._state.plan_accuracy.planned(planned.finish_s)
        self._due_at = self._turn_at + TOLERANCE * planned.finish_s

    def next(self) -> tuple[PendingPrompt, Candidate] | None:
        """The next prompt to order and the worker for it; none if no worker has room for what it shall sample."""
        found = self.queues.next(self._able())
        if found is None:
            return None
        item, worker = found
        return self._pending.pop(item.key), worker

    def sent(self, worker: Candidate) -> None:
        """An order for this worker was taken into account."""
        # Its load has grown, and the next choice depends on that.
        heartbeat = self._state.fleet.get(worker.worker_id)
        assert heartbeat is not None, "it was ready"
        number = next(n for n, ready in enumerate(self._ready) if ready.worker_id == worker.worker_id)
        self._ready[number] = self._state.candidate(heartbeat)

    def _able(self) -> list[Candidate]:
        # There are few versions and many workers.
        may_admit = {version: self._state.ledger.may_admit(version) for version in {w.version for w in self._ready}}
        return [worker for worker in self._ready if may_admit[worker.version]]

    def _remaining(self, worker_id: str) -> Remaining:
        return self._state.progress.remaining(worker_id, self._turn_at)


@dataclass(frozen=True, slots=True)
class WindowPlans:
    """A plan for each scheduler that wanted one, and when the last of them is predicted to end."""

    plans: tuple[tuple[str, TimedPlan], ...]

    @property
    def finish_s(self) -> float:
        """Of all of them."""
        return max((planned.finish_s for _, planned in self.plans), default=0.0)


class Schedulers:
    """A scheduler for each policy whose workers sample; in a run with one policy there is one scheduler.

    Which policy's workers sample a prompt's group is the answer of ``PolicyDispatch``. The window is sent whole before
    the next is drawn, so the policy with the least room for its share sets the pace of all. What is unsent is dealt
    again when the shares change, or a policy has no workers any more.
    """

    def __init__(self, state: DispatchState, settings: DispatchSettings) -> None:
        self._state = state
        self._settings = settings
        self._by_policy = {"": Scheduler(state, settings)}
        self._there: frozenset[str] = frozenset()
        self._dealt_by: tuple[dict[str, float], frozenset[str]] = ({}, frozenset())
        self._planning: tuple[str, ...] = ()

    @property
    def unsent(self) -> int:
        """Prompts drawn and not sent."""
        return sum(len(one.queues) for one in self._by_policy.values())

    @property
    def plans(self) -> int:
        """How many were followed."""
        return sum(one.plans for one in self._by_policy.values())

    @property
    def stolen(self) -> int:
        """Items that another worker than planned took."""
        return sum(one.queues.stolen for one in self._by_policy.values())

    def queues(self) -> Iterator[WorkerQueue]:
        """Of all workers."""
        return (queue for one in self._by_policy.values() for queue in one.queues)

    def begin_turn(self, now: float) -> None:
        """Look at the shares and the workers."""
        shares = dict(self._state.policies.shares)
        # Without shares it does not matter who is there.
        self._there = self._state.fleet.policies(now) if shares else frozenset()
        if (dealt_by := (shares, self._there & {"", *shares})) != self._dealt_by:
            self._dealt_by = dealt_by
            self._deal_again(shares)
        for one in self._by_policy.values():
            one.begin_turn(now)

    def _deal_again(self, shares: Iterable[str]) -> None:
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
            found.setdefault(self._state.policies.sampling(prompt.group_id, self._there), []).append(prompt)
        return found

    def wanted(self) -> int:
        """How many prompts to draw now: nothing as long as some are unsent, whosever they are."""
        return 0 if self.unsent else max(one.wanted() for one in self._by_policy.values())

    def add(self, prompts: Sequence[PendingPrompt]) -> None:
        """A window was drawn."""
        for policy, mine in self._sorted(prompts).items():
            self._by_policy[policy].add(mine)

    def wants_plan(self) -> bool:
        """Whether some prompts are to be planned."""
        self._planning = tuple(policy for policy, one in self._by_policy.items() if one.wants_plan())
        return bool(self._planning)

    def planner(self) -> Callable[[], WindowPlans]:
        """See ``Scheduler.planner``; of those that want a plan."""
        planners = [(policy, self._by_policy[policy].planner()) for policy in self._planning]
        return lambda: WindowPlans(tuple((policy, make()) for policy, make in planners))

    def adopt(self, planned: WindowPlans) -> None:
        """Follow these plans."""
        for policy, plan in planned.plans:
            self._by_policy[policy].adopt(plan)

    def next(self) -> tuple[PendingPrompt, Candidate] | None:
        """The next prompt to order and the worker for it; none if no worker has room for what it shall sample."""
        return next((found for one in self._by_policy.values() if (found := one.next()) is not None), None)

    def sent(self, worker: Candidate) -> None:
        """An order for this worker was taken into account."""
        self._by_policy[worker.policy].sent(worker)
