"""Repack: long-tail trajectories are put together on few workers, and the others are free for what comes next.

After Laminar (arXiv 2510.12633, section 5, algorithm 1). Where a worker takes new weights when it runs nothing any more
(``generation.adopt = "idle"``), it gets no new prompts once it has fetched them, and ramps down: most of its slots stay
empty as long as its longest completions go on. The tails of all workers that hold the same version are put together on
as few of them as have room, and those that were released take their weights and new prompts at once.

Where dispatch knows more than Laminar's manager, it is used: that a worker ramps down it says itself
(``Heartbeat.awaits``), in place of a KV cache that empties; what its cache will hold follows from lengths expected.

``repack`` is the plan, and pure; ``Repacker`` keeps what is under way of it. Invariants, each with a test of its name:
- no_trajectory_is_lost_or_doubled: a group moves at most once, whole, from the worker that has it to another one;
- limits_are_kept: no target runs more than its limit of completions, or more than its cache will hold, when the plan
  is made and again when a move is;
- work_is_strictly_consolidated: every worker that gives gives all that it has, so fewer workers have a tail;
- no_worker_is_released_for_nothing: as many as have the slots for what may begin under the staleness bound, for tails
  beside one another are slower, and it is the oldest missing completion that holds the bound back;
- a_fixed_point_stays: what was planned and done leaves nothing to plan;
- advice_only: a move that goes wrong is an order whose worker was lost.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from streamrl.producers.dispatch.fleet import Candidate, Flight
from streamrl.producers.dispatch.plans import fits_cache
from streamrl.producers.dispatch.progress import HeldSample
from streamrl.producers.dispatch.state import DispatchState
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.profiles import DecodeCurve
from streamrl.schemas.reports import Heartbeat
from streamrl.schemas.trajectories import ReleaseOrder

REPACK_EVERY_S = 1.0
"""Between two plans: a plan is cheap, and a tail that is found a second later has lost a second."""
KNEE = 2.0
"""The batch whose steps take twice as long as one completion's: the roofline's knee, from which on steps grow nearly as
fast as the batch, and the tail would pay with its own time for what is put beside it."""
PENDING_S = 30.0
"""After which a move that its source does not answer is no longer waited for; if it answers later, it is made."""


@dataclass(frozen=True, slots=True)
class TailGroup:
    """What is missing of a group: of each sample, expected tokens left and tokens in its cache."""

    group_id: str
    left: tuple[int, ...]
    contexts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TailWorker:
    """A worker that ramps down. ``limit``: completions that it may run for the tail; ``slots``: when it is full."""

    worker_id: str
    version: PolicyVersion
    curve: DecodeCurve
    slots: int
    limit: int
    kv_tokens: int | None = None
    groups: tuple[TailGroup, ...] = ()

    @property
    def samples(self) -> int:
        """Completions that it runs."""
        return sum(len(group.left) for group in self.groups)

    @property
    def context(self) -> int:
        """Tokens in its cache."""
        return sum(map(sum, (group.contexts for group in self.groups)))

    @property
    def longest(self) -> int:
        """Expected tokens left of the completion that has most."""
        return max((left for group in self.groups for left in group.left), default=0)

    def with_all_of(self, other: "TailWorker") -> "TailWorker":
        """This worker, with the other's groups too."""
        return replace(self, groups=self.groups + other.groups)

    @property
    def is_within_limits(self) -> bool:
        """Whether it may run all of this, to the end."""
        if self.samples > self.limit:
            return False
        # Of each the step at which it ends, and the one at which its context would have been empty.
        ends = [
            (left, -context) for group in self.groups for left, context in zip(group.left, group.contexts, strict=True)
        ]
        return self.kv_tokens is None or fits_cache(ends, self.kv_tokens)


@dataclass(frozen=True, slots=True)
class Move:
    """A group goes on elsewhere."""

    group_id: str
    source: str
    target: str


def tail_limit(curve: DecodeCurve, slots: int) -> int:
    """The most completions b with t(b) ≤ ``KNEE`` × t(1), of the slots that there are."""
    limit = 1
    while limit < slots and curve.batch_s(limit + 1) <= KNEE * curve.batch_s(1):
        limit += 1
    return limit


def pays(source: TailWorker, packed: TailWorker, payback: float) -> bool:
    """Whether the slots of the source that are set free are worth ``payback`` times what the move costs.

    Its empty slots would stay empty until its longest completion ends; it costs the prefill of all contexts, which
    stalls the target. Both in seconds of a worker.
    """
    empty = max(0, source.slots - source.samples) / source.slots
    gain_s = source.longest * source.curve.batch_s(source.samples) * empty
    contexts = [context for group in source.groups for context in group.contexts]
    return gain_s >= payback * sum(map(packed.curve.prefill_s, contexts))


