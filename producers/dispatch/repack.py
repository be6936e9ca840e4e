"""Repack: moves long-tail trajectories together onto few workers, so that the other workers are free for new prompts.

After Laminar (arXiv 2510.12633, section 5, algorithm 1). With ``generation.adopt = "idle"`` a worker adopts new weights
only when it runs nothing. Once it has fetched them it gets no new prompts, and ramps down: most of its slots stay empty
until its longest completions end. Repack moves the tails of all workers that hold the same version onto as few of them
as have room. The emptied workers adopt their weights and take new prompts at once.

The dispatcher knows more than Laminar's manager. A worker reports that it ramps down (``Heartbeat.awaits``); Laminar
infers this from a KV cache that empties. How full a cache will be follows from the expected lengths.

``repack`` makes the plan, and is pure; ``Repacker`` tracks the moves in progress. A move that fails is handled like an
order whose worker was lost. Invariants, each with a test of its name:
- no_trajectory_is_lost_or_duplicated: a group moves at most once, with all its samples, from its worker to another one;
- targets_stay_within_their_limits: no target runs more completions than its limit, or more than its cache will hold.
  This is checked when the plan is made, and again when a move is made;
- sources_are_emptied: a worker that gives up a group gives up all of its groups, so fewer workers have a tail;
- no_worker_is_emptied_without_need: only as many workers are emptied as have slots for the completions that may start
  under the staleness bound. Tails that share a worker are slower, and the oldest missing completion limits the bound;
- a_completed_plan_is_followed_by_an_empty_one: after all moves are made there is nothing left to move.
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

PAYBACK = 16.0
"""A move must free this many times the worker time that its prefill costs, because expected lengths are uncertain."""
REPACK_EVERY_S = 1.0
"""Seconds between two plans: a plan is cheap, and a tail found one second later has cost only a second."""
KNEE = 2.0
"""Step time of the largest allowed tail batch, as a multiple of a single completion's. This is the roofline's knee:
beyond it steps grow nearly as fast as the batch, so completions that are added slow down the tail."""
PENDING_S = 30.0
"""Seconds to wait for the source of a move to release the group. If it does so later, the move is still made."""


@dataclass(frozen=True, slots=True)
class TailGroup:
    """The missing samples of a group: for each, expected tokens left and tokens in the worker's cache."""

    group_id: str
    left: tuple[int, ...]
    contexts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TailWorker:
    """A worker that ramps down. ``limit``: most completions that it may run as a tail; ``slots``: as a full batch."""

    worker_id: str
    version: PolicyVersion
    curve: DecodeCurve
    slots: int
    limit: int
    kv_tokens: int | None = None
    groups: tuple[TailGroup, ...] = ()

    @property
    def samples(self) -> int:
        """Completions that the worker runs."""
        return sum(len(group.left) for group in self.groups)

    @property
    def context(self) -> int:
        """Tokens in the worker's cache."""
        return sum(map(sum, (group.contexts for group in self.groups)))

    @property
    def longest(self) -> int:
        """Expected tokens left of the longest completion."""
        return max((left for group in self.groups for left in group.left), default=0)

    def with_all_of(self, other: "TailWorker") -> "TailWorker":
        """This worker with the other worker's groups added."""
        return replace(self, groups=self.groups + other.groups)

    @property
    def is_within_limits(self) -> bool:
        """Whether the worker may run all its completions to the end."""
        if self.samples > self.limit:
            return False
        # For each completion: the step at which it ends, and the step at which its context would have been empty.
        ends = [
            (left, -context) for group in self.groups for left, context in zip(group.left, group.contexts, strict=True)
        ]
        return self.kv_tokens is None or fits_cache(ends, self.kv_tokens)


@dataclass(frozen=True, slots=True)
class Move:
    """A group that is to continue on another worker."""

    group_id: str
    source: str
    target: str


def tail_limit(curve: DecodeCurve, slots: int) -> int:
    """The largest batch b, up to ``slots``, with t(b) ≤ ``KNEE`` × t(1)."""
    limit = 1
    while limit < slots and curve.batch_s(limit + 1) <= KNEE * curve.batch_s(1):
        limit += 1
    return limit


