"""Completions that leave their replica: for a tool, from where they come back; to others when it fails, as in Laminar's
figure 15; and with long ones of other replicas to few, by the product's plan (``producers.dispatch.repack``).
"""

from collections.abc import Sequence
from functools import partial
from math import inf
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.simulation.fleet import LINEAGE
from benchmarks.simulation.plant import Fault
from benchmarks.simulation.replica import Completion, Replica
from streamrl.producers.dispatch.progress import HeldSample
from streamrl.producers.dispatch.repack import TailWorker, repack, tail_groups, tail_limit
from streamrl.schemas.identifiers import PolicyVersion

if TYPE_CHECKING:
    from benchmarks.simulation.world import World


class Environment:
    """Who is away, whose, and what is left of each. A call gives slot and cache up, its context is prefilled again."""

    def __init__(self, world: "World", seed: int) -> None:
        self._world, self._tools = world, world.workload.tools
        self._random = np.random.default_rng([seed, 1])
        self._left: dict[Completion, list[tuple[float, int]]] = {}
        self._away: dict[int, dict[Completion, None]] = {}
        self._home: dict[Completion, Replica] = {}

    def away(self, replica: Replica) -> Sequence[Completion]:
        """Completions of a replica that wait for a tool."""
        return tuple(self._away.get(replica.number, ()))

    def cut(self, completions: Sequence[Completion]) -> None:
        """Draw their calls: how many, behind which token, and what each takes."""
        tools = self._tools
        if tools is None:
            return
        calls = np.minimum(self._random.geometric(1 / (1 + tools.mean_calls), len(completions)) - 1, tools.most_calls)
        waits = tools.seconds.quantile(self._random.random(int(calls.sum()))) / tools.per_s
        number = 0
        for completion, count in zip(completions, calls.tolist(), strict=True):
            cuts = sorted(self._random.integers(1, completion.length, count).tolist()) if completion.length > 1 else []
            ends = [*cuts, completion.length]
            wait_s = waits[number : number + len(cuts)].tolist()
            number += count
            if cuts:
                self._left[completion] = list(zip(wait_s, ends[1:], strict=True))[::-1]
                completion.length = ends[0]

    def takes(self, completion: Completion, replica: Replica) -> bool:
        """Whether what has ended is a turn, behind which a tool is called."""
        left = self._left.get(completion)
        if not left:
            self._left.pop(completion, None)
            return False
        wait_s, completion.length = left.pop()
        self._home[completion] = replica
        self._away.setdefault(replica.number, {})[completion] = None
        self._world.at(self._world.now + wait_s, partial(self._back, completion))
        return True

    def rehome(self, completion: Completion, source: Replica, target: Replica) -> None:
        """It comes back to another replica."""
        del self._away[source.number][completion]
        self._away.setdefault(target.number, {})[completion] = None
        self._home[completion] = target

    def _back(self, completion: Completion) -> None:
        replica = self._home.pop(completion)
        del self._away[replica.number][completion]
        replica.sync(self._world.now)
        replica.offer([completion])
        self._world.touch(replica)


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


class Tails:
    """Asks for a plan and carries it out at once; all that is known of a replica is known at once, too."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self._limit = world.system.tail_limit or tail_limit(world.plant.curve, world.view.told_slots)

    def tick(self) -> None:
        """Now, and again after as long as the system says."""
        self._world.at(self._world.now + self._world.system.repack_every_s, self.tick)
        self.repack()

    def repack(self) -> None:
        """Now."""
        world = self._world
        tails = [tail for replica in world.replicas if (tail := self._tail_of(replica)) is not None]
        if len(tails) < 2:
            return
        newest = PolicyVersion(LINEAGE, max(world.arrived))
        room = inf if world.system.dispatch == "batches" else world.ledger.room(newest) * world.workload.group
        moves = repack(tails, world.system.payback, room)
        moved = {move.group_id: move.target for move in moves}
        sources = sorted({move.source for move in moves})
        for name in sources:
            self._release(world.view.by_name[name], moved)
        world.released += len(sources)
        for name in sources:
            world.freed(world.view.by_name[name])

    def _release(self, source: Replica, moved: dict[str, str]) -> None:
        world = self._world
        source.sync(world.now)
        by_target: dict[str, list[Completion]] = {}
        for completion in list(source.active):
            by_target.setdefault(moved[completion.group.group_id], []).append(completion)
        for completion in world.tools.away(source):
            world.tools.rehome(completion, source, world.view.by_name[moved[completion.group.group_id]])
        for target, completions in by_target.items():
            replica = world.view.by_name[target]
            replica.sync(world.now)
            replica.offer(source.take(completions))
            world.moves += len(completions)
            world.touch(replica)
        world.touch(source)

    def _tail_of(self, replica: Replica) -> TailWorker | None:
        """A replica that ramps down, as the planner sees it: nothing waits, and few run."""
        world = self._world
        away = world.tools.away(replica)
        if replica.waiting or not (replica.active or away) or len(replica.active) + len(away) > self._limit:
            return None
        if world.system.adoption == "idle" and replica.number not in world.view.awaiting:
            return None
        if replica.context > world.system.full * replica.kv_tokens:
            return None
        held = []
        for number, one in enumerate((*replica.active, *away)):
            made = replica.made_of(one) if one in replica.active else one.made
            left = one.expected - made if one.expected > made else max(1, made // 2)
            held.append(HeldSample((one.group.group_id, number), left, one.prompt + made, is_running=True))
        limits = world.view.told_slots, self._limit, replica.kv_tokens
        version = PolicyVersion(LINEAGE, replica.version)
        return TailWorker(replica.name, version, world.plant.curve, *limits, tail_groups(held))
