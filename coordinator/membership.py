"""Who is there: workers alive, draining or lost, and which incarnation holds each id. Pure; time is passed in.

Invariant the_newest_incarnation_holds_the_id: newest by the first heartbeat on the topic, whatever the clocks say; one
that was followed by another never gets the id back. So the topic's order alone decides, before and after a restart.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from streamrl.schemas.reports import Heartbeat, WorkerState


class Liveness(StrEnum):
    """How the coordinator sees a worker."""

    ALIVE = "alive"
    DRAINING = "draining"
    LOST = "lost"
    LEFT = "left"


@dataclass(frozen=True)
class Member:
    """The last heartbeat of a worker and when it was received, in seconds of the injected clock."""

    heartbeat: Heartbeat
    received_at: float


@dataclass
class Membership:
    """Workers by id. Heartbeats of an incarnation that was followed by another one of the same id are ignored."""

    timeout_s: float
    members: dict[str, Member] = field(default_factory=dict)
    _former: set[tuple[str, str]] = field(default_factory=set)

    def observe(self, heartbeat: Heartbeat, now: float) -> Liveness | None:
        """Note a heartbeat; the worker's new liveness if it changed, else none."""
        if self.is_former(heartbeat):
            return None
        worker = heartbeat.worker_id
        before, known = self.liveness(worker, now), self.members.get(worker)
        if known is not None and known.heartbeat.incarnation != heartbeat.incarnation:
            self._former.add((worker, known.heartbeat.incarnation))
        elif known is not None and heartbeat.sequence <= known.heartbeat.sequence:
            return None  # a repeat is no sign of life
        self.members[worker] = Member(heartbeat, now)
        after = self.liveness(worker, now)
        return after if after != before else None

    def is_former(self, heartbeat: Heartbeat) -> bool:
        """Whether another incarnation took over the id."""
        return (heartbeat.worker_id, heartbeat.incarnation) in self._former

    def holders(self) -> dict[str, str]:
        """The incarnation that holds each worker id, of those that have not left."""
        return {
            worker: member.heartbeat.incarnation
            for worker, member in self.members.items()
            if member.heartbeat.state is not WorkerState.STOPPED
        }

    def liveness(self, worker_id: str, now: float) -> Liveness | None:
        """The liveness of a worker at a time, or none if it was never heard of."""
        member = self.members.get(worker_id)
        if member is None:
            return None
        # Before the time-out: who said that it leaves is silent for good, and not lost.
        if member.heartbeat.state is WorkerState.STOPPED:
            return Liveness.LEFT
        if now - member.received_at > self.timeout_s:
            return Liveness.LOST
        return Liveness.DRAINING if member.heartbeat.state is WorkerState.DRAINING else Liveness.ALIVE

    def with_liveness(self, liveness: Liveness, now: float) -> list[str]:
        """Ids of the workers of that liveness, sorted."""
        return sorted(worker for worker in self.members if self.liveness(worker, now) is liveness)
