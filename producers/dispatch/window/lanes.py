"""The prompts drawn and not sent yet: which worker shall sample which, in what order, and who takes from whom. Pure.

Invariants:
- every_prompt_dispatched_once: an item is in the pool, in one lane, or was taken; never in two places;
- no_slot_waits_for_a_queue_elsewhere: a worker with a free slot and an empty lane takes from the lane that would
  otherwise be the last to finish, unless the strategy is static.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from producers.dispatch.fleet.candidates import Candidate
from producers.dispatch.planning.plans import Item, Plan
from schemas.profiles.decode import DecodeCurve


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
