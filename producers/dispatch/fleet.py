"""How far each worker has got with what it samples, reckoned from the decode curve and corrected by what arrives. Pure.

A worker's decode steps are counted from the time that passes and from how many completions it runs; each completion
that arrives tells how many there really were. What a completion that outgrew its estimate still has before it follows
from how sure the estimate was.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from producers.dispatch.uncertainty import excess
from schemas.identifiers import PolicyVersion, make_trajectory_id
from schemas.profiles import DecodeCurve
from schemas.reports import Heartbeat, WorkerState
from schemas.trajectories import WorkOrder

# A worker that may take an order, and whether and how soon. Pure.


@dataclass(frozen=True, slots=True)
class Candidate:
    """What a worker can sample at once, and what it still owes."""

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


# The workers as their heartbeats show them. Pure: time is always an argument, in seconds.

IDLE_LEASES = 3
"""A worker that reports nothing to do for so many leases no longer has an order sent before."""


@dataclass(slots=True)
class _Seen:
    heartbeat: Heartbeat
    first_at: float
    at: float
    idle_since: float | None


class Fleet:
    """Who is there, since when, and with which weights. A restarted worker is a new incarnation of its id."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._seen: dict[str, _Seen] = {}
        self._former: set[tuple[str, str]] = set()

    def observe(self, heartbeat: Heartbeat, at: float) -> None:
        """Note a heartbeat; those of an incarnation that was followed by another are ignored."""
        worker, incarnation = heartbeat.worker_id, heartbeat.incarnation
        if (worker, incarnation) in self._former:
            return
        seen = self._seen.get(worker)
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
        return seen.idle_since is None or now - max(seen.idle_since, sent_at) <= IDLE_LEASES * self._lease_s

    def _is_alive(self, seen: _Seen, now: float) -> bool:
        return seen.heartbeat.state is not WorkerState.STOPPED and now - seen.at <= self._lease_s


# The orders under way: which samples are still missing, and with which worker. Pure; knows no topics. A group stays
# here until it is trained or skipped; its worker carries it only as long as samples are missing.


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
    """All groups under way, and the load of each worker that follows from them."""

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
        if flight.worker_id is not None:
            self._sequences[flight.worker_id] += sign * len(flight.missing)
            self._tokens[flight.worker_id] += sign * flight.missing_tokens


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


class Expected(NamedTuple):
    """Tokens of a completion, and the standard deviation of their logarithm; 0 if that is not known."""

    tokens: int
    spread: float = 0.0


@dataclass(slots=True)
class _Begun:
    expected: Expected
    at_step: float


@dataclass(slots=True)
class _Bench:
    """A worker's completions: ``begun`` ones, and those that wait for a slot, in order of arrival."""

    slots: int
    at: float
    steps: float = 0.0
    begun: dict[Sample, _Begun] = field(default_factory=dict)
    waiting: dict[Sample, Expected] = field(default_factory=dict)


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

    ``speed``: decode steps that workers really make, as a multiple of what the curve says.
    """

    def __init__(self, curve: DecodeCurve, longest: int) -> None:
        self._curve = curve
        self._longest = longest
        self._benches: dict[str, _Bench] = {}
        self._seen = 0
        self.speed = 1.0

    def send(self, worker_id: str, slots: int, samples: Iterable[Sample], expected: Expected, now: float) -> None:
        """These samples, of so many tokens each, are with a worker now."""
        bench = self._benches.setdefault(worker_id, _Bench(slots, now))
        self._count(bench, now)
        bench.slots = slots
        expected = expected._replace(tokens=min(expected.tokens, self._longest))
        bench.waiting.update(dict.fromkeys(samples, expected))
        self._begin(bench)

    def drop(self, worker_id: str, samples: Iterable[Sample], now: float) -> None:
        """The worker does not have these any more."""
        if (bench := self._benches.get(worker_id)) is not None:
            self._count(bench, now)
            for sample in samples:
                bench.waiting.pop(sample, None)
                bench.begun.pop(sample, None)
            self._begin(bench)

    def finished(self, worker_id: str, sample: Sample, length: int, now: float) -> None:
        """A completion of so many tokens is there."""
        bench = self._benches.get(worker_id)
        if bench is None:
            return
        self._count(bench, now)
        begun = bench.begun.get(sample)
        if begun is not None and length > 0 and (reckoned := bench.steps - begun.at_step) > 0:
            self._learn(length / reckoned, length)
        self.drop(worker_id, (sample,), now)

    def _learn(self, speed: float, length: int) -> None:
        self._seen += 1
        if self._seen > FIRST:
            speed = min(max(speed, self.speed / MOST_WRONG), self.speed * MOST_WRONG)
        weight = max(min(1.0, LEARNING_RATE * length / self._longest), 1 / self._seen if self._seen <= FIRST else 0.0)
        self.speed += weight * (speed - self.speed)

    def remaining(self, worker_id: str, now: float) -> Remaining:
        """What is left of a worker's completions."""
        bench = self._benches.get(worker_id)
        if bench is None:
            return Remaining()
        self._count(bench, now)
        running, outgrown = [], []
        for begun in bench.begun.values():
            done = int(self.speed * (bench.steps - begun.at_step))
            expected = begun.expected.tokens
            left = max(1, expected - done)
            if done >= GRACE * expected:
                more = int(done * excess(done / expected, begun.expected.spread))
                left = max(1, min(more, self._longest - done))
                outgrown.append(left)
            running.append(left)
        return Remaining(tuple(running), tuple(expected.tokens for expected in bench.waiting.values()), tuple(outgrown))

    def _count(self, bench: _Bench, now: float) -> None:
        if bench.begun and now > bench.at:
            bench.steps += (now - bench.at) / self._curve.batch_s(len(bench.begun))
        bench.at = max(bench.at, now)

    @staticmethod
    def _begin(bench: _Bench) -> None:
        while bench.waiting and len(bench.begun) < bench.slots:
            sample = next(iter(bench.waiting))
            bench.begun[sample] = _Begun(bench.waiting.pop(sample), bench.steps)
