"""A completion while it grows: token ids and log-probabilities in typed arrays, versions run-length encoded."""

from array import array
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from schemas.errors import EngineError
from schemas.identifiers import PolicyVersion
from schemas.messages.trajectories import FinishReason, VersionSpan
from schemas.ports.engine import TokenDelta


@dataclass(slots=True)
class Completion:
    """``extend`` it with every delta of one request."""

    token_ids: "array[int]" = field(default_factory=lambda: array("i"))
    logprobs: "array[float]" = field(default_factory=lambda: array("f"))
    finish_reason: FinishReason | None = None
    _spans: list[tuple[PolicyVersion, int]] = field(default_factory=list)

    def extend(self, delta: TokenDelta) -> None:
        """Append the delta's tokens.

        Raises:
            EngineError: the delta has not as many log-probabilities as tokens, or token ids that are none.
        """
        if len(delta.token_ids) != len(delta.logprobs):
            raise EngineError(
                f"expected one logprob per token from the engine, got {len(delta.logprobs)} for {len(delta.token_ids)}"
            )
        self.finish_reason = delta.finish_reason
        if not delta.token_ids:
            return
        try:
            self.token_ids.extend(delta.token_ids)
            self.logprobs.extend(delta.logprobs)
        except (TypeError, OverflowError) as error:
            raise EngineError(f"expected token ids and logprobs from the engine, got: {error}") from error
        if not self._spans or self._spans[-1][0] != delta.version:
            self._spans.append((delta.version, len(self.token_ids)))
        else:
            self._spans[-1] = (delta.version, len(self.token_ids))

    def version_spans(self) -> tuple[VersionSpan, ...]:
        """Which version sampled which tokens; adjacent spans differ, together they cover the completion."""
        starts = [0, *(end for _, end in self._spans)]
        return tuple(
            VersionSpan(version=version, start=start, end=end)
            for start, (version, end) in zip(starts, self._spans, strict=False)
        )

    def arrays(self) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Token ids int32 (T) and log-probabilities float32 (T), without a copy; do not extend afterwards."""
        return np.frombuffer(self.token_ids, dtype="<i4"), np.frombuffer(self.logprobs, dtype="<f4")
