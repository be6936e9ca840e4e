"""Messages the coordinator reads, with only what differs spelled out."""

from typing import Any

from streamrl.schemas.messages import WIRE_VERSION
from streamrl.schemas.reports import Heartbeat, RelayBeat, StepReport, WorkerState
from tests.fakes import messages


def step_report(lineage: int = 1, number: int = 0, **changes: Any) -> StepReport:
    """With weights, whose digest names the number."""
    return messages.step_report(lineage, number, **{"manifest_sha256": f"{number:064x}"} | changes)


def heartbeat(
    worker: str = "w0", *, incarnation: str = "a", sequence: int = 0, state: str = "ready", sent_at: float = 0.0
) -> Heartbeat:
    return messages.heartbeat(
        worker, incarnation=incarnation, state=WorkerState(state), sequence=sequence, sent_at=sent_at
    )


def relay_beat(name: str = "r1", *, sequence: int = 0, **changes: Any) -> RelayBeat:
    """Of a relay at ``http://NAME:1``, on a host of its own name."""
    fields = {"address": f"http://{name}:1", "host": name, "incarnation": "a", "wire": WIRE_VERSION, "sent_at": 0.0}
    return RelayBeat.model_validate({"relay_id": name, "sequence": sequence, **fields, **changes})
