"""The prompts drawn and not sent yet: which worker shall sample which, in what order, and who takes from whom. Pure.

Invariants:
- every_prompt_dispatched_once: an item is in the pool, in one lane, or was taken; never in two places;
- no_slot_waits_for_a_queue_elsewhere: a worker with a free slot and an empty lane takes from the lane that would
  otherwise be the last to finish, unless the strategy is static.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from producers.dispatch.fleet import Candidate, Flight
from producers.dispatch.plans import Item, Plan
from producers.lengths.predictor import LengthPredictor
from producers.prompts.entries import PromptSource
from schemas.identifiers import make_group_id
from schemas.profiles import DecodeCurve
from schemas.settings import LoopSettings
from schemas.trajectories import LengthEstimate, Prompt, SamplingParams, WorkOrder

# Which prompt comes next, after a crash too. Pure. The prompts of a window leave in the order of a plan, and no later
# window is drawn before all of them are sent. A window has at most groups_per_step prompts; so whatever was drawn and
# not sent lies within so many positions below the cursor.


@dataclass
class Positions:
    """``cursor``: every position below it was drawn; ``holes``: those below it that must be sent before any other.

    ``ordered``: names of groups for which there was an order once, as far as that is known without the order.
    """

    window: int
    cursor: int = 0
    holes: list[int] = field(default_factory=list)
    ordered: frozenset[str] = frozenset()
    _seen: set[int] = field(default_factory=set)

    def see(self, position: int) -> None:
        """There was an order for this position."""
        self.pass_to(position + 1)
        self._seen.add(position)
        if len(self._seen) > 4 * self.window:
            self._forget()

    def pass_to(self, cursor: int) -> None:
        """Every position below was drawn."""
        self.cursor = max(self.cursor, cursor)

    def find_holes(self, ordered: Iterable[str]) -> None:
        """After a restart: what a window of the last life may have left unsent."""
        self._forget()
        self.holes = [n for n in range(max(0, self.cursor - self.window), self.cursor) if n not in self._seen]
        self.ordered = frozenset(ordered) if self.holes else frozenset()
        self._seen.clear()

    def next(self, count: int) -> list[int]:
        """The next positions, holes before all others; they count as drawn."""
        count = min(count, self.window)
        found, self.holes = self.holes[:count], self.holes[count:]
        if not found:
            found = list(range(self.cursor, self.cursor + count))
            self.cursor += count
        return found

    def upcoming(self, count: int) -> list[int]:
        """What ``next`` would return behind the holes, and goes on returning."""
        return list(range(self.cursor, self.cursor + count))

    def _forget(self) -> None:
        self._seen = {n for n in self._seen if n >= self.cursor - self.window}


# Draws prompts and has their lengths estimated. Where that is slow it is done ahead, so that no slot waits for it.

SLICE = 64
"""Prompts drawn between two chances for others to run."""
SLOW_S = 0.1
"""A window that takes longer to draw is drawn ahead; and as long may it take to bring estimates up to date."""


@dataclass(frozen=True, slots=True)
class Draft:
    """A prompt that is not ordered yet."""

    position: int
    prompt: Prompt
    group_id: str
    estimate: LengthEstimate


@dataclass
class Drafts:
    """Drafts from a source and a predictor. ``on_tick`` is called once a slice."""

    source: PromptSource
    predictor: LengthPredictor
    clock: Callable[[], float]
    on_tick: Callable[[], None]
    _ahead: dict[int, Draft] = field(default_factory=dict)
    _draft_s: float = 0.0

    async def draw(self, positions: Sequence[int]) -> list[Draft]:
        """The prompts at these positions, with estimates of now; those drawn ahead may keep an older one."""
        await self._read([position for position in positions if position not in self._ahead])
        drafts = [self._ahead.pop(position) for position in positions]
        began = self.clock()
        for number, draft in enumerate(drafts):
            if self.clock() - began > SLOW_S:
                break
            drafts[number] = replace(draft, estimate=self.predictor.predict(draft.prompt, draft.group_id))
        return drafts

    def is_slow(self, count: int) -> bool:
        """Whether so many prompts should be drawn ahead."""
        return self._draft_s * count > SLOW_S

    async def prepare(self, positions: Sequence[int]) -> bool:
        """Draw a slice of these ahead; true if there are more."""
        missing = [position for position in positions if position not in self._ahead]
        await self._read(missing[:SLICE])
        return len(missing) > SLICE

    async def _read(self, positions: Sequence[int]) -> None:
        for start in range(0, len(positions), SLICE):
            part, began = positions[start : start + SLICE], self.clock()
            found = await asyncio.to_thread(self._prompts, part)
            for position, (prompt, data_pass) in zip(part, found, strict=True):
                group_id = make_group_id(prompt.prompt_id, data_pass)
                self._ahead[position] = Draft(position, prompt, group_id, self.predictor.predict(prompt, group_id))
            self._draft_s = max(0.0, self.clock() - began) / len(part)
            self.on_tick()

    def _prompts(self, positions: Sequence[int]) -> list[tuple[Prompt, int]]:
        return [self.source.prompt_at(position) for position in positions]


# Holds the predicted finish of each window against the actual one, for logs and displays. Pure; times in seconds.


@dataclass(slots=True)
class _Window:
    began_at: float
    predicted_s: float
    missing: int


class Outcomes:
    """``predicted_s`` and ``actual_s``: of the window that ended last; none before the first."""

    def __init__(self) -> None:
        self._window_of: dict[str, _Window] = {}
        self._newest: _Window | None = None
        self.predicted_s: float | None = None
        self.actual_s: float | None = None

    def begin(self, groups: Iterable[str], now: float) -> None:
        """A window of these groups was drawn; its plan follows."""
        names = list(groups)
        self._newest = _Window(now, 0.0, len(names))
        self._window_of.update(dict.fromkeys(names, self._newest))

    def planned(self, predicted_s: float) -> None:
        """What the first plan of the newest window says; later ones know more, and are no prediction."""
        if self._newest is not None and not self._newest.predicted_s:
            self._newest.predicted_s = predicted_s

    def over(self, group_id: str, now: float) -> None:
        """Nothing is missing of a group any more."""
        window = self._window_of.pop(group_id, None)
        if window is not None:
            window.missing -= 1
            if not window.missing:
                self.predicted_s, self.actual_s = window.predicted_s, now - window.began_at


@dataclass(slots=True)
class OpenLane:
    """What is left of a worker's share of the plan."""

    worker_id: str
    concurrency: int
    is_reduced: bool
    queue: deque[Item]
    tokens: int

    def has_room(self, worker: Candidate, samples: int, overcommit: float) -> bool:
        """Whether the worker may be sent so many samples now; only where all slots are to be busy, some ahead."""
        if self.is_reduced:
            return worker.has_room_within(samples, self.concurrency)
        return worker.has_room(samples, overcommit)


