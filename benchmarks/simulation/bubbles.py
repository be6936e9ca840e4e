"""Where slots of the replicas are lost, and why: looked at every few seconds of virtual time."""

from typing import TYPE_CHECKING

from benchmarks.simulation.fleet import LINEAGE
from streamrl.schemas.identifiers import PolicyVersion

if TYPE_CHECKING:
    from benchmarks.simulation.world import World

KINDS = ("used", "not_admitted", "ramps_down", "free")
"""Slots that sample; free ones when admission allows no more under the bound of staleness; free ones of replicas that
will take new weights once they run nothing; and others."""


class Bubbles:
    """Of a world that is looked at every ``look_s`` of its system."""

    def __init__(self, world: "World") -> None:
        self._world = world
        if world.system.look_s:
            world.at(world.system.look_s, self._look)

    def _look(self) -> None:
        world, counts = self._world, self._world.outcome.slots
        world.at(world.now + world.system.look_s, self._look)
        room = world.ledger.room(PolicyVersion(LINEAGE, world.trained_version))
        for replica in world.replicas:
            used = min(len(replica.active), world.view.told_slots)
            counts["used"] += used
            free = world.view.told_slots - used
            # Whoever awaits weights could begin nothing either where admission allows no more.
            kind = "not_admitted" if not room else "ramps_down" if replica.number in world.view.awaiting else "free"
            counts[kind] += free
        counts["looks"] += 1
        counts["trainer_waits"] += world.station.free_at <= world.now
