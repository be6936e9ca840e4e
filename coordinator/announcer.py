"""The single writer of the control topic; numbers every message."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from schemas.messages.control import Control, DrainWorker, FlowControl, RunFinished, WeightsReady, control_key
from schemas.messages.reports import StepReport
from schemas.ports.bus import Outgoing, Publisher
from schemas.wire.topics import CONTROL

Kind = TypeVar("Kind", bound=Control)


@dataclass
class Announcer:
    """Publishes control messages; ``next_sequence`` goes on behind the largest one found on the topic."""

    publisher: Publisher
    run: str
    relays: tuple[str, ...]
    clock: Callable[[], float]
    next_sequence: int = 0

    async def weights_ready(self, report: StepReport) -> WeightsReady:
        """Announce the weights of a step."""
        return await self._announce(
            WeightsReady,
            version=report.version,
            step=report.step,
            manifest_sha256=report.manifest_sha256,
            relays=self.relays,
        )

    async def flow(self, mode: str, reason: str) -> FlowControl:
        """Let everyone run, pause or drain."""
        return await self._announce(FlowControl, mode=mode, reason=reason)

    async def drain_worker(self, worker_id: str, reason: str) -> DrainWorker:
        """Let one worker finish and leave."""
        return await self._announce(DrainWorker, worker_id=worker_id, reason=reason)

    async def run_finished(self, step: int, reason: str) -> RunFinished:
        """Tell everyone that the trainer has taken its last step."""
        return await self._announce(RunFinished, step=step, reason=reason)

    async def _announce(self, kind: type[Kind], **fields: Any) -> Kind:
        message = kind(sequence=self.next_sequence, sent_at=self.clock(), **fields)
        self.next_sequence += 1
        await self.publisher.publish(Outgoing.of(CONTROL.full_name(self.run), message, key=control_key(message)))
        return message
