"""A run in virtual time: replicas and a trainer in closed form between events, decisions by the product's own code.

Admission is ``AdmissionLedger``, plans are ``STRATEGIES``, orders leave through ``Scheduler``, tails move by
``repack``; what these ask of heartbeats they are told of the replicas as they are. No task, no message, no token is
simulated: an event is the end of a completion, of a step, of a transfer, or a turn of the scheduler.

Invariants: every_completion_is_generated_once_and_trained_once; nothing_older_than_the_bound_is_trained;
a_run_is_a_function_of_its_seed.
"""

import gc
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from itertools import count
from math import inf

import numpy as np

from benchmarks.pipeline.paper import Noise
from benchmarks.simulation.fleet import LINEAGE, FleetView
from benchmarks.simulation.plant import Plant, System, Workload
from benchmarks.simulation.replica import Completion, Replica
from benchmarks.simulation.trainer import Group, Station
from producers.dispatch.admission import AdmissionLedger
from producers.dispatch.plans import Item, Objective, WorkerCapacity
from producers.dispatch.repack import TailGroup, TailWorker, repack, tail_limit
from producers.dispatch.scheduler import PendingPrompt, Scheduler
from producers.dispatch.settings import DispatchSettings
from producers.dispatch.strategies import STRATEGIES, skewness_aware
from schemas.errors import LifecycleError
from schemas.identifiers import PolicyVersion
from schemas.settings import LoopSettings
from schemas.trajectories import LengthEstimate, Prompt

TURN_S = 1.0
"""Between two turns of the scheduler, at least: engines have orders ahead meanwhile."""
RANKER = Noise(0.2, 0.12)
"""Errors in normal scores with which an order by length has the recall that StreamRL's table 4 gives."""
RANKER_LOG_ERROR = 0.3
"""Of groups, whose samples differ: the log-normal error of estimates."""
C_MAX = 0.99
"""Share of the cache above which a replica counts as full (Laminar, arXiv 2510.12633, section 5)."""
MOST_EVENTS = 50_000_000
PROMPT = Prompt(prompt_id="p", dataset="simulated", content="")


@dataclass
class Marks:
    """Sums at the end of a step: the moment, then tokens trained, replica-seconds, cache-seconds, tokens sampled, and
    training seconds so far.
    """

    at: float
    tokens: int
    busy_s: float
    kv_s: float
    sampled: int
    training_s: float
    moves: int = 0
    released: int = 0


@dataclass
class Outcome:
    """What a run came to. ``marks``: one for the start and one a step; staleness in steps, by completion.

    ``wholes``: when each group was whole, and its tokens.
    """

    replicas: int
    marks: list[Marks] = field(default_factory=list)
    finished: Counter[int] = field(default_factory=Counter)
    consumed: Counter[int] = field(default_factory=Counter)
    latencies: list[float] = field(default_factory=list)
    wholes: list[tuple[float, int]] = field(default_factory=list)
    events: int = 0
    generated: int = 0
    trained: int = 0

    def rate(self, warm_up: int) -> float:
        """Trained tokens a second, prompts included, after so many steps."""
        first, last = self.marks[warm_up], self.marks[-1]
        return (last.tokens - first.tokens) / (last.at - first.at)

    def step_s(self, warm_up: int) -> float:
        """Mean seconds of a step."""
        return (self.marks[-1].at - self.marks[warm_up].at) / (len(self.marks) - 1 - warm_up)

    def share(self, name: str, warm_up: int) -> float:
        """Of all replica-seconds: ``busy_s`` with something running, or ``kv_s`` of the cache in use."""
        first, last = self.marks[warm_up], self.marks[-1]
        return (getattr(last, name) - getattr(first, name)) / (last.at - first.at) / self.replicas

    def sampled_rate(self, warm_up: int) -> float:
        """Tokens sampled a second."""
        first, last = self.marks[warm_up], self.marks[-1]
        return (last.sampled - first.sampled) / (last.at - first.at)


