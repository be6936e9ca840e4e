"""What an operator's command, the run's end or a worker's leaving means for the control topic. Pure."""

from dataclasses import dataclass
from typing import Literal

from schemas.messages.control import OperatorCommand

FlowMode = Literal["run", "pause", "drain"]

_MODE_OF: dict[str, FlowMode] = {"pause": "pause", "resume": "run", "drain": "drain"}


@dataclass(frozen=True)
class FlowDecision:
    """Set the flow of everyone (``mode``), or let one worker leave (``drain_worker``)."""

    mode: FlowMode | None = None
    drain_worker: str | None = None
    reason: str = ""


def decide(command: OperatorCommand, current: FlowMode, finished: bool) -> FlowDecision | None:
    """The decision that a command leads to, or none: a finished or draining run cannot be paused or resumed."""
    if command.action == "drain_worker":
        return FlowDecision(drain_worker=command.worker_id, reason=command.reason) if command.worker_id else None
    mode = _MODE_OF[command.action]
    if finished or current == "drain" or mode == current:
        return None
    return FlowDecision(mode=mode, reason=command.reason)
