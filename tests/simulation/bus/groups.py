"""A member of a consumer group on the simulated bus: who is not heard of for a session's length loses its share."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from streamrl.bus.port import TopicPartition
from streamrl.schemas.errors import BusError

if TYPE_CHECKING:
    from tests.simulation.bus.sim_bus import SimBus

SESSION_S = 3.0


@dataclass(eq=False)
class SimGroup:
    """As the coordinator sees it. ``members``: in the order in which they joined."""

    partitions: list[TopicPartition]
    members: "list[SimGroupMember]" = field(default_factory=list)

    def share_of(self, member: "SimGroupMember", now: float) -> frozenset[TopicPartition]:
        """What is a member's, once those that are silent are out of it."""
        self.members = [each for each in self.members if now - each.heard_at <= SESSION_S]
        if member not in self.members:
            return frozenset()
        number, count = self.members.index(member), len(self.members)
        return frozenset(self.partitions[number::count])


@dataclass(eq=False)
class SimGroupMember:
    """``bus.port.GroupMember``. It is heard of when it asks for its share, and joins again if it was taken for dead."""

    bus: "SimBus"
    name: str
    group_id: str
    group: SimGroup
    heard_at: float = 0.0
    closed: bool = False

    async def partitions(self) -> frozenset[TopicPartition]:
        """Its share at present."""
        self._check_open()
        await self.bus.connected("a share of a group")
        self.heard_at = self.bus.clock()
        if self not in self.group.members:
            self.group.members.append(self)
        return self.group.share_of(self, self.heard_at)

    async def commit(self, offsets: Mapping[TopicPartition, int]) -> None:
        """Note how far the work is done, unless the share is another's by now."""
        self._check_open()
        await self.bus.connected("a commit of a group")
        if not offsets.keys() <= self.group.share_of(self, self.bus.clock()):
            raise BusError(f"expected offsets of its own partitions from {self.name}, got {sorted(offsets)}")
        self.bus.events.add("group commit", self.name, tuple(sorted(offsets.items())))
        self.bus.broker.committed.update({(self.group_id, tp): offset for tp, offset in offsets.items()})

    async def close(self) -> None:
        """Leave, if the broker hears it."""
        self.closed = True
        if self in self.group.members:
            self.group.members.remove(self)

    def _check_open(self) -> None:
        self.bus.check_caller()
        if self.closed:
            raise BusError(f"a member of {self.group_id} that left asks for its share; join again")
