"""The trainer of the simulation: groups in, oldest first; micro-batches as the real one cuts them; then a step."""

import heapq
import math
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, Protocol

import numpy as np

from consumers.batching.micro_batches import CostModel, Lengths, SampleRange, best_run, cheapest_runs
from consumers.batching.settings import BatchingSettings
from producers.dispatch.dispatcher import build_order
from producers.dispatch.scheduler import PendingPrompt, Scheduler
from producers.dispatch.settings import DispatchSettings
from producers.dispatch.state import DispatchState
from producers.generation.engines.emulated import EmulatedBatch, EmulatedSequence, WeightsAdopted
from producers.lengths.predictor import LengthPredictor
from schemas.identifiers import PolicyVersion
from schemas.profiles import DecodeCurve, TrainingCosts
from schemas.reports import Heartbeat, StepReport, WorkerState
from schemas.settings import LoopSettings
from schemas.trajectories import FinishReason, Trajectory, VersionSpan

# Events in order of time; among simultaneous ones, in the order in which they were asked for. Knows no pipeline.


@dataclass
class Clockwork:
    """``now``: seconds since the beginning."""

    now: float = 0.0
    _due: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _numbers: "count[int]" = field(default_factory=count)

    def at(self, moment: float, act: Callable[[], None]) -> None:
        """Have something done at a moment, or now if that has passed."""
        heapq.heappush(self._due, (max(moment, self.now), next(self._numbers), act))

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        """Have something done in so many seconds."""
        self.at(self.now + seconds, act)

    def run_until(self, over: Callable[[], bool]) -> bool:
        """Go on until it is over; false if nothing is left to happen before that."""
        while not over():
            if not self._due:
                return False
            self.now, _, act = heapq.heappop(self._due)
            act()
        return True


# What the simulation moves around: groups with their lengths, and the plant that works on them. Pure data.


@dataclass(frozen=True, slots=True)
class Work:
    """A group: tokens of its prompt and of each completion."""

    group_id: str
    position: int
    prompt_tokens: int
    lengths: tuple[int, ...]

    @property
    def completion_tokens(self) -> int:
        """Tokens of all its completions."""
        return sum(self.lengths)


class Supply(Protocol):
    """Prompts by position, what is predicted of them, and what becomes of them."""

    @property
    def predictor(self) -> LengthPredictor:
        """What the dispatcher estimates lengths with, and teaches."""
        ...

    def draft(self, position: int) -> PendingPrompt:
        """The prompt at a position with the estimate of now."""
        ...

    def work(self, draft: PendingPrompt) -> Work:
        """What sampling it takes."""
        ...


@dataclass(frozen=True)
class Latencies:
    """What passes between two acts beside the acts themselves, in emulated seconds.

    ``turn_s``: from news until the dispatcher has decided; ``order_s``: from there until the worker's engine has the
    group; ``sample_s``: from a finished completion until trainer and dispatcher know of it; ``announce_s``: from a
    finished step until workers have fetched its weights; ``report_s``: until the dispatcher knows of the step;
    ``adopted_s``: from adoption until the dispatcher knows of it; ``trajectory_s``: the trainer's own work on a
    trajectory; ``step_s``: its own work on a step.
    """

    turn_s: float = 0.0
    order_s: float = 0.0
    sample_s: float = 0.0
    announce_s: float = 0.0
    report_s: float = 0.0
    adopted_s: float = 0.0
    trajectory_s: float = 0.0
    step_s: float = 0.0


@dataclass(frozen=True)
class Plant:
    """Workers and trainers as planned; seconds are emulated ones. ``trainers`` share a step's micro-batches.

    ``dispatch_curve``: what the dispatcher knows of the workers, in seconds of the wall clock, of which each lasts
    ``time_scale`` emulated ones.
    """

    loop: LoopSettings
    dispatch: DispatchSettings
    workers: int
    slots: int
    curve: DecodeCurve
    dispatch_curve: DecodeCurve
    costs: TrainingCosts
    time_scale: float = 1.0
    trainers: int = 1
    batching: BatchingSettings = field(default_factory=BatchingSettings)
    checkpoint_every: int = 1 << 30
    steps: int = 8
    latencies: Latencies = field(default_factory=Latencies)