def repack(workers: Iterable[TailWorker], payback: float, room: float) -> tuple[Move, ...]:
    """Which groups go where, so that as few workers as possible of each version have a tail.

    ``room``: completions that may begin now; so many slots and no more are worth setting free.
    Smallest cache first, each into the fullest of the others that has room for all of it: best fit, as Laminar does.
    Until nothing changes, so that a plan that was carried out is followed by an empty one.
    """
    bins = {worker.worker_id: worker for worker in workers if worker.groups}
    at = {group.group_id: worker.worker_id for worker in bins.values() for group in worker.groups}
    origin = dict(at)
    while room > 0 and (found := _next_merge(bins.values(), payback)) is not None:
        source, packed = found
        room -= source.slots
        del bins[source.worker_id]
        bins[packed.worker_id] = packed
        at |= {group.group_id: packed.worker_id for group in source.groups}
    return tuple(Move(group, origin[group], at[group]) for group in sorted(at) if at[group] != origin[group])


def _next_merge(bins: Iterable[TailWorker], payback: float) -> tuple[TailWorker, TailWorker] | None:
    by_size = sorted(bins, key=lambda worker: (worker.context, worker.worker_id))
    for source in by_size:
        for target in reversed(by_size):  # the fullest first
            if target is source or target.version != source.version:
                continue
            packed = target.with_all_of(source)
            if packed.is_within_limits and pays(source, packed, payback):
                return source, packed
    return None


@dataclass
class Repacker:
    """The moves that are under way. Pure; seconds on the caller's clock.

    ``planned`` counts moves.
    """

    state: DispatchState
    payback: float
    planned: int = 0
    _pending: dict[str, tuple[Move, float]] = field(default_factory=dict)
    _planned_at: float = float("-inf")

    def releases(self, now: float, time_of_day: float) -> list[ReleaseOrder]:
        """What is to be taken back now."""
        self._forget_over(now)
        # One plan after the other: it would not see what is on its way.
        if self._pending or now - self._planned_at < REPACK_EVERY_S:
            return []
        self._planned_at = now
        found = (self._tail_of(heartbeat, now) for heartbeat in self.state.fleet.ready(now))
        workers = [worker for worker in found if worker is not None]
        moves = repack(workers, self.payback, self._room())
        self.planned += len(moves)
        self._pending |= {move.group_id: (move, now) for move in moves}
        by_source: dict[str, list[Flight]] = {}
        for move in moves:
            flight = self.state.flights.get(move.group_id)
            assert flight is not None, "it was planned"
            by_source.setdefault(move.source, []).append(flight)
        return [
            ReleaseOrder(
                worker_id=source,
                incarnation=flights[0].incarnation or "",
                groups={flight.order.group_id: flight.order.attempt for flight in flights},
                sent_at=time_of_day,
            )
            for source, flights in by_source.items()
        ]

    def target(self, flight: Flight, now: float) -> Candidate | None:
        """The worker that a group was to go to, once it was let go: if it may go there still. Since the plan was made
        the target may have ended its tail, taken new prompts, and got less room.
        """
        group_id = flight.order.group_id
        pending = self._pending.get(group_id)
        heartbeat = self.state.fleet.get(pending[0].target) if pending is not None else None
        if heartbeat is None or heartbeat not in self.state.fleet.ready(now):
            return None
        tail, worker = self._tail_of(heartbeat, now), self.state.candidate(heartbeat)
        if (
            tail is None
            or worker.policy != flight.order.policy
            or not self.state.ledger.may_move(group_id, tail.version)
        ):
            return None
        packed = replace(tail, groups=tail.groups + tail_groups(self.state.missing_of(flight)))
        return worker if packed.is_within_limits else None

    def _room(self) -> int:
        """Completions that a worker with the newest weights might begin now under the staleness bound."""
        ledger = self.state.ledger
        return 0 if ledger.current is None else ledger.room(ledger.current) * self.state.loop.num_generations

    def _forget_over(self, now: float) -> None:
        for group_id, (move, at) in list(self._pending.items()):
            flight = self.state.flights.get(group_id)
            is_over = flight is None or not flight.missing or flight.worker_id == move.target
            if is_over or now - at > PENDING_S:
                del self._pending[group_id]

    def _tail_of(self, heartbeat: Heartbeat, now: float) -> TailWorker | None:
        """A worker as the plan sees it, if it can let go of orders and ramps down."""
        # Versions are compared, and those of another policy are its own: tails of one policy are put together.
        if heartbeat.released is None or heartbeat.awaits is None or heartbeat.policy:
            return None
        worker_id = heartbeat.worker_id
        held = self.state.progress.held(worker_id, now)
        curve = self.state.progress.curve_of(worker_id)
        limit = tail_limit(curve, heartbeat.capacity)
        if len(held) > limit or not all(one.is_running for one in held):
            return None
        worker = self.state.candidate(heartbeat)
        return TailWorker(worker_id, worker.version, curve, worker.capacity, limit, worker.kv_tokens, tail_groups(held))


def tail_groups(held: Iterable[HeldSample]) -> tuple[TailGroup, ...]:
    """The same by group."""
    by_group: dict[str, list[HeldSample]] = {}
    for one in held:
        by_group.setdefault(one.sample[0], []).append(one)
    return tuple(
        TailGroup(group_id, tuple(one.left for one in samples), tuple(one.context for one in samples))
        for group_id, samples in by_group.items()
    )
