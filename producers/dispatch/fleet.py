"""The workers: who is there, and what each has been sent. Pure; times in seconds.

- ``LiveWorkers``: who is there, as heartbeats show it;
- ``FlightTable``: the groups under way, which of their samples are missing, and which worker has them;
- ``SamplesInGrading``: samples that workers finished and graders have.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from streamrl.schemas.identifiers import PolicyVersion, make_trajectory_id
from streamrl.schemas.liveness import LastBeats
from streamrl.schemas.messages import is_near_version
from streamrl.schemas.reports import Heartbeat, ReleasedOrder, WorkerState
from streamrl.schemas.trajectories import WorkOrder

ABSENT_TIMEOUTS = 3
"""An order that its worker's heartbeats do not name for so many time-outs is lost: it may take one to read the order,
and the next heartbeats, or the last trajectory of the order, may be late."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker that may take an order: ``capacity`` completions at once, and what it still owes of earlier ones.

    ``kv_tokens``: tokens of context that its cache holds; none: as many as its slots can have. ``policy``: whose
    weights it has, empty: those that are announced to all; else ``version`` is of these, from which ages are counted.
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


class LiveWorkers:
    """Which workers are alive, and with which weights; see ``schemas/liveness.py``. A restarted worker is a new
    incarnation of its id.

    Workers that are only recalled are alive until their time-out, and get no new orders before they are heard.
    """

    def __init__(self, timeout_s: float) -> None:
        self._beats = LastBeats[Heartbeat](timeout_s)
        self._recalled: set[str] = set()
        self._partials_from: dict[tuple[str, str | None], int | None] = {}
        """By incarnation that was replaced: what it said last."""

    def observe(self, heartbeat: Heartbeat, at: float) -> None:
        """Note a heartbeat; those of an incarnation that was followed by another are ignored."""
        if self._note(heartbeat, at):
            self._recalled.discard(heartbeat.worker_id)

    def recall(self, heartbeat: Heartbeat, now: float) -> None:
        """Note a heartbeat of the past: its worker has one time-out from now on to be heard."""
        if self._note(heartbeat, now):
            self._recalled.add(heartbeat.worker_id)

    def _note(self, heartbeat: Heartbeat, at: float) -> bool:
        # A worker of a version too far off may not understand its orders.
        if not is_near_version(heartbeat.wire):
            return False
        before = self._beats.get(heartbeat.worker_id)
        if not self._beats.observe(heartbeat.worker_id, heartbeat, at):
            return False
        if before is not None and before.incarnation != heartbeat.incarnation:
            self._partials_from[before.worker_id, before.incarnation] = before.partials_from
        return True

    def extend(self, seconds: float) -> None:
        """We did not listen for so long; no worker is to blame for the silence."""
        self._beats.extend(seconds)

    def ready(self, now: float) -> list[Heartbeat]:
        """Last heartbeats of the workers that take new orders."""
        return [
            beat
            for worker, beat in self._beats
            if beat.state is WorkerState.READY and worker not in self._recalled and self._is_alive(beat, now)
        ]

    def policies(self, now: float) -> frozenset[str]:
        """Those whose weights some worker has that is there to stay, whether it takes orders at this moment or not."""
        passing = (WorkerState.DRAINING, WorkerState.STARTING)
        return frozenset(
            beat.policy for _, beat in self._beats if beat.state not in passing and self._is_alive(beat, now)
        )

    def get(self, worker_id: str) -> Heartbeat | None:
        """The worker's last heartbeat."""
        return self._beats.get(worker_id)

    def partials_from(self, worker_id: str, incarnation: str | None) -> int | None:
        """What that process said last, 0 if nobody knows. It holds to its end: what it wrote later lies behind."""
        if (beat := self._beats.get(worker_id)) is not None and beat.incarnation == incarnation:
            return beat.partials_from
        return self._partials_from.get((worker_id, incarnation), 0)

    def has(self, worker_id: str, incarnation: str | None, now: float) -> bool:
        """Whether that incarnation of the worker is there."""
        beat = self._beats.get(worker_id)
        return beat is not None and beat.incarnation == incarnation and self._is_alive(beat, now)

    def _is_alive(self, beat: Heartbeat, now: float) -> bool:
        return beat.state is not WorkerState.STOPPED and not self._beats.is_silent(beat.worker_id, now)