class Lanes:
    """``pool``: items that no worker shall sample yet. ``outstanding``: expected tokens that a worker holds already."""

    def __init__(
        self, curve: DecodeCurve, overcommit: float, outstanding: Callable[[str], int], *, is_static: bool
    ) -> None:
        self._curve = curve
        self._overcommit = overcommit
        self._outstanding = outstanding
        self._is_static = is_static
        self._lanes: dict[str, OpenLane] = {}
        self._turn = 0
        self.pool: list[Item] = []
        self.stolen = 0

    def __len__(self) -> int:
        return len(self.pool) + sum(len(lane.queue) for lane in self._lanes.values())

    def __iter__(self) -> Iterator[OpenLane]:
        return iter(self._lanes.values())

    def get(self, worker_id: str) -> OpenLane | None:
        """A worker's lane, if the plan has one for it."""
        return self._lanes.get(worker_id)

    def add(self, items: Iterable[Item]) -> None:
        """New items, with no worker yet."""
        self.pool.extend(items)

    def release(self, worker_id: str) -> None:
        """The worker takes nothing more; what it was not sent is for others."""
        lane = self._lanes.pop(worker_id, None)
        if lane is not None:
            self.pool.extend(lane.queue)

    def unsent(self) -> list[Item]:
        """All items, in the order of their prompts."""
        return sorted(
            (*self.pool, *(item for lane in self._lanes.values() for item in lane.queue)), key=lambda item: item.key
        )

    def adopt(self, plan: Plan) -> None:
        """Follow this plan for all items from now on."""
        self.pool = []
        self._lanes = {
            lane.worker.worker_id: OpenLane(
                lane.worker.worker_id,
                lane.concurrency,
                lane.is_reduced,
                deque(lane.items),
                sum(item.load for item in lane.items),
            )
            for lane in plan.lanes
        }

    def next(self, workers: Sequence[Candidate]) -> tuple[Item, Candidate] | None:
        """The next item to send and the worker for it, of those that may take one now; none if none has room.

        Workers take turns; one whose lane is empty takes from another's.
        """
        idle = []
        for step in range(len(workers)):
            worker = workers[(self._turn + step) % len(workers)]
            lane = self._lanes.get(worker.worker_id)
            if lane is None:
                continue
            if not lane.queue:
                idle.append((worker, lane))
            elif lane.has_room(worker, lane.queue[0].samples, self._overcommit):
                self._turn += step + 1
                return self._take(lane, 0), worker
        for worker, lane in () if self._is_static else idle:
            if (item := self._stolen_for(worker, lane)) is not None:
                return item, worker
        return None

    def _stolen_for(self, worker: Candidate, lane: OpenLane) -> Item | None:
        """The longest waiting item that ends sooner here; for a free slot only, unless the other lane has plenty."""
        victim = max((other for other in self._lanes.values() if other.queue), key=self._busy_s, default=None)
        if victim is None:
            return None
        ahead = self._overcommit if len(victim.queue) > victim.concurrency else 1.0
        if not lane.has_room(worker, victim.queue[0].samples, ahead):
            return None
        within, step_s = self._busy_s(victim), self._curve.batch_s(lane.concurrency)
        fits = (number for number, item in enumerate(victim.queue) if item.longest * step_s <= within)
        self.stolen += 1
        return self._take(victim, next(fits, len(victim.queue) - 1))

    def _busy_s(self, lane: OpenLane) -> float:
        tokens = lane.tokens + self._outstanding(lane.worker_id)
        return tokens * self._curve.batch_s(lane.concurrency) / lane.concurrency

    @staticmethod
    def _take(lane: OpenLane, number: int) -> Item:
        item = lane.queue[number]
        del lane.queue[number]
        lane.tokens -= item.load
        return item


