"""An engine that tells a worker's story when tokens came and weights were taken up. Changes nothing of them."""

from collections.abc import AsyncIterator
from pathlib import Path

from observability.tracing.role_tracers import WorkerStory
from producers.generation.engines.port import Engine, GenerationRequest, TokenDelta
from schemas.identifiers import PolicyVersion


class TracedEngine:
    """``producers.generation.engines.port.Engine`` around another one."""

    def __init__(self, inner: Engine, story: WorkerStory) -> None:
        self.name, self.max_num_seqs = inner.name, inner.max_num_seqs
        self._inner, self._story = inner, story

    async def start(self) -> None:
        """See the port."""
        await self._inner.start()

    def generate(self, request: GenerationRequest) -> AsyncIterator[TokenDelta]:
        """See the port."""
        deltas = self._inner.generate(request)
        return self._followed(request.request_id, deltas) if self._story.follows(request.request_id) else deltas

    async def _followed(self, request_id: str, deltas: AsyncIterator[TokenDelta]) -> AsyncIterator[TokenDelta]:
        first_s: float | None = None
        try:
            async for delta in deltas:
                first_s = self._story.clock() if first_s is None else first_s
                if delta.finish_reason is not None:
                    self._story.generated(request_id, first_s)
                yield delta
        finally:
            if (close := getattr(deltas, "aclose", None)) is not None:
                await close()

    async def adopt(self, directory: Path, version: PolicyVersion) -> None:
        """See the port."""
        began_s = self._story.clock()
        await self._inner.adopt(directory, version)
        self._story.adopted(version, began_s)

    async def close(self) -> None:
        """See the port."""
        await self._inner.close()
