"""The workers: who is there, what each has been sent, and how far it has got with that. Pure; times in seconds.

- ``LiveWorkers``: who is there, as heartbeats show it;
- ``FlightTable``: the groups under way, which of their samples are missing, and which worker has them;
- ``Progress``: a worker's decode steps are counted from the time that passes and from how many completions it runs, by
  its decode curve; each completion that arrives tells how many there really were, and so how fast this worker is;
- ``TrainerPace``: how long the trainer takes for a token, and until when it has enough to do.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from producers.dispatch.plans import mean_excess
from schemas.identifiers import PolicyVersion, make_trajectory_id
from schemas.messages import is_near_version
from schemas.profiles import DecodeCurve
from schemas.reports import Heartbeat, StepReport, WorkerState
from schemas.trajectories import WorkOrder

ABSENT_LEASES = 3
"""An order that its worker's heartbeats do not name for so many leases is lost: it may take one lease to read the
order, and the next heartbeats, or the last trajectory of the order, may be late."""
GRACE = 1.1
"""How far past its estimate a completion must be: news of its end may be under way."""
LEARNING_RATE = 0.2
"""Weight of the longest completion in the estimate of a worker's speed; shorter ones weigh less, since the time that
news is under way distorts them more."""
FIRST = 32
"""Completions of a worker of which the plain mean counts."""
TAKEN_FROM_FLEET = 4
"""Completions that the fleet's speed counts for in that mean: a new worker is taken to be as fast as the others."""
NEWEST_STEP = 0.5
"""Weight of the newest step in the estimate of the trainer's speed: it drifts with the lengths."""
MOST_WRONG = 4.0
"""After these, none counts as faster or slower than expected by more than this factor."""
Sample = tuple[str, int]
"""A group's id and the index of a sample."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker that may take an order: ``capacity`` completions at once, and what it still owes of earlier ones.

    ``kv_tokens``: tokens of context that its cache holds; none: as many as its slots can have.
    """

    worker_id: str
    incarnation: str
    version: PolicyVersion
    capacity: int
    sequences: int
    predicted_tokens: int
    kv_tokens: int | None = None

    def has_room(self, samples: int, overcommit: float) -> bool:
        """Whether a slot is free now, or the order stays within the overcommitted capacity."""
        return self.sequences < self.capacity or self.sequences + samples <= self.capacity * overcommit

    def has_room_within(self, samples: int, concurrency: int) -> bool:
        """Whether with the order it runs about so many; an idle worker takes any order."""
        # Half of the order's samples, rounded up, must fit: a group is let in rather than slots left empty for it.
        return self.capacity > 0 and (not self.sequences or self.sequences + (samples + 1) // 2 <= concurrency)


def least_loaded(candidates: Iterable[Candidate]) -> Candidate:
    """The one with the fewest predicted tokens per slot; among equals, the one with the newest weights."""
    return min(
        candidates,
        key=lambda worker: (
            worker.predicted_tokens / max(1, worker.capacity),
            -worker.version.number,
            worker.worker_id,
        ),
    )


@dataclass(slots=True)
class _Seen:
    heartbeat: Heartbeat
    at: float
    is_heard: bool


class LiveWorkers:
    """Who is there, and with which weights. A restarted worker is a new incarnation of its id.

    A lease runs on our own clock, from the moment at which a heartbeat arrived that is newer than the one before; what
    the worker's clock says counts for nothing. Workers that are only recalled have a lease, and get no new orders
    before they are heard.
    """

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._seen: dict[str, _Seen] = {}
        self._former: dict[tuple[str, str | None], int | None] = {}  # those before: ``partials_from`` as said last

    def observe(self, heartbeat: Heartbeat, at: float) -> None:
        """Note a heartbeat; those of an incarnation that was followed by another are ignored."""
        self._note(heartbeat, at, is_heard=True)

    def recall(self, heartbeat: Heartbeat, now: float) -> None:
        """Note a heartbeat of the past: its worker has one lease from now on to be heard."""
        self._note(heartbeat, now, is_heard=False)

    def _note(self, heartbeat: Heartbeat, at: float, *, is_heard: bool) -> None:
        worker, incarnation = heartbeat.worker_id, heartbeat.incarnation
        # A late heartbeat of a process that was replaced, or one whose writer may not understand its orders.
        if (worker, incarnation) in self._former or not is_near_version(heartbeat.wire):
            return
        seen = self._seen.get(worker)
        # A restart: its orders are lost, and its lease begins anew.
        if seen is not None and seen.heartbeat.incarnation != incarnation:
            self._former[worker, seen.heartbeat.incarnation] = seen.heartbeat.partials_from
        elif seen is not None and heartbeat.sequence <= seen.heartbeat.sequence:
            return  # a repeat is no sign of life
        self._seen[worker] = _Seen(heartbeat, at, is_heard)

    def extend_leases(self, seconds: float) -> None:
        """We did not listen for so long; nobody is to blame for the silence."""
        for seen in self._seen.values():
            seen.at += seconds

    def ready(self, now: float) -> list[Heartbeat]:
        """Last heartbeats of the workers that take new orders."""
        return [
            seen.heartbeat
            for seen in self._seen.values()
            if seen.heartbeat.state is WorkerState.READY and seen.is_heard and self._is_alive(seen, now)
        ]

    def get(self, worker_id: str) -> Heartbeat | None:
        """The worker's last heartbeat."""
        seen = self._seen.get(worker_id)
        return seen.heartbeat if seen is not None else None

    def partials_from(self, worker_id: str, incarnation: str | None) -> int | None:
        """What that process said last, 0 if nobody knows. It holds to its end: what it wrote later lies behind."""
        if (seen := self._seen.get(worker_id)) is not None and seen.heartbeat.incarnation == incarnation:
            return seen.heartbeat.partials_from
        return self._former.get((worker_id, incarnation), 0)

    def has(self, worker_id: str, incarnation: str | None, now: float) -> bool:
        """Whether that incarnation of the worker is there."""
        seen = self._seen.get(worker_id)
        return seen is not None and seen.heartbeat.incarnation == incarnation and self._is_alive(seen, now)

    def _is_alive(self, seen: _Seen, now: float) -> bool:
        return seen.heartbeat.state is not WorkerState.STOPPED and now - seen.at <= self._lease_s


@dataclass(slots=True)
class Flight:
    """One group under way. ``worker_id`` none: its worker was lost and no other has it yet.

    ``progress_at``: when it was ordered last, a sample of it arrived, or its worker got on with it as heartbeats say.
    ``absent_since``: since when these do not name it; none as long as they do.
    """

    order: WorkOrder
    worker_id: str | None
    incarnation: str | None
    sent_at: float
    missing: set[int]
    progress_at: float
    skipped: dict[str, int] = field(default_factory=dict)
    absent_since: float | None = None

    @property
    def missing_tokens(self) -> int:
        """Predicted tokens still to be sampled."""
        return len(self.missing) * self.order.estimate.median

    @property
    def samples(self) -> list[tuple[str, int]]:
        """Group id and index of each sample missing, in order."""
        return [(self.order.group_id, index) for index in sorted(self.missing)]


class FlightTable:
    """All groups under way, and the load of each worker that follows from them.

    A group stays here until it is trained or skipped; its worker carries it only as long as samples are missing.
    """

    def __init__(self) -> None:
        self._flights: dict[str, Flight] = {}
        self._sequences: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()
        self._carried: dict[str, dict[str, Flight]] = {}  # what each worker has, by group id

    def __len__(self) -> int:
        return len(self._flights)

    def get(self, group_id: str) -> Flight | None:
        """The flight of a group, if it is under way."""
        return self._flights.get(group_id)

    def unfinished(self) -> Iterator[Flight]:
        """Flights with samples missing, the longest under way first."""
        return (flight for flight in self._flights.values() if flight.missing)

    def load(self, worker_id: str) -> tuple[int, int]:
        """Sequences and predicted tokens that a worker still owes."""
        return self._sequences[worker_id], self._tokens[worker_id]

    def send(self, order: WorkOrder, incarnation: str | None, sent_at: float) -> None:
        """An order goes to its worker: a new group's, or one for what is missing of a known group."""
        flight = self._flights.get(order.group_id)
        if flight is None:
            flight = Flight(order, None, None, sent_at, set(order.sample_indices), sent_at)
            self._flights[order.group_id] = flight
        # It stops counting as load of the worker it had before it counts as load of the next.
        self.release(flight)
        flight.order, flight.worker_id, flight.incarnation = order, order.worker_id, incarnation
        flight.sent_at = flight.progress_at = sent_at
        flight.absent_since = None
        self._account(flight, 1)

    def release(self, flight: Flight) -> None:
        """Its worker no longer has this flight."""
        self._account(flight, -1)
        flight.worker_id = None

    def extend(self, seconds: float) -> None:
        """Nothing could arrive for so long."""
        for flight in self._flights.values():
            flight.progress_at += seconds
            if flight.absent_since is not None:
                flight.absent_since += seconds

    def heard(self, heartbeat: Heartbeat, at: float) -> None:
        """A worker says which orders it has, and how long each has stood still."""
        if heartbeat.orders is None:
            return
        for group_id, flight in self._carried.get(heartbeat.worker_id, {}).items():
            if flight.incarnation != heartbeat.incarnation:
                continue
            # An age and no time of day: the worker's clock may be another.
            if (age_s := heartbeat.orders.get(group_id)) is not None:
                flight.progress_at, flight.absent_since = max(flight.progress_at, at - age_s), None
            elif flight.absent_since is None:
                flight.absent_since = at

    def produced(self, group_id: str, sample_index: int, at: float) -> Flight | None:
        """A sample is on the topic; its flight if that is news."""
        flight = self._flights.get(group_id)
        if flight is None or sample_index not in flight.missing:
            return None
        self._account(flight, -1)
        # Loads are sums over flights: a flight is taken out before it changes, and put back afterwards.
        flight.missing.discard(sample_index)
        flight.progress_at = max(flight.progress_at, at)
        self._account(flight, 1)
        return flight

    def give_up(self, flight: Flight) -> None:
        """Stop waiting for what is missing."""
        self._account(flight, -1)
        flight.missing.clear()

    def skip(self, group_id: str, sample: str, step: int, *, closed: bool) -> bool:
        """The trainer skipped a sample at a step; true once nothing of the group can be trained any more.

        That is when it has skipped every sample, or, ``closed``, every one that exists: it waits for no others.
        """
        flight = self._flights[group_id]
        flight.skipped[sample] = step
        if len(flight.skipped) >= flight.order.num_generations:
            return True
        # Samples that never came cannot be skipped; that none of them will is known only once the trainer waits for
        # none.
        produced = set(range(flight.order.num_generations)) - flight.missing
        return closed and all(make_trajectory_id(group_id, index) in flight.skipped for index in produced)

    def forget_skips_after(self, step: int) -> None:
        """The trainer went back to a step and will judge again what it skipped since."""
        for flight in self._flights.values():
            flight.skipped = {sample: at for sample, at in flight.skipped.items() if at <= step}

    def end(self, group_id: str) -> None:
        """The group was trained or skipped."""
        flight = self._flights.pop(group_id, None)
        if flight is not None:
            self._account(flight, -1)

    def _account(self, flight: Flight, sign: int) -> None:
        # Nobody's load while no worker has it.
        if flight.worker_id is None:
            return
        self._sequences[flight.worker_id] += sign * len(flight.missing)
        self._tokens[flight.worker_id] += sign * flight.missing_tokens
        carried = self._carried.setdefault(flight.worker_id, {})
        if sign > 0 and flight.missing:
            carried[flight.order.group_id] = flight
        else:
            carried.pop(flight.order.group_id, None)


class ExpectedLength(NamedTuple):
    """Tokens of a completion, and the standard deviation of their logarithm; 0 if that is not known.

    ``prompt``: tokens of the prompt before it.
    """

    tokens: int
    deviation: float = 0.0
    prompt: int = 0


@dataclass(slots=True)
class _Running:
    expected: ExpectedLength
    at_step: float


@dataclass(slots=True)
class _WorkerBatch:
    """A worker's completions: ``running`` ones, and those that wait for a slot, in order of arrival.

    ``steps``: so many that it has made by ``curve``; really it makes ``speed`` times as many, as far as is known after
    ``seen`` completions.
    """

    curve: DecodeCurve
    slots: int
    at: float
    speed: float
    seen: int = 0
    steps: float = 0.0
    running: dict[Sample, _Running] = field(default_factory=dict)
    waiting: dict[Sample, ExpectedLength] = field(default_factory=dict)

    def learn(self, speed: float, weight: float) -> None:
        """A completion was sampled at this speed; ``weight`` from 0 to 1, by its length."""
        self.seen += 1
        if self.seen > FIRST:
            # One completion whose news was held up must not slow down what is expected of all that follow.
            speed = min(max(speed, self.speed / MOST_WRONG), self.speed * MOST_WRONG)
        # The plain mean of the first ones, then an exponential mean that weighs a completion by its length.
        first = 1 / self.seen if self.seen <= FIRST else 0.0
        self.speed += max(LEARNING_RATE * weight, first) * (speed - self.speed)


@dataclass(frozen=True, slots=True)
class Remaining:
    """Expected tokens left, by completion. ``outgrown``: of those among the running that are past their estimate.

    ``contexts``: tokens in the cache of each that runs, then those of the prompts of the waiting.
    """

    running: tuple[int, ...] = ()
    waiting: tuple[int, ...] = ()
    outgrown: tuple[int, ...] = ()
    contexts: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        """All of them together."""
        return sum(self.running) + sum(self.waiting)


class Progress:
    """The progress of all workers. ``longest``: no completion has more tokens; ``measured``: a worker's curve, by id.

    With b completions running, dt seconds are dt / t(b) steps by the worker's curve. Each worker has a speed: the steps
    that it really makes, as a multiple of that, so that a completion that began at step k has speed × (steps - k)
    tokens now. It is learnt from the worker's own completions, and begins as the fleet's. What a completion that
    outgrew its estimate still has before it follows from how sure the estimate was (``mean_excess``).
    """

    def __init__(self, measured: Callable[[str], DecodeCurve], longest: int) -> None:
        self._measured = measured
        self._longest = longest
        self._batches: dict[str, _WorkerBatch] = {}

    @property
    def speed(self) -> float:
        """The fleet's: mean over the workers of which some completion has come; 1 before the first."""
        known = [batch.speed for batch in self._batches.values() if batch.seen]
        return sum(known) / len(known) if known else 1.0

    @property
    def speeds(self) -> dict[str, float]:
        """By worker, of those that have had something to do."""
        return {name: batch.speed for name, batch in self._batches.items()}

    def curve_of(self, worker_id: str) -> DecodeCurve:
        """A worker's decode steps as they are: its curve, at its speed."""
        batch = self._batches.get(worker_id)
        curve, speed = (batch.curve, batch.speed) if batch else (self._measured(worker_id), self.speed)
        return curve.times(1 / speed)

    def send(self, worker_id: str, slots: int, samples: Iterable[Sample], expected: ExpectedLength, now: float) -> None:
        """These samples, of so many tokens each, are with a worker now."""
        batch = self._batches.get(worker_id)
        if batch is None:
            seen = TAKEN_FROM_FLEET if any(other.seen for other in self._batches.values()) else 0
            batch = _WorkerBatch(self._measured(worker_id), slots, now, self.speed, seen)
            self._batches[worker_id] = batch
        self._count(batch, now)
        batch.slots = slots
        expected = expected._replace(tokens=min(expected.tokens, self._longest))
        batch.waiting.update(dict.fromkeys(samples, expected))
        self._begin(batch)

    def drop(self, worker_id: str, samples: Iterable[Sample], now: float) -> None:
        """The worker does not have these any more."""
        if (batch := self._batches.get(worker_id)) is not None:
            self._count(batch, now)
            for sample in samples:
                batch.waiting.pop(sample, None)
                batch.running.pop(sample, None)
            self._begin(batch)

    def finished(self, worker_id: str, sample: Sample, length: int, now: float) -> None:
        """A completion of so many tokens is there."""
        batch = self._batches.get(worker_id)
        if batch is None:
            return
        self._count(batch, now)
        # Tokens that came, over steps by the curve since it began: the speed of this worker meanwhile.
        sampled = batch.running.get(sample)
        if sampled is not None and length > 0 and (reckoned := batch.steps - sampled.at_step) > 0:
            batch.learn(length / reckoned, min(1.0, length / self._longest))
        self.drop(worker_id, (sample,), now)

    def remaining(self, worker_id: str, now: float) -> Remaining:
        """What is left of a worker's completions."""
        batch = self._batches.get(worker_id)
        if batch is None:
            return Remaining()
        self._count(batch, now)
        running, outgrown, contexts = [], [], []
        for sampled in batch.running.values():
            done = int(batch.speed * (batch.steps - sampled.at_step))
            expected = sampled.expected.tokens
            # At least one token, for it has not ended.
            left = max(1, expected - done)
            if done >= GRACE * expected:
                # What it still has, given that it has come so far.
                more = int(done * mean_excess(done / expected, sampled.expected.deviation))
                left = max(1, min(more, self._longest - done))
                outgrown.append(left)
            running.append(left)
            contexts.append(sampled.expected.prompt + done)
        waiting = tuple(expected.tokens for expected in batch.waiting.values())
        contexts += [expected.prompt for expected in batch.waiting.values()]
        return Remaining(tuple(running), waiting, tuple(outgrown), tuple(contexts))

    def _count(self, batch: _WorkerBatch, now: float) -> None:
        if batch.running and now > batch.at:
            # As many ran all the time since the last change, so every step took t(b).
            batch.steps += (now - batch.at) / batch.curve.batch_s(len(batch.running))
        batch.at = max(batch.at, now)

    @staticmethod
    def _begin(batch: _WorkerBatch) -> None:
        # In order of arrival, as engines do.
        while batch.waiting and len(batch.running) < batch.slots:
            sample = next(iter(batch.waiting))
            batch.running[sample] = _Running(batch.waiting.pop(sample), batch.steps)


class TrainerPace:
    """How fast the trainer is, from what its steps say they took; and what it has to do, from what has arrived.

    It takes groups when they are whole: with w seconds of work in a group that becomes whole at t, it is free at
    max(free, t) + w. ``s_per_token``: of forward, backward and optimizer; 0 before the first step.
    """

    def __init__(self) -> None:
        self.s_per_token = 0.0
        self._free_at = 0.0
        self._tokens: dict[str, int] = {}

    def produced(self, group_id: str, tokens: int, now: float, *, is_whole: bool) -> None:
        """A sample of a group is there: so many tokens of prompt and completion."""
        self._tokens[group_id] = self._tokens.get(group_id, 0) + tokens
        if is_whole:
            self._free_at = max(self._free_at, now) + self.s_per_token * self._tokens[group_id]

    def stepped(self, report: StepReport, now: float) -> None:
        """A step was taken: what is left to do is what has arrived and is in no step yet."""
        tokens = sum(self._tokens.pop(group_id, 0) for group_id in report.group_ids)
        seconds = sum(report.metrics.get(f"time/{phase}", 0.0) for phase in ("forward_backward", "optimizer"))
        if tokens and seconds:
            # Of all tokens of its groups: what it left out of the gradient costs nothing, now as in the next step.
            weight = NEWEST_STEP if self.s_per_token else 1.0
            self.s_per_token += weight * (seconds / tokens - self.s_per_token)
        self._free_at = now + self.s_per_token * sum(self._tokens.values())

    def forget(self, group_id: str) -> None:
        """It is in no step: it was skipped, or given up."""
        self._tokens.pop(group_id, None)

    def free_in_s(self, now: float) -> float:
        """Seconds until the trainer is through with what has arrived whole."""
        return max(0.0, self._free_at - now)
