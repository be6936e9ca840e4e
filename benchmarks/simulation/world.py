"""A run in virtual time: replicas and a trainer in closed form between events, decisions by the product's own code.

Admission is ``AdmissionLedger``, plans are ``STRATEGIES``, orders leave through ``Scheduler``, tails move by
``repack``; what these ask of heartbeats they are told of the replicas as they are. No task, no message, no token is
simulated: an event is the end of a completion, of a step, of a transfer, or a turn of the scheduler. So there are parts
of its own beside those of ``streamrl.planning.simulation``, which runs the roles as they are: tens of workers, where
these are thousands of replicas with a thousand completions each.

Invariants: every_completion_is_generated_once_and_trained_once; nothing_older_than_the_bound_is_trained;
a_run_is_a_function_of_its_seed.
"""

import gc
import random
from collections import Counter
from collections.abc import Iterable
from functools import partial
from itertools import count

import numpy as np

from benchmarks.pipeline.paper import Noise
from benchmarks.simulation.batches import PlannedBatches
from benchmarks.simulation.fleet import LINEAGE, FleetView
from benchmarks.simulation.moving import Environment, Failing, Tails
from benchmarks.simulation.outcome import Bubbles, Marks, Outcome
from benchmarks.simulation.plant import Plant, System, Workload
from benchmarks.simulation.replica import NEVER, Completion, Replica
from benchmarks.simulation.trainer import Group, Station
from streamrl.planning.virtual_time import Events
from streamrl.producers.dispatch.admission import AdmissionLedger
from streamrl.producers.dispatch.plans import Item
from streamrl.producers.dispatch.scheduler import PendingPrompt, Scheduler
from streamrl.producers.dispatch.settings import DispatchSettings
from streamrl.producers.dispatch.strategies import STRATEGIES
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.settings import LoopSettings
from streamrl.schemas.trajectories import LengthEstimate, Prompt

TURN_S = 1.0
"""Between two turns of the scheduler, at least: engines have orders ahead meanwhile."""
MOST_EVENTS = 50_000_000
PROMPT = Prompt(prompt_id="p", dataset="simulated", content="")


