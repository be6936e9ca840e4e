"""A strategy's plan for a whole batch, to the letter, when all replicas are idle and have the newest weights."""

from collections.abc import Iterator
from functools import partial
from math import inf
from typing import TYPE_CHECKING

from benchmarks.simulation.fleet import LINEAGE
from benchmarks.simulation.replica import Completion
from benchmarks.simulation.trainer import Group
from streamrl.producers.dispatch.plans import Item, Objective, Strategy, WorkerCapacity
from streamrl.producers.dispatch.strategies import STRATEGIES, skewness_aware
from streamrl.schemas.identifiers import PolicyVersion

if TYPE_CHECKING:
    from benchmarks.simulation.world import World


class PlannedBatches:
    """Of a world whose replicas begin together."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self._is_syncing = False
        self._generating_until = self._control_at = 0.0
        self._missing = 0

    def begin(self) -> None:
        """A batch, if the one before has ended, admission is open and all have the newest weights."""
        world = self._world
        if self._is_syncing or world.now < self._generating_until:
            return
        version = PolicyVersion(LINEAGE, world.trained_version)
        if world.ledger.room(version) < world.workload.groups:
            return
        if world.replicas[0].version < world.trained_version:
            self._is_syncing = True
            world.at(world.now + world.plant.sync_s, self._synced)
            return
        groups = world.draw(world.workload.groups)
        for group in groups:
            world.admit(group, world.replicas[0].version)
        self._place([one for group in groups for one in group.samples])

    def _place(self, samples: list[Completion]) -> None:
        world = self._world
        items = [Item(key, one.expected, 1, one.expected, one.prompt) for key, one in enumerate(samples)]
        slots, curve = world.plant.slots, world.plant.curve
        workers = [WorkerCapacity(replica.name, slots, curve=curve) for replica in world.replicas]
        plan = self._strategy()(items, workers)
        for replica, share in zip(world.replicas, plan.shares, strict=True):
            replica.sync(world.now)
            replica.concurrency = share.concurrency
            replica.offer(samples[item.key] for item in share.items)
        if world.workload.tools is not None:
            self._missing, self._generating_until = len(samples), inf
            for replica in world.replicas:
                world.touch(replica)
            return
        for replica in world.replicas:
            # Nothing comes in between, so each goes on to its end at once.
            world.outcome.events += len(replica.run_out())
        for at, group in self._passed(samples):
            world.at(at, partial(world.group_ended, group))
        self._generating_until = max(world.now, *(replica.at for replica in world.replicas))
        world.at(self._generating_until, self.begin)

    def ended(self, completion: Completion) -> None:
        """One of a batch whose completions leave for an environment and come back ended."""
        world, group = self._world, completion.group
        self._missing -= 1
        group.missing -= 1
        self._control_at = max(self._control_at, world.now) + self._control_s(completion)
        if not group.missing:
            world.at(self._control_at, partial(world.group_ended, group))
        if not self._missing:
            self._generating_until = world.now
            world.at(world.now, self.begin)

    def _control_s(self, completion: Completion) -> float:
        return self._world.plant.control_s_per_token * (completion.prompt + completion.length)

    def _passed(self, samples: list[Completion]) -> Iterator[tuple[float, Group]]:
        """When each group is with the trainer: its samples pass one process, in the order in which they end."""
        through: dict[Group, float] = {}
        at = self._control_at
        for one in sorted(samples, key=Completion.end):
            at = max(at, one.end()) + self._control_s(one)
            through[one.group] = at
        self._control_at = at
        for group, when in through.items():
            yield when, group

    def _strategy(self) -> Strategy:
        world = self._world
        strategy = STRATEGIES[world.system.strategy]
        if strategy is not skewness_aware or world.system.trains == "batch":
            return strategy
        pace = world.view.trainer
        return partial(skewness_aware, objective=Objective(pace.s_per_token, pace.free_in_s(world.now)))

    def _synced(self) -> None:
        world = self._world
        self._is_syncing = False
        # The trainer takes part, and what it has to do comes later by as much.
        world.station.free_at = max(world.station.free_at, world.now)
        for replica in world.replicas:
            replica.version = world.trained_version
        self.begin()