# The dispatcher of the simulation: the real one's state and scheduler, told what it would read on the topics. Knows
# neither timelines nor the trainer.

LINEAGE = 1


class SimulatedDispatcher:
    """``send`` gives a group, and its place among all that were admitted, to the worker of a number."""

    def __init__(self, plant: Plant, clock: Clockwork, supply: Supply, send: Callable[[int, Work, int], None]) -> None:
        self._plant, self._clock, self._supply, self._send = plant, clock, supply, send
        self._state = DispatchState(plant.loop, plant.dispatch, supply.predictor, plant.dispatch_curve)
        self._scheduler = Scheduler(self._state, plant.dispatch)
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
        idle_s = (
            settings.poll_s if len(self._scheduler.queues) else max(settings.poll_s, settings.weight_sync_timeout_s)
        )
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
            order = build_order(
                state.loop,
                draft,
                worker,
                created_at=state.created_at(self._now),
                due_step=state.ledger.next_due,
                seed=None,
            )
            state.admit(order, worker, self._now)
            scheduler.sent(worker)
            number, work = int(worker.worker_id), self._supply.work(draft)
            self._clock.after(self._plant.latencies.order_s, partial(self._send, number, work, state.admitted))
        if scheduler.wanted():
            self._turn_in(self._plant.latencies.turn_s)


def _name(worker: int) -> str:
    return f"{worker:03}"


# A worker of the simulation: the emulated engine's own timeline, woken by events. Knows no dispatcher.

Finished = Callable[[int, Work, int, tuple[int, int]], None]
"""Told of a completion: the worker, the group, the sample's index, the oldest and the newest version of its tokens."""


class SimulatedWorker:
    """``number``: its place in the fleet; ``held``: the version its engine samples with, -1 before the first."""

    def __init__(
        self, number: int, plant: Plant, clock: Clockwork, finished: Finished, adopted: "Callable[[int, int], None]"
    ) -> None:
        self.number = number
        self.held = -1
        self.slot_seconds = self.idle_seconds = 0.0
        self._clock = clock
        self._timeline: EmulatedBatch[int] = EmulatedBatch(plant.curve, plant.slots, 0)
        self._works: dict[EmulatedSequence, tuple[Work, int]] = {}
        self._finished, self._adopted = finished, adopted
        self._looked_at = 0.0
        self._wake: float | None = None

    def take(self, work: Work) -> None:
        """All samples of a group ask for slots."""
        self._turn()
        for index, length in enumerate(work.lengths):
            sequence = EmulatedSequence(work.prompt_tokens, length)
            self._works[sequence] = work, index
            self._timeline.arrive(sequence, self._clock.now)
        self._turn()

    def adopt(self, version: int) -> None:
        """Weights were fetched."""
        self._turn()
        self._timeline.adopt(version, self._clock.now)
        self._turn()

    def reckon(self) -> None:
        """Count the time since the last look."""
        elapsed = self._clock.now - self._looked_at
        self.slot_seconds += elapsed * self._timeline.running
        self.idle_seconds += elapsed * (self._timeline.running == 0)
        self._looked_at = self._clock.now

    def _turn(self) -> None:
        self.reckon()
        for event in self._timeline.advance(self._clock.now):
            if isinstance(event, WeightsAdopted):
                self.held = event.version
                self._adopted(self.number, event.version)
            elif event.is_over:
                work, index = self._works.pop(event.sequence)
                self._finished(self.number, work, index, (event.parts[0][0], event.parts[-1][0]))
        wake = self._timeline.next_wake()
        if wake is not None and (self._wake is None or wake != self._wake):
            self._wake = max(wake, math.nextafter(self._clock.now, math.inf))
            self._clock.at(self._wake, partial(self._woken, self._wake))

    def _woken(self, due: float) -> None:
        if self._wake == due:
            self._wake = None
            self._turn()


