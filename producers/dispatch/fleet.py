"""The workers that are alive, and the samples that each was sent. Pure; times in seconds.

- ``LiveWorkers``: the workers that are alive, by their heartbeats;
- ``FlightTable``: the groups in flight, which of their samples are missing, and which worker has them;
- ``SamplesInGrading``: samples that workers have finished and graders have not.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from streamrl.schemas.identifiers import PolicyVersion, make_trajectory_id
from streamrl.schemas.liveness import LastBeats
from streamrl.schemas.messages import is_compatible_wire_version
from streamrl.schemas.reports import Heartbeat, ReleasedOrder, WorkerState
from streamrl.schemas.trajectories import WorkOrder

MAX_ATTEMPTS = 10
"""Orders of a group, each lost, after which its missing samples are given up. So many losses are the prompt's fault."""
OVERCOMMIT = 1.25
"""Sequences ordered per worker, as a multiple of its slots: enough that no slot waits for its next order."""
ABSENT_TIMEOUTS = 3
"""Heartbeat time-outs after which an order is lost if its worker's heartbeats do not name it. Reading the order may
take one, and the next heartbeats, or the order's last trajectory, may be late."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker that may take an order: its ``capacity`` in completions, and its load from earlier orders.

    ``kv_tokens``: tokens of context that its cache holds; None: the cache does not limit it. ``policy``: of the
    worker's weights, empty for the announced policy. ``version``: the announced version from which its samples' age is
    counted, also for a worker of another policy.
    """

    worker_id: str
    incarnation: str
    version: PolicyVersion
    capacity: int
    sequences: int
    predicted_tokens: int
    kv_tokens: int | None = None
    policy: str = ""

    def has_room(self, samples: int, overcommit: float) -> bool:
        """Whether a slot is free now, or the order stays within the overcommitted capacity."""
        return self.sequences < self.capacity or self.sequences + samples <= self.capacity * overcommit

    def has_room_within(self, samples: int, concurrency: int) -> bool:
        """Whether the worker with the order runs about ``concurrency`` completions; an idle worker takes any order."""
        # Half of the order's samples, rounded up, must fit: exceeding the limit is better than leaving slots empty.
        return self.capacity > 0 and (not self.sequences or self.sequences + (samples + 1) // 2 <= concurrency)


def least_loaded(candidates: Iterable[Candidate]) -> Candidate:
    """The worker with the fewest predicted tokens per slot; among equals, the one with the newest weights."""
    return min(
        candidates,
        key=lambda worker: (
            worker.predicted_tokens / max(1, worker.capacity),
            -worker.version.number,
            worker.worker_id,
        ),
    )


class LiveWorkers:
    """The live workers and their weights; see ``schemas/liveness.py``. A restarted worker is a new incarnation of its
    id.

    Workers known only from old heartbeats are alive until their time-out, and get no orders before a new heartbeat.
    """

    def __init__(self, timeout_s: float) -> None:
        self._beats = LastBeats[Heartbeat](timeout_s)
        self._recalled: set[str] = set()
        self._partials_from: dict[tuple[str, str | None], int | None] = {}
        """By replaced incarnation: the last ``partials_from`` that it reported."""

    def observe(self, heartbeat: Heartbeat, at: float) -> None:
        """Note a heartbeat; heartbeats of a replaced incarnation are ignored."""
        if self._note(heartbeat, at):
            self._recalled.discard(heartbeat.worker_id)

    def recall(self, heartbeat: Heartbeat, now: float) -> None:
        """Note a heartbeat from before the start: its worker has one time-out from now to send another."""
        if self._note(heartbeat, now):
            self._recalled.add(heartbeat.worker_id)

    def _note(self, heartbeat: Heartbeat, at: float) -> bool:
        # A worker of a distant wire version may not understand orders.
        if not is_compatible_wire_version(heartbeat.wire):
            return False
        before = self._beats.get(heartbeat.worker_id)
        if not self._beats.observe(heartbeat.worker_id, heartbeat, at):
            return False
        if before is not None and before.incarnation != heartbeat.incarnation:
            self._partials_from[before.worker_id, before.incarnation] = before.partials_from
        return True

    def extend(self, seconds: float) -> None:
        """Extend the time-outs by seconds in which this process read no heartbeats."""
        self._beats.extend(seconds)

    def ready(self, now: float) -> list[Heartbeat]:
        """Last heartbeats of the workers that take new orders."""
        return [
            beat
            for worker, beat in self._beats
            if beat.state is WorkerState.READY and worker not in self._recalled and self._is_alive(beat, now)
        ]

    def policies(self, now: float) -> frozenset[str]:
        """Policies whose weights a live worker has, also if it takes no orders now; not if it starts or drains."""
        transient = (WorkerState.DRAINING, WorkerState.STARTING)
        return frozenset(
            beat.policy for _, beat in self._beats if beat.state not in transient and self._is_alive(beat, now)
        )

    def get(self, worker_id: str) -> Heartbeat | None:
        """The worker's last heartbeat."""
        return self._beats.get(worker_id)

    def partials_from(self, worker_id: str, incarnation: str | None) -> int | None:
        """The offset from which an incarnation's partial records start, as it last reported; 0 if unknown.

        It stays valid after the process exits, because later records have higher offsets.
        """
        if (beat := self._beats.get(worker_id)) is not None and beat.incarnation == incarnation:
            return beat.partials_from
        return self._partials_from.get((worker_id, incarnation), 0)

    def has(self, worker_id: str, incarnation: str | None, now: float) -> bool:
        """Whether that incarnation of the worker is alive."""
        beat = self._beats.get(worker_id)
        return beat is not None and beat.incarnation == incarnation and self._is_alive(beat, now)

    def _is_alive(self, beat: Heartbeat, now: float) -> bool:
        return beat.state is not WorkerState.STOPPED and not self._beats.is_silent(beat.worker_id, now)


@dataclass(slots=True)
class Flight:
    """One group in flight. ``worker_id`` None: its worker was lost or released it, and no other has it yet.

    ``progress_at``: last time that it was ordered, a sample arrived, or heartbeats showed progress. ``absent_since``:
    since when heartbeats do not name it; None while they do. ``is_released``: its worker released it on request;
    ``on_record``: recorded tokens of missing samples, by index, as reported by the worker that released it.
    """

    order: WorkOrder
    worker_id: str | None
    incarnation: str | None
    sent_at: float
    missing: set[int]
    progress_at: float
    skipped: dict[str, int] = field(default_factory=dict)
    absent_since: float | None = None
    is_released: bool = False
    on_record: dict[int, int] = field(default_factory=dict)

    @property
    def lost(self) -> int:
        """Orders of the group whose worker was lost or did not deliver."""
        return self.order.attempt - self.order.moves

    @property
    def missing_tokens(self) -> int:
        """Predicted tokens still to be sampled."""
        return len(self.missing) * self.order.estimate.median

    @property
    def samples(self) -> list[tuple[str, int]]:
        """Group id and index of each missing sample, in order."""
        return [(self.order.group_id, index) for index in sorted(self.missing)]

    @property
    def begun(self) -> dict[tuple[str, int], int]:
        """Recorded tokens of each missing sample."""
        return {(self.order.group_id, index): self.on_record.get(index, 0) for index in self.missing}


class FlightTable:
    """All groups in flight, and the load of each worker that follows from them.

    A group stays here until it is trained or skipped. It counts as its worker's load only while samples are missing.
    """

    def __init__(self) -> None:
        self._flights: dict[str, Flight] = {}
        self._sequences: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()
        self._carried: dict[str, dict[str, Flight]] = {}  # each worker's flights, by group id

    def __len__(self) -> int:
        return len(self._flights)

    def get(self, group_id: str) -> Flight | None:
        """The flight of a group, if it is in flight."""
        return self._flights.get(group_id)

    def unfinished(self) -> Iterator[Flight]:
        """Flights with samples missing, the oldest first."""
        return (flight for flight in self._flights.values() if flight.missing)

    def load(self, worker_id: str) -> tuple[int, int]:
        """Sequences and predicted tokens that a worker still owes."""
        return self._sequences[worker_id], self._tokens[worker_id]

    def send(self, order: WorkOrder, incarnation: str | None, sent_at: float) -> None:
        """Note an order that is sent, for a new group or for the missing samples of a known group."""
        flight = self._flights.get(order.group_id)
        if flight is None:
            flight = Flight(order, None, None, sent_at, set(order.sample_indices), sent_at)
            self._flights[order.group_id] = flight
        # Its load is removed from the previous worker before it is added to the next.
        self.release(flight)
        flight.order, flight.worker_id, flight.incarnation = order, order.worker_id, incarnation
        flight.sent_at = flight.progress_at = sent_at
        flight.absent_since, flight.is_released = None, False
        self._account(flight, 1)

    def release(self, flight: Flight) -> None:
        """Take a flight from its worker."""
        self._account(flight, -1)
        flight.worker_id = None

    def carried(self, worker_id: str) -> Mapping[str, Flight]:
        """The flights whose missing samples the worker owes, by group id."""
        return self._carried.get(worker_id, {})

    def let_go(self, heartbeat: Heartbeat) -> list[tuple[Flight, ReleasedOrder]]:
        """Flights that this worker released.

        The worker still delivers completed samples of a released order, and names the order in its heartbeats until it
        is settled. If this process has not read these samples yet, the flight is returned for a later heartbeat.
        """
        carried, found = self.carried(heartbeat.worker_id), []
        for released in heartbeat.released or ():
            flight = carried.get(released.group_id)
            if flight is None or flight.incarnation != heartbeat.incarnation:
                continue
            samples = {index for index, _ in released.samples}
            if flight.order.attempt == released.attempt and flight.missing <= samples:
                found.append((flight, released))
        return found

    def settled(self, heartbeat: Heartbeat) -> dict[str, int]:
        """Released groups that the worker may delete, with the attempt up to which it may.

        Either a later order, which is on the topic by now, says where the group's tokens are, or no sample is missing.
        """
        found = {}
        for released in heartbeat.released or ():
            flight = self._flights.get(released.group_id)
            if flight is None or not flight.missing or flight.order.attempt > released.attempt:
                found[released.group_id] = released.attempt
        return found

    def extend(self, seconds: float) -> None:
        """Extend the time-outs by seconds in which nothing could arrive."""
        for flight in self._flights.values():
            flight.progress_at += seconds
            if flight.absent_since is not None:
                flight.absent_since += seconds

    def heard(self, heartbeat: Heartbeat, at: float) -> None:
        """Note a heartbeat, which names the worker's orders and how long each has been without progress."""
        if heartbeat.orders is None:
            return
        for group_id, flight in self._carried.get(heartbeat.worker_id, {}).items():
            if flight.incarnation != heartbeat.incarnation:
                continue
            # An age, not a time of day, because the worker's clock may differ.
            if (age_s := heartbeat.orders.get(group_id)) is not None:
                flight.progress_at, flight.absent_since = max(flight.progress_at, at - age_s), None
            elif flight.absent_since is None:
                flight.absent_since = at

    def produced(self, group_id: str, sample_index: int, at: float) -> Flight | None:
        """Note a sample on the topic; returns its flight if the sample was missing."""
        flight = self._flights.get(group_id)
        if flight is None or sample_index not in flight.missing:
            return None
        self._account(flight, -1)
        # Loads are sums over flights: subtract a flight before it changes, and add it afterwards.
        flight.missing.discard(sample_index)
        flight.progress_at = max(flight.progress_at, at)
        self._account(flight, 1)
        return flight

    def give_up(self, flight: Flight) -> None:
        """Stop waiting for the missing samples."""
        self._account(flight, -1)
        flight.missing.clear()

    def skip(self, group_id: str, sample: str, step: int, *, closed: bool) -> bool:
        """Note a sample that the trainer skipped at a step; true once nothing of the group can be trained any more.

        That is when every sample was skipped; or, if ``closed``, every sample that exists, as the trainer waits for no
        others.
        """
        flight = self._flights[group_id]
        flight.skipped[sample] = step
        if len(flight.skipped) >= flight.order.num_generations:
            return True
        # Samples that never arrived have no skip row. That none of them will be trained is known only if closed.
        produced = set(range(flight.order.num_generations)) - flight.missing
        return closed and all(make_trajectory_id(group_id, index) in flight.skipped for index in produced)

    def forget_skips_after(self, step: int) -> None:
        """Forget skips after a step that the trainer went back to: it will decide again about these samples."""
        for flight in self._flights.values():
            flight.skipped = {sample: at for sample, at in flight.skipped.items() if at <= step}

    def end(self, group_id: str) -> None:
        """Remove a group that was trained or skipped."""
        flight = self._flights.pop(group_id, None)
        if flight is not None:
            self._account(flight, -1)

    def _account(self, flight: Flight, sign: int) -> None:
        # A flight without a worker is no worker's load.
        if flight.worker_id is None:
            return
        self._sequences[flight.worker_id] += sign * len(flight.missing)
        self._tokens[flight.worker_id] += sign * flight.missing_tokens
        carried = self._carried.setdefault(flight.worker_id, {})
        if sign > 0 and flight.missing:
            carried[flight.order.group_id] = flight
        else:
            carried.pop(flight.order.group_id, None)


class SamplesInGrading:
    """The samples that graders have, by group: no worker owes them, and their groups are not complete.

    The two topics are not read in the order in which they were written, so a sample may be read graded before it is
    read ungraded. Its flight shows this, because the sample is no longer missing there.
    """

    def __init__(self) -> None:
        self._samples: dict[str, set[int]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._samples.values()))

    def begin(self, group_id: str, sample_index: int) -> None:
        """Note a sample that is on its way to the graders."""
        self._samples.setdefault(group_id, set()).add(sample_index)

    def end(self, group_id: str, sample_index: int) -> bool:
        """Note a graded sample; returns whether it was known to be with the graders."""
        found = self._samples.get(group_id, set())
        if sample_index not in found:
            return False
        found.remove(sample_index)
        if not found:
            del self._samples[group_id]
        return True

    def has(self, group_id: str) -> bool:
        """Whether the graders have a sample of the group."""
        return group_id in self._samples

    def forget(self, group_id: str) -> None:
        """Remove a group that was trained or skipped."""
        self._samples.pop(group_id, None)