# Writes work orders: the first one for a prompt, and one for what is missing of a group.


@dataclass(frozen=True)
class OrderForm:
    """``seed``: what the random numbers of all samples are drawn from; none leaves that to the engines."""

    loop: LoopSettings
    seed: int | None

    def first(self, draft: Draft, worker: Candidate, created_at: float, due_step: int) -> WorkOrder:
        """All samples of a prompt."""
        return WorkOrder(
            group_id=draft.group_id,
            worker_id=worker.worker_id,
            position=draft.position,
            prompt=draft.prompt,
            estimate=draft.estimate,
            sampling=SamplingParams(
                max_completion_length=self.loop.max_completion_length,
                temperature=self.loop.temperature,
                top_p=self.loop.top_p,
                top_k=self.loop.top_k,
                seed=self.seed,
            ),
            num_generations=self.loop.num_generations,
            sample_indices=tuple(range(self.loop.num_generations)),
            partition=self.loop.partition_of(draft.estimate.bucket, draft.position),
            due_step=due_step,
            admitted_version=worker.version,
            created_at=created_at,
        )

    @staticmethod
    def again(flight: Flight, worker: Candidate) -> WorkOrder:
        """The same group, partition and age, so that consumers see one group; only what is missing of it."""
        return flight.order.replace(
            worker_id=worker.worker_id,
            sample_indices=tuple(sorted(flight.missing)),
            attempt=flight.order.attempt + 1,
            admitted_version=worker.version,
        )