@dataclass(frozen=True)
class Step:
    """A finished step: when its weights were in the store, the groups it took, where its time went, in seconds."""

    number: int
    at: float
    groups: tuple[Work, ...]
    training_s: float
    waiting_s: float
    staleness: int


@dataclass
class Shelf:
    """Sequences that wait for a micro-batch, by length; longest last."""

    plant: Plant
    lengths: list[int] = field(default_factory=list)
    tokens: int = 0

    def add(self, length: int) -> None:
        """One more sequence."""
        insort(self.lengths, length)
        self.tokens += length

    def cut(self) -> float:
        """Seconds of the best micro-batch, which is taken away."""
        batching = self.plant.batching
        return self._taken(best_run(self._descending(), batching.token_budget, CostModel.of(batching)))

    def flush(self) -> float:
        """Seconds of all that is left."""
        batching = self.plant.batching
        runs = cheapest_runs(self._descending(), batching.token_budget, CostModel.of(batching))
        return sum(self._taken(run) for run in reversed(runs))

    def _descending(self) -> Lengths:
        return np.array(self.lengths[::-1], dtype=np.int64)

    def _taken(self, run: SampleRange) -> float:
        end = len(self.lengths)
        taken = self.lengths[end - run.end : end - run.start]
        del self.lengths[end - run.end : end - run.start]
        self.tokens -= sum(taken)
        return micro_batch_s(taken, self.plant)


@dataclass
class SimulatedTrainer:
    """``finished`` is told of each step. ``version``: steps taken."""

    plant: Plant
    clock: Clockwork
    finished: Callable[[Step], None]
    version: int = 0
    _ready: list[tuple[int, Work, int]] = field(default_factory=list)
    _taken: list[tuple[Work, int]] = field(default_factory=list)
    _is_busy: bool = False
    _waits_since: float = 0.0
    _waited_s: float = 0.0
    _trained_s: float = 0.0

    def __post_init__(self) -> None:
        self._shelf = Shelf(self.plant)

    def ready(self, order: int, work: Work, oldest_version: int) -> None:
        """A group is whole; ``order``: its place among the admitted ones."""
        heapq.heappush(self._ready, (order, work, oldest_version))
        if not self._is_busy:
            self._waited_s += self.clock.now - self._waits_since
            self._is_busy = True
            self._turn()

    def _turn(self) -> None:
        """Take groups until one leads to work; without one, work on what is held; without that, wait."""
        while len(self._taken) < self.plant.loop.groups_per_step:
            seconds = self._take() if self._has_ready else self._for_idle()
            if seconds is None:
                self._is_busy, self._waits_since = False, self.clock.now
                return
            if seconds:
                self._trained_s += seconds
                self.clock.after(seconds, self._turn)
                return
        costs = self.plant.costs
        seconds = self._shelf.flush() + costs.optimizer_step_s + costs.export_s + self.plant.latencies.step_s
        if (self.version + 1) % self.plant.checkpoint_every == 0:
            seconds += costs.checkpoint_s
        self._trained_s += seconds
        self.clock.after(seconds, self._announce)

    @property
    def _has_ready(self) -> bool:
        loop = self.plant.loop
        last = (self.version + 1) * loop.groups_per_step if loop.has_fixed_batches else math.inf
        return bool(self._ready) and self._ready[0][0] <= last

    def _take(self) -> float:
        _, work, version = heapq.heappop(self._ready)
        self._taken.append((work, version))
        for length in work.lengths:
            self._shelf.add(work.prompt_tokens + length)
        seconds, batching = len(work.lengths) * self.plant.latencies.trajectory_s, self.plant.batching
        while not self._is_whole and self._shelf.tokens > batching.token_budget * batching.lookahead:
            seconds += self._shelf.cut()
        return seconds

    def _for_idle(self) -> float | None:
        is_enough = self._shelf.tokens >= self.plant.batching.token_budget and not self._is_whole
        return self._shelf.cut() if is_enough else None

    @property
    def _is_whole(self) -> bool:
        return self.plant.loop.mode == "synchronous"

    def _announce(self) -> None:
        staleness = max(self.version - oldest for _, oldest in self._taken)
        self.version += 1
        step = Step(
            number=self.version,
            at=self.clock.now,
            groups=tuple(work for work, _ in self._taken),
            training_s=self._trained_s,
            waiting_s=self._waited_s,
            staleness=staleness,
        )
        self._taken, self._trained_s, self._waited_s = [], 0.0, 0.0
        self.finished(step)
        self._turn()