class World:
    """One run of ``steps`` optimizer steps."""

    def __init__(self, plant: Plant, workload: Workload, system: System, seed: int) -> None:
        self.plant, self.workload, self.system = plant, workload, system
        self.now = 0.0
        self.trained_version = 0
        self.outcome = Outcome(plant.replicas)
        self._random = np.random.default_rng(seed)
        self._noise = random.Random(f"ranker/{seed}")
        self._events: list = []
        self._serial = count()
        self._positions = count()
        self._groups: dict[str, Group] = {}
        self._turn_at, self._has_turn = -TURN_S, False
        self._is_syncing = False
        self._generating_until = self._control_at = 0.0
        self._arrived = [0] * plant.replicas
        self._moves = self._released = 0
        self._training_s = 0.0
        loop = LoopSettings(
            groups_per_step=workload.groups,
            num_generations=workload.group,
            mode=system.mode,
            max_staleness=system.max_staleness,
            max_prompt_length=1 << 15,
            max_completion_length=workload.cap,
            bucket_boundaries=(1024,),
        )
        self.loop = loop
        self.ledger = AdmissionLedger(
            workload.groups, loop.staleness_bound, has_fixed_batches=loop.has_fixed_batches, history_steps=1
        )
        self.ledger.advance(PolicyVersion(LINEAGE, 0), ())
        self.station = Station(plant, workload.groups, system.trains == "stream")
        self.replicas = [Replica(number, plant.curve, plant.slots, plant.kv_tokens) for number in range(plant.replicas)]
        held = workload.lengths.held_mean(workload.prompts.mean)
        told = max(1, min(plant.slots, int(plant.kv_tokens / held)))
        self.view = FleetView(loop, self.ledger, self.replicas, plant.curve, told, round(workload.prompts.mean))
        self.view.trainer.s_per_token = plant.train_s_per_token + plant.train_s_per_step / workload.tokens
        settings = DispatchSettings(strategy=system.strategy if system.strategy in STRATEGIES else "skewness_aware")
        self.scheduler = Scheduler(self.view, settings)  # type: ignore[arg-type]
        self.tail_limit = system.tail_limit or tail_limit(plant.curve, told)

    def run(self, steps: int) -> Outcome:
        """Simulate so many.

        Raises:
            LifecycleError: nothing can happen any more, or too much did.
        """
        # Looking for garbage takes as long as all the rest: there are millions of small objects, none of them in a ring
        # once it was trained.
        gc.disable()
        try:
            self._mark()
            self._begin()
            while self.trained_version < steps:
                if not self._events:
                    raise LifecycleError(f"expected {steps} steps, got stuck after {self.trained_version}")
                self.now, _, act = heappop(self._events)
                act()
                self.outcome.events += 1
                if self.outcome.events > MOST_EVENTS:
                    raise LifecycleError(f"expected at most {MOST_EVENTS} events, got more")
        finally:
            gc.enable()
        return self.outcome

    def _begin(self) -> None:
        if self.system.repack:
            self._at(self.system.repack_every_s, self._repack_tick)
        match self.system.dispatch:
            case "plan":
                self._begin_batch()
            case "scheduler":
                self._want_turn()
            case "batches":
                for replica in self.replicas:
                    self._own_batch(replica)

    def _at(self, when: float, act) -> None:
        heappush(self._events, (when, next(self._serial), act))

    def _mark(self) -> None:
        replicas, tokens = self.replicas, self.outcome.marks[-1].tokens if self.outcome.marks else 0
        self.outcome.marks.append(
            Marks(
                self.now,
                tokens,
                sum(replica.busy_s for replica in replicas),
                sum(replica.kv_s for replica in replicas),
                sum(replica.tokens for replica in replicas),
                self._training_s,
                self._moves,
                self._released,
            )
        )

    # Prompts and what is told of them.

    def _draw(self, groups: int) -> list[Group]:
        work = self.workload
        lengths = np.minimum(work.cap, work.lengths.quantile(self._random.random((groups, work.group))))
        prompts = work.prompts.quantile(self._random.random(groups))
        expected = self._expected(lengths)
        drawn = []
        for prompt, row, told in zip(prompts.tolist(), lengths.tolist(), expected, strict=True):
            tokens = sum(row) + prompt * len(row)
            group = Group(next(self._positions), [], tokens)
            group.samples = [Completion(prompt, length, group, guess) for length, guess in zip(row, told, strict=True)]
            group.missing = len(row)
            self._groups[group.group_id] = group
            drawn.append(group)
        return drawn

    def _expected(self, lengths: np.ndarray) -> list[list[int]]:
        match self.system.known:
            case "oracle":
                return lengths.tolist()
            case "ranker" if lengths.shape[1] == 1:
                ranked = RANKER.ranked(lengths[:, 0].tolist(), self._noise)
                return [[length] for length in ranked]
            case "ranker":
                errors = np.exp(RANKER_LOG_ERROR * np.array([self._noise.gauss(0, 1) for _ in lengths]))
                mean = lengths.mean(axis=1, keepdims=True) * errors[:, None]
                return np.maximum(1, np.broadcast_to(mean, lengths.shape).astype(int)).tolist()
        # All alike, and none outgrows it.
        return [[self.workload.cap] * lengths.shape[1]] * len(lengths)

    def _item(self, group: Group) -> Item:
        told = [one.expected for one in group.samples]
        return Item(group.position, max(1, round(sum(told) / len(told))), len(told), max(told), group.samples[0].prompt)

    # Dispatch.

    def _admit(self, group: Group, version: int) -> None:
        group.due = self.ledger.next_due
        self.ledger.admit(group.group_id, PolicyVersion(LINEAGE, version))
        group.base = min(version, self.trained_version)

    def _begin_batch(self) -> None:
        """A whole batch by plan, once all replicas are idle, admission is open and all have the newest weights."""
        if self._is_syncing or self.now < self._generating_until:
            return
        version = PolicyVersion(LINEAGE, self.trained_version)
        if self.ledger.room(version) < self.workload.groups:
            return
        if self.replicas[0].version < self.trained_version:
            self._is_syncing = True
            self._at(self.now + self.plant.sync_s, self._synced)
            return
        groups = self._draw(self.workload.groups)
        samples = [one for group in groups for one in group.samples]
        items = [Item(key, one.expected, 1, one.expected, one.prompt) for key, one in enumerate(samples)]
        for group in groups:
            self._admit(group, self.replicas[0].version)
        slots = self.plant.slots
        workers = [WorkerCapacity(replica.name, slots, curve=self.plant.curve) for replica in self.replicas]
        plan = self._strategy()(items, workers)
        last = self.now
        for replica, share in zip(self.replicas, plan.shares, strict=True):
            replica.sync(self.now)
            replica.concurrency = share.concurrency
            replica.offer(samples[item.key] for item in share.items)
            # Nothing comes in between, so each goes on to its end at once.
            self.outcome.events += len(replica.run_out())
            last = max(last, replica.at)
        for at, group in self._passed(samples):
            self._at(at, partial(self._group_ended, group))
        self._generating_until = last
        self._at(last, self._begin_batch)

    def _passed(self, samples: list[Completion]) -> Iterator[tuple[float, Group]]:
        """When each group is with the trainer: its samples pass one process, in the order in which they end."""
        at, through = self._control_at, {}
        for one in sorted(samples, key=lambda one: one.ended_at):
            at = max(at, one.ended_at) + self.plant.control_s_per_token * (one.prompt + one.length)
            through[one.group] = at
        self._control_at = at
        for group, when in through.items():
            yield when, group

    def _strategy(self):
        strategy = STRATEGIES[self.system.strategy]
        if strategy is not skewness_aware or self.system.trains == "batch":
            return strategy
        pace = self.view.trainer
        return partial(strategy, objective=Objective(pace.s_per_token, pace.free_in_s(self.now)))

    def _synced(self) -> None:
        self._is_syncing = False
        # The trainer takes part, and what it has to do comes later by as much.
        self.station.free_at = max(self.station.free_at, self.now)
        for replica in self.replicas:
            replica.version = self.trained_version
        self._begin_batch()

    def _want_turn(self) -> None:
        if not self._has_turn:
            self._has_turn = True
            self._at(max(self.now, self._turn_at + TURN_S), self._turn)

    def _turn(self) -> None:
        self._has_turn, self._turn_at = False, self.now
        scheduler, sent = self.scheduler, set()
        self.view.trainer.free_at = self.station.free_at
        scheduler.begin_turn(self.now)
        while wanted := scheduler.wanted():
            scheduler.add([self._pending(group) for group in self._draw(wanted)])
            if not self._send(scheduler, sent):
                break
        self._send(scheduler, sent)
        for number in sorted(sent):
            self._touch(self.replicas[number])

    def _send(self, scheduler: Scheduler, sent: set[int]) -> int:
        if scheduler.wants_plan():
            scheduler.adopt(scheduler.planner()())
        orders = 0
        while (found := scheduler.next()) is not None:
            pending, worker = found
            group, replica = self._groups[pending.group_id], self.view.by_name[worker.worker_id]
            if replica.number not in sent:
                replica.sync(self.now)
                sent.add(replica.number)
            self._admit(group, replica.version)
            replica.offer(group.samples)
            scheduler.sent(worker)
            orders += 1
        return orders

    def _pending(self, group: Group) -> PendingPrompt:
        item = self._item(group)
        estimate = LengthEstimate.model_construct(
            median=item.tokens, upper=item.upper, bucket=0, predictor="simulated", boundaries_version=0
        )
        return PendingPrompt(group.position, PROMPT, group.group_id, estimate)

    def _own_batch(self, replica: Replica) -> None:
        """An idle replica takes the newest weights that its host has, and a batch of its own."""
        replica.sync(self.now)
        if self._arrived[replica.number] > replica.version:
            replica.adopt(self._arrived[replica.number], self.plant.adopt_s)
        room = self.ledger.room(PolicyVersion(LINEAGE, replica.version))
        for group in self._draw(min(room, self.plant.slots // self.workload.group)):
            self._admit(group, replica.version)
            replica.offer(group.samples)
        self._touch(replica)

    def _idle_take_batches(self) -> None:
        for replica in self.replicas:
            if not replica.load and self.ledger.room(PolicyVersion(LINEAGE, self._arrived[replica.number])):
                self._own_batch(replica)

    # Events.

    def _touch(self, replica: Replica) -> None:
        replica.settle()
        self._follow(replica)

    def _follow(self, replica: Replica) -> None:
        replica.stamp += 1
        if replica.next_at < float("inf"):
            self._at(replica.next_at, partial(self._fire, replica, replica.stamp))

    def _fire(self, replica: Replica, stamp: int) -> None:
        if stamp != replica.stamp:
            return
        ended = replica.fire()
        self._follow(replica)
        if not ended:
            return
        for completion in ended:
            group = completion.group
            self._ended(completion)
            group.missing -= 1
            if not group.missing:
                self._whole(group)
        self._freed(replica)

    def _freed(self, replica: Replica) -> None:
        """Of a replica's completions some have gone."""
        if self.system.dispatch == "batches":
            if not replica.load:
                self._own_batch(replica)
            return
        if not replica.load and replica.number in self.view.awaiting:
            self._adopt(replica)
        self._want_turn()

    def _ended(self, completion: Completion) -> None:
        self.outcome.generated += 1
        self.outcome.finished[self.trained_version - completion.group.base] += 1
        self.outcome.latencies.append(completion.ended_at - completion.began_at)

    def _group_ended(self, group: Group) -> None:
        for completion in group.samples:
            self._ended(completion)
        self._whole(group)

    def _whole(self, group: Group) -> None:
        self.ledger.produced(group.group_id)
        self.outcome.wholes.append((self.now, group.tokens))
        for at, members in self.station.whole(group, self.now):
            self._at(at, partial(self._stepped, members))

    def _stepped(self, members: list[Group]) -> None:
        # In order: a step that ends later has the higher number.
        for group in members:
            self.outcome.consumed[self.trained_version - group.base] += len(group.samples)
            self.outcome.trained += len(group.samples)
            del self._groups[group.group_id]
            group.samples.clear()
        tokens = sum(group.tokens for group in members)
        self._training_s += self.plant.train_s_per_token * tokens + self.plant.train_s_per_step
        self.trained_version += 1
        version = self.trained_version
        self.ledger.advance(PolicyVersion(LINEAGE, version), [group.group_id for group in members])
        self._mark()
        self.outcome.marks[-1].tokens += tokens
        if self.system.adoption == "barrier":
            self._begin_batch()
            return
        for delay, numbers in self._hosts().items():
            self._at(self.now + self.plant.stall_s + delay, partial(self._weights, version, numbers))
        if self.system.repack and self.system.dispatch == "batches":
            self._repack()

    def _hosts(self) -> dict[float, list[int]]:
        found: dict[float, list[int]] = {}
        arrivals = self.plant.arrivals_s or [0.0] * self.plant.replicas
        for number, delay in enumerate(arrivals):
            found.setdefault(delay, []).append(number)
        return found

    def _weights(self, version: int, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._arrived[number] = version
            replica = self.replicas[number]
            if self.system.adoption == "idle" and replica.load:
                self.view.awaiting.add(number)
            elif self.system.adoption != "batch":
                self._adopt(replica)
        if self.system.dispatch == "batches":
            self._idle_take_batches()
        else:
            self._want_turn()

    def _adopt(self, replica: Replica) -> None:
        self.view.awaiting.discard(replica.number)
        replica.sync(self.now)
        version = self._arrived[replica.number]
        replica.adopt(version, self.plant.adopt_s, prefill_again=self.system.adoption == "computed")
        self._touch(replica)

    # Repack.

    def _repack_tick(self) -> None:
        self._at(self.now + self.system.repack_every_s, self._repack_tick)
        self._repack()

    def _repack(self) -> None:
        tails = [tail for replica in self.replicas if (tail := self._tail_of(replica)) is not None]
        if len(tails) < 2:
            return
        newest = PolicyVersion(LINEAGE, max(self._arrived))
        room = inf if self.system.dispatch == "batches" else self.ledger.room(newest) * self.workload.group
        moves = repack(tails, self.system.payback, room)
        moved = {move.group_id: move.target for move in moves}
        sources = {move.source for move in moves}
        for name in sorted(sources):
            source = self.view.by_name[name]
            source.sync(self.now)
            by_target: dict[str, list[Completion]] = {}
            for completion in list(source.active):
                by_target.setdefault(moved[completion.group.group_id], []).append(completion)
            for target, completions in by_target.items():
                replica = self.view.by_name[target]
                replica.sync(self.now)
                replica.offer(source.take(completions))
                self._moves += len(completions)
                self._touch(replica)
            self._touch(source)
        self._released += len(sources)
        for name in sorted(sources):
            self._freed(self.view.by_name[name])

    def _tail_of(self, replica: Replica) -> TailWorker | None:
        """A replica that ramps down, as the planner sees it: nothing waits, and few run."""
        if replica.waiting or not replica.active or len(replica.active) > self.tail_limit:
            return None
        if self.system.adoption == "idle" and replica.number not in self.view.awaiting:
            return None
        if replica.context > C_MAX * replica.kv_tokens:
            return None
        by_group: dict[str, tuple[list[int], list[int]]] = {}
        for one in replica.active:
            made = replica.made_of(one)
            left, contexts = by_group.setdefault(one.group.group_id, ([], []))
            left.append(max(1, one.expected - made) if one.expected > made else max(1, made // 2))
            contexts.append(one.prompt + made)
        groups = tuple(TailGroup(name, tuple(left), tuple(held)) for name, (left, held) in by_group.items())
        version = PolicyVersion(LINEAGE, replica.version)
        return TailWorker(
            replica.name, version, self.plant.curve, self.view.told_slots, self.tail_limit, replica.kv_tokens, groups
        )
