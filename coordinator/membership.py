"""Who is there: workers alive, draining or lost, judged from heartbeats and an injected clock. Pure."""

from dataclasses import dataclass, field
from enum import StrEnum

from schemas.messages.reports import Heartbeat, WorkerState


class Standing(StrEnum):
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
    """Workers by id. A heartbeat of an older incarnation than the one known is ignored."""

    timeout_s: float
    members: dict[str, Member] = field(default_factory=dict)

    def observe(self, heartbeat: Heartbeat, now: float) -> Standing | None:
        """Note a heartbeat; the worker's new standing if it changed, else none."""
        before = self.standing(heartbeat.worker_id, now)
        known = self.members.get(heartbeat.worker_id)
        if known is not None and _is_older(heartbeat, known.heartbeat):
            return None
        self.members[heartbeat.worker_id] = Member(heartbeat, now)
        after = self.standing(heartbeat.worker_id, now)
        return after if after != before else None

    def standing(self, worker_id: str, now: float) -> Standing | None:
        """How a worker stands at a time, or none if it was never heard of."""
        member = self.members.get(worker_id)
        if member is None:
            return None
        if member.heartbeat.state is WorkerState.STOPPED:
            return Standing.LEFT
        if now - member.received_at > self.timeout_s:
            return Standing.LOST
        return Standing.DRAINING if member.heartbeat.state is WorkerState.DRAINING else Standing.ALIVE

    def with_standing(self, standing: Standing, now: float) -> list[str]:
        """Ids of the workers that stand so, sorted."""
        return sorted(worker for worker in self.members if self.standing(worker, now) is standing)

    def forget(self, worker_id: str) -> None:
        """Drop a worker that left or was lost."""
        self.members.pop(worker_id, None)


def _is_older(new: Heartbeat, known: Heartbeat) -> bool:
    if new.incarnation == known.incarnation:
        return new.sequence <= known.sequence
    return new.sent_at < known.sent_at