def micro_batch_s(lengths: list[int], plant: Plant) -> float:
    """Seconds of a forward and backward pass over these sequences, shared by the trainers."""
    costs = plant.costs
    tokens, squares = sum(lengths), sum(length * length for length in lengths)
    if costs.padding_counts:
        tokens, squares = len(lengths) * max(lengths), len(lengths) * max(lengths) ** 2
    shared = (
        costs.forward_backward_s_per_token * tokens
        + costs.forward_backward_s_per_squared_token * squares
        + costs.forward_backward_s_per_micro_batch
    )
    return shared / plant.trainers


# Runs a plant: dispatcher, workers and trainer wired together, for some optimizer steps.


@dataclass(frozen=True)
class Trace:
    """What happened: steps in order, and per step the worker-seconds, slot-seconds and idle worker-seconds so far."""

    steps: tuple[Step, ...]
    slot_seconds: tuple[float, ...]
    idle_seconds: tuple[float, ...]


@dataclass
class _Group:
    order: int
    missing: int
    oldest: int = 1 << 60


@dataclass
class Pipeline:
    """One simulation; ``run`` it once."""

    plant: Plant
    supply: Supply
    clock: Clockwork = field(default_factory=Clockwork)
    _groups: dict[str, _Group] = field(default_factory=dict)
    _steps: list[Step] = field(default_factory=list)
    _slot_seconds: list[float] = field(default_factory=list)
    _idle_seconds: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._dispatcher = SimulatedDispatcher(self.plant, self.clock, self.supply, self._order)
        self._trainer = SimulatedTrainer(self.plant, self.clock, self._stepped)
        self._workers = [
            SimulatedWorker(number, self.plant, self.clock, self._finished, self._adopted)
            for number in range(self.plant.workers)
        ]

    def run(self) -> Trace:
        """Until the plant's number of steps is taken, or nothing happens any more."""
        self._announce(0, ())
        self.clock.run_until(lambda: len(self._steps) >= self.plant.steps)
        return Trace(tuple(self._steps), tuple(self._slot_seconds), tuple(self._idle_seconds))

    def _order(self, worker: int, work: Work, order: int) -> None:
        self._groups[work.group_id] = _Group(order, len(work.lengths))
        self._workers[worker].take(work)

    def _finished(self, worker: int, work: Work, sample_index: int, versions: tuple[int, int]) -> None:
        group = self._groups[work.group_id]
        group.missing -= 1
        group.oldest = min(group.oldest, versions[0])
        latency = self.plant.latencies.sample_s
        told = partial(self._dispatcher.finished, worker, work, sample_index, versions[1])
        self.clock.after(latency, told)
        if not group.missing:
            del self._groups[work.group_id]
            self.clock.after(latency, partial(self._trainer.ready, group.order, work, group.oldest))

    def _stepped(self, step: Step) -> None:
        for worker in self._workers:
            worker.reckon()
        self._steps.append(step)
        self._slot_seconds.append(sum(worker.slot_seconds for worker in self._workers))
        self._idle_seconds.append(sum(worker.idle_seconds for worker in self._workers))
        self._announce(step.number, tuple(work.group_id for work in step.groups))

    def _announce(self, version: int, groups: tuple[str, ...]) -> None:
        latencies = self.plant.latencies
        self.clock.after(latencies.report_s, partial(self._dispatcher.stepped, version, groups))
        for worker in self._workers:
            self.clock.after(latencies.announce_s, partial(worker.adopt, version))

    def _adopted(self, worker: int, version: int) -> None:
        self.clock.after(self.plant.latencies.adopted_s, partial(self._dispatcher.adopted, worker, version))