@dataclass(slots=True)
class Flight:
    """One group under way. ``worker_id`` none: its worker was lost or let go of it, and no other has it yet.

    ``progress_at``: when it was ordered last, a sample of it arrived, or its worker got on with it as heartbeats say.
    ``absent_since``: since when these do not name it; none as long as they do. ``is_let_go``: its worker gave it back
    because it was asked to; ``on_record``: tokens of samples that are missing, by index, as far as workers told.
    """

    order: WorkOrder
    worker_id: str | None
    incarnation: str | None
    sent_at: float
    missing: set[int]
    progress_at: float
    skipped: dict[str, int] = field(default_factory=dict)
    absent_since: float | None = None
    is_let_go: bool = False
    on_record: dict[int, int] = field(default_factory=dict)

    @property
    def lost(self) -> int:
        """Orders of it that ended with a worker that was lost, or did not deliver."""
        return self.order.attempt - self.order.moves

    @property
    def missing_tokens(self) -> int:
        """Predicted tokens still to be sampled."""
        return len(self.missing) * self.order.estimate.median

    @property
    def samples(self) -> list[tuple[str, int]]:
        """Group id and index of each sample missing, in order."""
        return [(self.order.group_id, index) for index in sorted(self.missing)]

    @property
    def begun(self) -> dict[tuple[str, int], int]:
        """Tokens on record, by sample missing."""
        return {(self.order.group_id, index): self.on_record.get(index, 0) for index in self.missing}


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
        flight.absent_since, flight.is_let_go = None, False
        self._account(flight, 1)

    def release(self, flight: Flight) -> None:
        """Its worker no longer has this flight."""
        self._account(flight, -1)
        flight.worker_id = None

    def carried(self, worker_id: str) -> Mapping[str, Flight]:
        """What a worker has samples to make of, by group id."""
        return self._carried.get(worker_id, {})

    def let_go(self, heartbeat: Heartbeat) -> list[tuple[Flight, ReleasedOrder]]:
        """Flights that this worker gave back. Those whose other samples have not been read yet come with a later beat:
        what is whole the worker delivers, and names the order until it is settled.
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
        """Of what this worker let go of, what it need not keep any more, by group id and up to which attempt.

        A later order, by now on its topic, says where that is; or nothing is missing of the group.
        """
        found = {}
        for released in heartbeat.released or ():
            flight = self._flights.get(released.group_id)
            if flight is None or not flight.missing or flight.order.attempt > released.attempt:
                found[released.group_id] = released.attempt
        return found

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


class SamplesInGrading:
    """By group, the indices of the samples that graders have: no worker owes them, and their groups are not whole.

    The two topics are not read in the order in which they were written, so a sample may be seen graded before it is
    seen ungraded; its flight, which misses it no more by then, tells.
    """

    def __init__(self) -> None:
        self._samples: dict[str, set[int]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._samples.values()))

    def begin(self, group_id: str, sample_index: int) -> None:
        """A sample is on its way to the graders."""
        self._samples.setdefault(group_id, set()).add(sample_index)

    def end(self, group_id: str, sample_index: int) -> bool:
        """A sample is graded; whether it was known to be on its way."""
        found = self._samples.get(group_id, set())
        if sample_index not in found:
            return False
        found.remove(sample_index)
        if not found:
            del self._samples[group_id]
        return True

    def has(self, group_id: str) -> bool:
        """Whether a sample of the group is on its way."""
        return group_id in self._samples

    def forget(self, group_id: str) -> None:
        """The group was trained or skipped."""
        self._samples.pop(group_id, None)
