"""Long completions of several replicas are put together, by the product's plan (``producers.dispatch.repack``)."""

from math import inf
from typing import TYPE_CHECKING

from benchmarks.simulation.fleet import LINEAGE
from benchmarks.simulation.replica import Completion, Replica
from streamrl.producers.dispatch.repack import TailGroup, TailWorker, repack, tail_limit
from streamrl.schemas.identifiers import PolicyVersion

if TYPE_CHECKING:
    from benchmarks.simulation.world import World


class Tails:
    """Asks for a plan and carries it out at once."""

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
        by_group: dict[str, tuple[list[int], list[int]]] = {}
        for one in (*replica.active, *away):
            made = replica.made_of(one) if one in replica.active else one.made
            left, contexts = by_group.setdefault(one.group.group_id, ([], []))
            left.append(max(1, one.expected - made) if one.expected > made else max(1, made // 2))
            contexts.append(one.prompt + made)
        groups = tuple(TailGroup(name, tuple(left), tuple(held)) for name, (left, held) in by_group.items())
        version = PolicyVersion(LINEAGE, replica.version)
        return TailWorker(
            replica.name, version, world.plant.curve, world.view.told_slots, self._limit, replica.kv_tokens, groups
        )
