"""What a worker says of itself, with only what differs spelled out."""

from typing import Any

from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.reports import Heartbeat, WorkerState


def heartbeat(worker: str = "w0", **changes: Any) -> Heartbeat:
    """Of a worker that is ready and runs nothing, but for the changes."""
    return Heartbeat(
        worker_id=worker,
        incarnation="a",
        state=WorkerState.READY,
        engine="fake",
        version=PolicyVersion(1, 0),
        capacity=8,
        running=0,
        waiting=0,
        generated_tokens=0,
        finished_trajectories=0,
        tokens_per_s=0.0,
        sequence=0,
        sent_at=0.0,
    ).replace(**changes)
