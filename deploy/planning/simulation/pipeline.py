"""Runs a plant: dispatcher, workers and trainer wired together, for some optimizer steps."""

from dataclasses import dataclass, field
from functools import partial

from deploy.planning.simulation.clockwork import Clockwork
from deploy.planning.simulation.dispatching import SimulatedDispatcher
from deploy.planning.simulation.trainer import SimulatedTrainer, Step
from deploy.planning.simulation.work import Plant, Supply, Work
from deploy.planning.simulation.worker import SimulatedWorker


@dataclass(frozen=True)
class Trace:
    """What happened: steps in order, and per step the worker-seconds, slot-seconds and idle worker-seconds so far."""

    steps: tuple[Step, ...]
    slot_seconds: tuple[float, ...]
    idle_seconds: tuple[float, ...]


@dataclass
class _Group:
    order: int
    missing: int
    oldest: int = 1 << 60


@dataclass
class Pipeline:
    """One simulation; ``run`` it once."""

    plant: Plant
    supply: Supply
    clock: Clockwork = field(default_factory=Clockwork)
    _groups: dict[str, _Group] = field(default_factory=dict)
    _steps: list[Step] = field(default_factory=list)
    _slot_seconds: list[float] = field(default_factory=list)
    _idle_seconds: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._dispatcher = SimulatedDispatcher(self.plant, self.clock, self.supply, self._order)
        self._trainer = SimulatedTrainer(self.plant, self.clock, self._stepped)
        self._workers = [
            SimulatedWorker(number, self.plant, self.clock, self._finished, self._adopted)
            for number in range(self.plant.workers)
        ]

    def run(self) -> Trace:
        """Until the plant's number of steps is taken, or nothing happens any more."""
        self._announce(0, ())
        self.clock.run_until(lambda: len(self._steps) >= self.plant.steps)
        return Trace(tuple(self._steps), tuple(self._slot_seconds), tuple(self._idle_seconds))

    def _order(self, worker: int, work: Work, order: int) -> None:
        self._groups[work.group_id] = _Group(order, len(work.lengths))
        self._workers[worker].take(work)

    def _finished(self, worker: int, work: Work, sample_index: int, versions: tuple[int, int]) -> None:
        group = self._groups[work.group_id]
        group.missing -= 1
        group.oldest = min(group.oldest, versions[0])
        latency = self.plant.latencies.sample_s
        told = partial(self._dispatcher.finished, worker, work, sample_index, versions[1])
        self.clock.after(latency, told)
        if not group.missing:
            del self._groups[work.group_id]
            self.clock.after(latency, partial(self._trainer.ready, group.order, work, group.oldest))

    def _stepped(self, step: Step) -> None:
        for worker in self._workers:
            worker.reckon()
        self._steps.append(step)
        self._slot_seconds.append(sum(worker.slot_seconds for worker in self._workers))
        self._idle_seconds.append(sum(worker.idle_seconds for worker in self._workers))
        self._announce(step.number, tuple(work.group_id for work in step.groups))

    def _announce(self, version: int, groups: tuple[str, ...]) -> None:
        latencies = self.plant.latencies
        self.clock.after(latencies.report_s, partial(self._dispatcher.stepped, version, groups))
        for worker in self._workers:
            self.clock.after(latencies.announce_s, partial(worker.adopt, version))

    def _adopted(self, worker: int, version: int) -> None:
        self.clock.after(self.plant.latencies.adopted_s, partial(self._dispatcher.adopted, worker, version))