def is_worth_moving(source: TailWorker, packed: TailWorker, payback: float) -> bool:
    """Whether freeing the source's slots is worth ``payback`` times the cost of the move.

    The gain: without the move the source's empty slots stay empty until its longest completion ends. The cost: the
    prefill of all contexts, which stalls the target. Both are in worker seconds.
    """
    empty = max(0, source.slots - source.samples) / source.slots
    gain_s = source.longest * source.curve.batch_s(source.samples) * empty
    contexts = [context for group in source.groups for context in group.contexts]
    return gain_s >= payback * sum(map(packed.curve.prefill_s, contexts))


def repack(workers: Iterable[TailWorker], payback: float, room: float) -> tuple[Move, ...]:
    """The moves that leave as few workers as possible of each version with a tail.

    ``room``: completions that may start now; freeing more slots than that gains nothing. The worker with the smallest
    cache is emptied first, into the fullest other worker that has room for all of it: best fit, as in Laminar. This is
    repeated until nothing changes, so that a completed plan is followed by an empty one.
    """
    bins = {worker.worker_id: worker for worker in workers if worker.groups}
    place = {group.group_id: worker.worker_id for worker in bins.values() for group in worker.groups}
    origin = dict(place)
    while room > 0 and (found := _next_merge(bins.values(), payback)) is not None:
        source, packed = found
        room -= source.slots
        del bins[source.worker_id]
        bins[packed.worker_id] = packed
        place |= {group.group_id: packed.worker_id for group in source.groups}
    return tuple(Move(group, origin[group], place[group]) for group in sorted(place) if place[group] != origin[group])


def _next_merge(bins: Iterable[TailWorker], payback: float) -> tuple[TailWorker, TailWorker] | None:
    by_size = sorted(bins, key=lambda worker: (worker.context, worker.worker_id))
    for source in by_size:
        for target in reversed(by_size):  # the fullest first
            if target is source or target.version != source.version:
                continue
            packed = target.with_all_of(source)
            if packed.is_within_limits and is_worth_moving(source, packed, payback):
                return source, packed
    return None


@dataclass
class Repacker:
    """The moves in progress. Pure; times in seconds on the caller's clock.

    ``planned``: moves planned so far.
    """

    state: DispatchState
    payback: float = PAYBACK
    planned: int = 0
    _pending: dict[str, tuple[Move, float]] = field(default_factory=dict)
    _planned_at: float = float("-inf")

    def releases(self, now: float, time_of_day: float) -> list[ReleaseOrder]:
        """The groups that workers should release now."""
        self._forget_completed(now)
        # One plan at a time: a second plan would not see moves that are in progress.
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
            assert flight is not None, "planned moves are of groups in flight"
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
        """The planned target of a released group; None if the group may no longer go there.

        Since the plan was made, the target may have ended its tail, taken new prompts, or lost the room.
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
        packed = replace(tail, groups=tail.groups + tail_groups(self.state.missing_samples_of(flight)))
        return worker if packed.is_within_limits else None

    def _room(self) -> int:
        """Completions that a worker with the newest weights may start now under the staleness bound."""
        ledger = self.state.ledger
        return 0 if ledger.current is None else ledger.room(ledger.current) * self.state.loop.num_generations

    def _forget_completed(self, now: float) -> None:
        for group_id, (move, at) in list(self._pending.items()):
            flight = self.state.flights.get(group_id)
            is_over = flight is None or not flight.missing or flight.worker_id == move.target
            if is_over or now - at > PENDING_S:
                del self._pending[group_id]

    def _tail_of(self, heartbeat: Heartbeat, now: float) -> TailWorker | None:
        """The worker as the plan sees it; None unless it ramps down and can release orders."""
        # Only workers of the announced policy: versions of different policies cannot be compared.
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
    """The samples by group."""
    by_group: dict[str, list[HeldSample]] = {}
    for one in held:
        by_group.setdefault(one.sample[0], []).append(one)
    return tuple(
        TailGroup(group_id, tuple(one.left for one in samples), tuple(one.context for one in samples))
        for group_id, samples in by_group.items()
    )
