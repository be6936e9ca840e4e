"""Three brokers behind the simulated one: who leads what, who cannot reach whom, and whose disk is slow."""

from collections import defaultdict
from dataclasses import dataclass, field

import xxhash

from streamrl.bus.port import TopicPartition
from tests.simulation.processes import PROCESS

NODES = 3


@dataclass
class Network:
    """``cuts``: how many cuts there are between a role (empty: everybody) and a node; ``slow``: seconds more an append
    takes at a node.
    """

    cuts: defaultdict[tuple[str, int], int] = field(default_factory=lambda: defaultdict(int))
    slow: dict[int, float] = field(default_factory=dict)

    def cut(self, role: str, node: int) -> None:
        """They do not reach each other any more."""
        self.cuts[role, node] += 1

    def mend(self, role: str, node: int) -> None:
        """One cut less."""
        self.cuts[role, node] -= 1
        if not self.cuts[role, node]:
            del self.cuts[role, node]

    def reaches(self, role: str | None, node: int) -> bool:
        """Whether a role's process reaches a node; whoever belongs to no process reaches all."""
        return not self.cuts or role is None or not (self.cuts.get((role, node)) or self.cuts.get(("", node)))

    def reaches_leader(self, role: str | None, tp: TopicPartition) -> bool:
        """Whether it reaches the leader of a partition."""
        return not self.cuts or self.reaches(role, leader_of(tp))

    def append_s(self, tp: TopicPartition) -> float:
        """Seconds that an append takes on top of the usual."""
        return self.slow.get(leader_of(tp), 0.0) if self.slow else 0.0


def leader_of(tp: TopicPartition) -> int:
    """The node that leads a partition."""
    return xxhash.xxh32_intdigest(f"{tp.topic}/{tp.partition}".encode()) % NODES


def coordinator_of(transactional_id: str) -> int:
    """The node that coordinates the transactions of an id."""
    return xxhash.xxh32_intdigest(transactional_id.encode()) % NODES


def calling_role() -> str | None:
    """Of the process that runs now; none outside of all."""
    process = PROCESS.get()
    return None if process is None else process.role
