"""Replicas that fail and are restored, as in Laminar's figure 15: what they had goes on elsewhere at once."""

from typing import TYPE_CHECKING

from benchmarks.simulation.plant import Fault
from benchmarks.simulation.replica import Completion, Replica

if TYPE_CHECKING:
    from benchmarks.simulation.world import World


def _deal(completions: list[Completion], replicas: list[Replica]) -> None:
    """A group stays together: it is what moves later."""
    by_group: dict[object, list[Completion]] = {}
    for completion in completions:
        by_group.setdefault(completion.group, []).append(completion)
    for position, members in enumerate(by_group.values()):
        replicas[position % len(replicas)].offer(members)


class Failing:
    """``down``: numbers of the replicas that are away now."""

    def __init__(self, world: "World", fault: Fault | None) -> None:
        self._world, self._fault = world, fault
        self.down: frozenset[int] = frozenset()
        self._orphans: list[Completion] = []
        if fault is not None:
            world.at(fault.at_s, self._fail)
            world.at(fault.at_s + fault.lasts_s, self._restore)
            for moment in fault.probes_s:
                world.at(moment, self._probe)

    def _fail(self) -> None:
        world = self._world
        assert self._fault is not None
        self.down = frozenset(range(self._fault.replicas))
        for number in self.down:
            replica = world.replicas[number]
            replica.sync(world.now)
            held = replica.take([*replica.active, *replica.waiting])
            world.touch(replica)
            # Its tokens are with the manager; whoever has the same weights goes on from the last one.
            alike = [one for one in world.replicas if one.number not in self.down and one.version == replica.version]
            if not alike:
                self._orphans += held
                continue
            for one in alike:
                one.sync(world.now)
            _deal(held, alike)
            for one in alike:
                world.touch(one)

    def _restore(self) -> None:
        world, numbers = self._world, sorted(self.down)
        self.down = frozenset()
        restored = [world.replicas[number] for number in numbers]
        for replica in restored:
            replica.sync(world.now)
        _deal(self._orphans, restored)
        self._orphans.clear()
        for replica in restored:
            world.touch(replica)
            world.freed(replica)

    def _probe(self) -> None:
        self._world.outcome.probes.append((self._world.now, sum(one.tokens for one in self._world.replicas)))
