"""The workers: who is there, what each has been sent, and how far it has got with that. Pure; times in seconds.

- ``LiveWorkers``: who is there, as heartbeats show it;
- ``FlightTable``: the groups under way, which of their samples are missing, and which worker has them;
- ``Progress``: a worker's decode steps are counted from the time that passes and from how many completions it runs, by
  the decode curve; each completion that arrives tells how many there really were.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from producers.dispatch.plans import mean_excess
from schemas.identifiers import PolicyVersion, make_trajectory_id
from schemas.profiles import DecodeCurve
from schemas.reports import Heartbeat, WorkerState
from schemas.trajectories import WorkOrder

IDLE_LEASES = 3
"""A worker that reports nothing to do for so many leases no longer has an order sent before: it may take one lease to
read the order, and its next heartbeats may be late."""
GRACE = 1.1
"""How far past its estimate a completion must be: news of its end may be under way."""
LEARNING_RATE = 0.2
"""Weight of the longest completion in the estimate of the fleet's speed; shorter ones weigh less, since the time that
news is under way distorts them more."""
FIRST = 32
"""Completions of which the plain mean counts."""
MOST_WRONG = 4.0
"""After these, none counts as faster or slower than expected by more than this factor."""
Sample = tuple[str, int]
"""A group's id and the index of a sample."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker that may take an order: ``capacity`` completions at once, and what it still owes of earlier ones."""

    worker_id: str
    incarnation: str
    version: PolicyVersion
    capacity: int
    sequences: int
    predicted_tokens: int

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
    first_at: float
    at: float
    idle_since: float | None


class LiveWorkers:
    """Who is there, since when, and with which weights. A restarted worker is a new incarnation of its id."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._seen: dict[str, _Seen] = {}
        self._former: set[tuple[str, str]] = set()

    def observe(self, heartbeat: Heartbeat, at: float) -> None:
        """Note a heartbeat; those of an incarnation that was followed by another are ignored."""
        worker, incarnation = heartbeat.worker_id, heartbeat.incarnation
        # A late heartbeat of a process that was replaced.
        if (worker, incarnation) in self._former:
            return
        seen = self._seen.get(worker)
        # A restart: its orders are lost, and its lease begins anew.
        if seen is not None and seen.heartbeat.incarnation != incarnation:
            self._former.add((worker, seen.heartbeat.incarnation))
            seen = None
        idle = heartbeat.running == 0 and heartbeat.waiting == 0
        idle_since = at if seen is None or seen.idle_since is None else seen.idle_since
        first_at = at if seen is None else seen.first_at
        self._seen[worker] = _Seen(heartbeat, first_at, at, idle_since if idle else None)

    def extend_leases(self, seconds: float) -> None:
        """We did not listen for so long; nobody is to blame for the silence."""
        for seen in self._seen.values():
            seen.at += seconds

    def ready(self, now: float) -> list[Heartbeat]:
        """Last heartbeats of the workers that take new orders."""
        return [
            seen.heartbeat
            for seen in self._seen.values()
            if seen.heartbeat.state is WorkerState.READY and self._is_alive(seen, now)
        ]

    def get(self, worker_id: str) -> Heartbeat | None:
        """The worker's last heartbeat."""
        seen = self._seen.get(worker_id)
        return seen.heartbeat if seen is not None else None

    def incarnation_at(self, worker_id: str, at: float) -> str | None:
        """The worker's present incarnation, if it was there at that time already."""
        seen = self._seen.get(worker_id)
        return seen.heartbeat.incarnation if seen is not None and seen.first_at <= at else None

    def has(self, worker_id: str, incarnation: str | None, sent_at: float, now: float) -> bool:
        """Whether an order sent then to that incarnation can still be worked on."""
        seen = self._seen.get(worker_id)
        if seen is None or seen.heartbeat.incarnation != incarnation or not self._is_alive(seen, now):
            return False
        # Idle for so long with the order on its topic: it never got it, or lost it.
        return seen.idle_since is None or now - max(seen.idle_since, sent_at) <= IDLE_LEASES * self._lease_s

    def _is_alive(self, seen: _Seen, now: float) -> bool:
        return seen.heartbeat.state is not WorkerState.STOPPED and now - seen.at <= self._lease_s


