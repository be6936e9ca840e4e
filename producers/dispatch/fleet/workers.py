"""The workers as their heartbeats show them. Pure: time is always an argument, in seconds."""

from dataclasses import dataclass

from schemas.messages.reports import Heartbeat, WorkerState

IDLE_LEASES = 3
"""A worker that reports nothing to do for so many leases no longer has an order sent before."""


@dataclass(slots=True)
class _Seen:
    heartbeat: Heartbeat
    first_at: float
    at: float
    idle_since: float | None


class Fleet:
    """Who is there, since when, and with which weights. A restarted worker is a new incarnation of its id."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._seen: dict[str, _Seen] = {}
        self._former: set[tuple[str, str]] = set()

    def observe(self, heartbeat: Heartbeat, at: float) -> None:
        """Note a heartbeat; those of an incarnation that was followed by another are ignored."""
        worker, incarnation = heartbeat.worker_id, heartbeat.incarnation
        if (worker, incarnation) in self._former:
            return
        seen = self._seen.get(worker)
        if seen is not None and seen.heartbeat.incarnation != incarnation:
            self._former.add((worker, seen.heartbeat.incarnation))
            seen = None
        idle = heartbeat.running == 0 and heartbeat.waiting == 0
        idle_since = at if seen is None or seen.idle_since is None else seen.idle_since
        first_at = at if seen is None else seen.first_at
        self._seen[worker] = _Seen(heartbeat, first_at, at, idle_since if idle else None)

    def extend_leases(self, seconds: float) -> None:
        """We did not listen for so long; nobody is to blame for the silence."""
        for seen in self._seen.values():
            seen.at += seconds

    def ready(self, now: float) -> list[Heartbeat]:
        """Last heartbeats of the workers that take new orders."""
        return [
            seen.heartbeat
            for seen in self._seen.values()
            if seen.heartbeat.state is WorkerState.READY and self._is_alive(seen, now)
        ]

    def get(self, worker_id: str) -> Heartbeat | None:
        """The worker's last heartbeat."""
        seen = self._seen.get(worker_id)
        return seen.heartbeat if seen is not None else None

    def incarnation_at(self, worker_id: str, at: float) -> str | None:
        """The worker's present incarnation, if it was there at that time already."""
        seen = self._seen.get(worker_id)
        return seen.heartbeat.incarnation if seen is not None and seen.first_at <= at else None

    def has(self, worker_id: str, incarnation: str | None, sent_at: float, now: float) -> bool:
        """Whether an order sent then to that incarnation can still be worked on."""
        seen = self._seen.get(worker_id)
        if seen is None or seen.heartbeat.incarnation != incarnation or not self._is_alive(seen, now):
            return False
        return seen.idle_since is None or now - max(seen.idle_since, sent_at) <= IDLE_LEASES * self._lease_s

    def _is_alive(self, seen: _Seen, now: float) -> bool:
        return seen.heartbeat.state is not WorkerState.STOPPED and now - seen.at <= self._lease_s
