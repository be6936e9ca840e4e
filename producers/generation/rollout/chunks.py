"""Publishes tokens as they are sampled, at most once: a slow or absent broker costs chunks, never time."""

from asyncio import Future
from dataclasses import dataclass

from schemas.errors import BusError
from schemas.messages.trajectories import TokenChunk
from schemas.ports.bus import Outgoing, Position, Publisher
from schemas.ports.engine import TokenDelta

MAX_PENDING = 1000


@dataclass
class TokenStream:
    """Writes one ``TokenChunk`` per delta, keyed by trajectory id."""

    publisher: Publisher
    topic: str
    worker_id: str
    dropped: int = 0
    _pending: int = 0

    async def send(self, trajectory_id: str, start: int, delta: TokenDelta) -> None:
        """Publish a delta whose first token is the completion's ``start``-th; drops it when the broker is behind."""
        if self._pending >= MAX_PENDING:
            self.dropped += 1
            return
        chunk = TokenChunk(
            trajectory_id=trajectory_id,
            worker_id=self.worker_id,
            start=start,
            version=delta.version,
            token_ids=delta.token_ids,
            logprobs=delta.logprobs,
            finish_reason=delta.finish_reason,
        )
        try:
            sent = await self.publisher.submit(Outgoing.of(self.topic, chunk, key=trajectory_id))
        except BusError:
            self.dropped += 1
            return
        self._pending += 1
        sent.add_done_callback(self._settle)

    def _settle(self, sent: "Future[Position]") -> None:
        self._pending -= 1
        if sent.cancelled() or sent.exception() is not None:
            self.dropped += 1