@dataclass(slots=True)
class Flight:
    """One group under way. ``worker_id`` none: its worker was lost and no other has it yet.

    ``progress_at``: when it was ordered last or a sample of it arrived.
    """

    order: WorkOrder
    worker_id: str | None
    incarnation: str | None
    sent_at: float
    missing: set[int]
    progress_at: float
    skipped: dict[str, int] = field(default_factory=dict)

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
        self._account(flight, 1)

    def release(self, flight: Flight) -> None:
        """Its worker no longer has this flight."""
        self._account(flight, -1)
        flight.worker_id = None

    def extend(self, seconds: float) -> None:
        """Nothing could arrive for so long."""
        for flight in self._flights.values():
            flight.progress_at += seconds

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

    def give_up(self, flight: Flight) -> bool:
        """Stop waiting for what is missing; true if no sample of the group exists, so that nobody will end it."""
        nothing_exists = len(flight.missing) == flight.order.num_generations
        self._account(flight, -1)
        flight.missing.clear()
        return nothing_exists

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
        if flight.worker_id is not None:
            self._sequences[flight.worker_id] += sign * len(flight.missing)
            self._tokens[flight.worker_id] += sign * flight.missing_tokens


class ExpectedLength(NamedTuple):
    """Tokens of a completion, and the standard deviation of their logarithm; 0 if that is not known."""

    tokens: int
    deviation: float = 0.0


@dataclass(slots=True)
class _Running:
    expected: ExpectedLength
    at_step: float


@dataclass(slots=True)
class _WorkerBatch:
    """A worker's completions: ``running`` ones, and those that wait for a slot, in order of arrival."""

    slots: int
    at: float
    steps: float = 0.0
    running: dict[Sample, _Running] = field(default_factory=dict)
    waiting: dict[Sample, ExpectedLength] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Remaining:
    """Expected tokens left, by completion. ``outgrown``: of those among the running that are past their estimate."""

    running: tuple[int, ...] = ()
    waiting: tuple[int, ...] = ()
    outgrown: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        """All of them together."""
        return sum(self.running) + sum(self.waiting)


class Progress:
    """The progress of all workers. ``longest``: no completion has more tokens.

    With b completions running, dt seconds are dt / t(b) steps by the curve. ``speed``: steps that workers really make,
    as a multiple of that, so that a completion that began at step k has speed × (steps - k) tokens now. What one that
    outgrew its estimate still has before it follows from how sure the estimate was (``mean_excess``).
    """

    def __init__(self, curve: DecodeCurve, longest: int) -> None:
        self._curve = curve
        self._longest = longest
        self._batches: dict[str, _WorkerBatch] = {}
        self._seen = 0
        self.speed = 1.0

    def send(self, worker_id: str, slots: int, samples: Iterable[Sample], expected: ExpectedLength, now: float) -> None:
        """These samples, of so many tokens each, are with a worker now."""
        batch = self._batches.setdefault(worker_id, _WorkerBatch(slots, now))
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
            self._learn(length / reckoned, length)
        self.drop(worker_id, (sample,), now)

    def _learn(self, speed: float, length: int) -> None:
        self._seen += 1
        if self._seen > FIRST:
            # One worker that hangs must not slow down what is expected of all.
            speed = min(max(speed, self.speed / MOST_WRONG), self.speed * MOST_WRONG)
        # The plain mean of the first ones, then an exponential mean that weighs a completion by its length.
        weight = max(min(1.0, LEARNING_RATE * length / self._longest), 1 / self._seen if self._seen <= FIRST else 0.0)
        self.speed += weight * (speed - self.speed)

    def remaining(self, worker_id: str, now: float) -> Remaining:
        """What is left of a worker's completions."""
        batch = self._batches.get(worker_id)
        if batch is None:
            return Remaining()
        self._count(batch, now)
        running, outgrown = [], []
        for sampled in batch.running.values():
            done = int(self.speed * (batch.steps - sampled.at_step))
            expected = sampled.expected.tokens
            # At least one token, for it has not ended.
            left = max(1, expected - done)
            if done >= GRACE * expected:
                # What it still has, given that it has come so far.
                more = int(done * mean_excess(done / expected, sampled.expected.deviation))
                left = max(1, min(more, self._longest - done))
                outgrown.append(left)
            running.append(left)
        return Remaining(tuple(running), tuple(expected.tokens for expected in batch.waiting.values()), tuple(outgrown))

    def _count(self, batch: _WorkerBatch, now: float) -> None:
        if batch.running and now > batch.at:
            # As many ran all the time since the last change, so every step took t(b).
            batch.steps += (now - batch.at) / self._curve.batch_s(len(batch.running))
        batch.at = max(batch.at, now)

    @staticmethod
    def _begin(batch: _WorkerBatch) -> None:
        # In order of arrival, as engines do.
        while batch.waiting and len(batch.running) < batch.slots:
            sample = next(iter(batch.waiting))
            batch.running[sample] = _Running(batch.waiting.pop(sample), batch.steps)
