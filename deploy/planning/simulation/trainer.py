"""The trainer of the simulation: groups in, oldest first; micro-batches as the real one cuts them; then a step."""

import heapq
import math
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from consumers.batching.costs import CostModel, Lengths
from consumers.batching.packing import Run, best_run, cheapest_runs
from deploy.planning.simulation.clockwork import Clockwork
from deploy.planning.simulation.work import Plant, Work


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

    def _taken(self, run: Run) -> float:
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