class World:
    """One run of ``steps`` optimizer steps."""

    def __init__(self, plant: Plant, workload: Workload, system: System, seed: int) -> None:
        self.plant, self.workload, self.system = plant, workload, system
        self._agenda = Events()
        self.at = self._agenda.at
        self.trained_version = 0
        self.outcome = Outcome(plant.replicas)
        self._random = np.random.default_rng(seed)
        self._noise = random.Random(f"ranker/{seed}")
        self._positions = count()
        self._groups: dict[str, Group] = {}
        self._turn_at, self._has_turn = -TURN_S, False
        self.arrived = [0] * plant.replicas
        self.moves = self.released = 0
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
        self.tools = Environment(self, seed)
        self._batches = PlannedBatches(self)
        self._tails = Tails(self)
        self._bubbles = Bubbles(self)
        self._failing = Failing(self, workload.fault)

    def run(self, steps: int) -> Outcome:
        """Simulate so many.

        Raises:
            Stuck: nothing can happen any more, or too much did.
        """
        # Looking for garbage takes as long as all the rest: there are millions of small objects, none of them in a ring
        # once it was trained.
        gc.disable()
        try:
            self._mark()
            self._begin()
            self._agenda.run(lambda: self.trained_version >= steps, MOST_EVENTS)
        finally:
            gc.enable()
        self.outcome.events += self._agenda.done
        return self.outcome

    def _begin(self) -> None:
        if self.system.repack:
            self.at(self.system.repack_every_s, self._tails.tick)
        match self.system.dispatch:
            case "plan":
                self._batches.begin()
            case "scheduler":
                self._want_turn()
            case "batches":
                for replica in self.replicas:
                    self._own_batch(replica)

    @property
    def now(self) -> float:
        """Virtual seconds since the beginning."""
        return self._agenda.now

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
                self.moves,
                self.released,
                Counter(self.outcome.finished),
                Counter(self.outcome.consumed),
                len(self.outcome.latencies),
                Counter(self.outcome.slots),
            )
        )

    # Prompts and what is told of them.

    def draw(self, groups: int) -> list[Group]:
        """New prompts, with the lengths that their samples will have."""
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
            self.tools.cut(group.samples)
            self._groups[group.group_id] = group
            drawn.append(group)
        return drawn

    def _expected(self, lengths: np.ndarray) -> list[list[int]]:
        match self.system.known:
            case "oracle":
                known: list[list[int]] = lengths.tolist()
                return known
            case "ranker" if lengths.shape[1] == 1:
                ranked = Noise(*self.system.score_error).ranked(lengths[:, 0].tolist(), self._noise)
                return [[length] for length in ranked]
            case "ranker":
                errors = np.exp(self.system.log_error * np.array([self._noise.gauss(0, 1) for _ in lengths]))
                mean = lengths.mean(axis=1, keepdims=True) * errors[:, None]
                blurred: list[list[int]] = np.maximum(1, np.broadcast_to(mean, lengths.shape).astype(int)).tolist()
                return blurred
        # All alike, and none outgrows it.
        return [[self.workload.cap] * lengths.shape[1]] * len(lengths)

    def _item(self, group: Group) -> Item:
        told = [one.expected for one in group.samples]
        return Item(group.position, max(1, round(sum(told) / len(told))), len(told), max(told), group.samples[0].prompt)

    # Dispatch.

    def admit(self, group: Group, version: int) -> None:
        """It begins with these weights."""
        group.due = self.ledger.next_due
        self.ledger.admit(group.group_id, PolicyVersion(LINEAGE, version))
        group.base = min(version, self.trained_version)

    def _want_turn(self) -> None:
        if not self._has_turn:
            self._has_turn = True
            self.at(max(self.now, self._turn_at + TURN_S), self._turn)

    def _turn(self) -> None:
        self._has_turn, self._turn_at = False, self.now
        sent: set[int] = set()
        scheduler = self.scheduler
        self.view.trainer.free_at = self.station.free_at
        scheduler.begin_turn(self.now)
        while wanted := scheduler.wanted():
            scheduler.add([self._pending(group) for group in self.draw(wanted)])
            if not self._send(scheduler, sent):
                break
        self._send(scheduler, sent)
        for number in sorted(sent):
            self.touch(self.replicas[number])

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
            self.admit(group, replica.version)
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

    def _is_idle(self, replica: Replica) -> bool:
        return not (replica.load or self.tools.away(replica) or replica.number in self._failing.down)

    def _own_batch(self, replica: Replica) -> None:
        """An idle replica takes the newest weights that its host has, and a batch of its own."""
        replica.sync(self.now)
        if self.arrived[replica.number] > replica.version:
            replica.adopt(self.arrived[replica.number], self.plant.adopt_s)
        room = self.ledger.room(PolicyVersion(LINEAGE, replica.version))
        for group in self.draw(min(room, self.plant.slots // self.workload.group)):
            self.admit(group, replica.version)
            replica.offer(group.samples)
        self.touch(replica)

    def _idle_take_batches(self) -> None:
        for replica in self.replicas:
            if self._is_idle(replica) and self.ledger.room(PolicyVersion(LINEAGE, self.arrived[replica.number])):
                self._own_batch(replica)

    # Events.

    def touch(self, replica: Replica) -> None:
        """A replica has changed, and so its next event."""
        replica.settle()
        self._follow(replica)

    def _follow(self, replica: Replica) -> None:
        replica.stamp += 1
        if replica.next_at < NEVER:
            self.at(replica.next_at, partial(self._fire, replica, replica.stamp))

    def _fire(self, replica: Replica, stamp: int) -> None:
        if stamp != replica.stamp:
            return
        ended = replica.fire()
        self._follow(replica)
        if not ended:
            return
        for completion in ended:
            if self.tools.takes(completion, replica):
                continue
            if self.system.dispatch == "plan":
                self._batches.ended(completion)
                continue
            group = completion.group
            self._ended(completion)
            group.missing -= 1
            if not group.missing:
                self._whole(group)
        self.freed(replica)

    def freed(self, replica: Replica) -> None:
        """Of a replica's completions some have gone."""
        if self.system.dispatch == "batches":
            if self._is_idle(replica):
                self._own_batch(replica)
            return
        if self.system.dispatch == "plan":
            return
        if not replica.load and replica.number in self.view.awaiting:
            self._adopt(replica)
        self._want_turn()

    def _ended(self, completion: Completion) -> None:
        self.outcome.generated += 1
        self.outcome.finished[self.trained_version - completion.group.base] += 1
        assert completion.began_at is not None, "what has ended has begun"
        self.outcome.latencies.append(completion.end() - completion.began_at)

    def group_ended(self, group: Group) -> None:
        """All its completions at once, as far as others are told."""
        for completion in group.samples:
            self._ended(completion)
        self._whole(group)

    def _whole(self, group: Group) -> None:
        self.ledger.produced(group.group_id)
        self.outcome.wholes.append((self.now, group.tokens))
        for at, members in self.station.whole(group, self.now):
            self.at(at, partial(self._stepped, members))

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
            self._batches.begin()
            return
        for delay, numbers in self._hosts().items():
            self.at(self.now + self.plant.stall_s + delay, partial(self._weights, version, numbers))
        if self.system.repack and self.system.dispatch == "batches":
            self._tails.repack()

    def _hosts(self) -> dict[float, list[int]]:
        found: dict[float, list[int]] = {}
        arrivals = self.plant.arrivals_s or [0.0] * self.plant.replicas
        for number, delay in enumerate(arrivals):
            found.setdefault(delay, []).append(number)
        return found

    def _weights(self, version: int, numbers: Iterable[int]) -> None:
        for number in numbers:
            self.arrived[number] = version
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
        version = self.arrived[replica.number]
        replica.adopt(version, self.plant.adopt_s, prefill_again=self.system.adoption == "computed")
        self.touch(replica)
