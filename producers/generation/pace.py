"""How often a worker reports, and how much it holds back: follows from the loop, and is no setting of its own."""

from dataclasses import dataclass

from streamrl.schemas.settings import LoopSettings

CHUNK_TOKENS = 32
"""Tokens of a completion that an engine gathers before the worker gets them: each hand-over wakes the worker."""
LOST_SHARE = 1 / 16
"""Share of the longest completion that a lost worker may cost each of its completions, if others can continue them."""


@dataclass(frozen=True, slots=True)
class WorkerPace:
    """A worker's times in seconds, and its amounts.

    ``heartbeat_interval_s``: between two heartbeats. ``fencing_timeout_s``: a worker that was suspended for longer
    checks whether another has replaced it before it publishes. ``partial_chunk_tokens``: new tokens after which an
    unfinished completion is written, if others may continue it; fewer are written after ``partial_chunk_s``.
    ``drain_grace_s``: after SIGTERM, time for running completions to end. ``max_undelivered``: undelivered completions
    at which no new one starts.
    """

    heartbeat_interval_s: float
    fencing_timeout_s: float
    partial_chunk_tokens: int
    partial_chunk_s: float = 2.0
    drain_grace_s: float = 10.0
    max_undelivered: int = 256

    @property
    def durable_chunk_tokens(self) -> int:
        """Tokens that the engine gathers at most, so that chunks can be written in time."""
        return min(CHUNK_TOKENS, self.partial_chunk_tokens)


def pace_of(loop: LoopSettings) -> WorkerPace:
    """The pace of a run's workers."""
    return WorkerPace(
        # Several heartbeats may be lost before the worker counts as lost, and a suspended worker checks before it does.
        heartbeat_interval_s=min(1.0, loop.heartbeat_timeout_s / 8),
        fencing_timeout_s=min(5.0, loop.heartbeat_timeout_s * 5 / 8),
        partial_chunk_tokens=min(256, max(1, int(loop.max_completion_length * LOST_SHARE))),
    )
