"""Which workers are alive, draining or lost, and which incarnation holds each id. Pure; time is passed in."""

from enum import StrEnum

from streamrl.schemas.liveness import LastBeats
from streamrl.schemas.reports import Heartbeat, WorkerState


class Liveness(StrEnum):
    """How the coordinator sees a worker."""

    ALIVE = "alive"
    DRAINING = "draining"
    LOST = "lost"
    LEFT = "left"


class Membership(LastBeats[Heartbeat]):
    """Workers by id; see ``schemas/liveness.py``."""

    def hear(self, heartbeat: Heartbeat, now: float) -> Liveness | None:
        """Note a heartbeat; the worker's new liveness if it changed, else none."""
        before = self.liveness(heartbeat.worker_id, now)
        if not self.observe(heartbeat.worker_id, heartbeat, now):
            return None
        after = self.liveness(heartbeat.worker_id, now)
        return after if after != before else None

    def holders(self) -> dict[str, str]:
        """The incarnation that holds each worker id, of those that have not left."""
        return {worker: beat.incarnation for worker, beat in self if beat.state is not WorkerState.STOPPED}

    def liveness(self, worker_id: str, now: float) -> Liveness | None:
        """The liveness of a worker at a time, or none if it was never heard of."""
        beat = self.get(worker_id)
        if beat is None:
            return None
        # Before the time-out: a worker that said that it leaves is silent for good, and not lost.
        if beat.state is WorkerState.STOPPED:
            return Liveness.LEFT
        if self.is_silent(worker_id, now):
            return Liveness.LOST
        return Liveness.DRAINING if beat.state is WorkerState.DRAINING else Liveness.ALIVE

    def with_liveness(self, liveness: Liveness, now: float) -> list[str]:
        """Ids of the workers of that liveness, sorted."""
        return sorted(worker for worker, _ in self if self.liveness(worker, now) is liveness)
