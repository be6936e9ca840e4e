"""What workers produce: token chunks while sampling, and one trajectory per finished completion."""

from enum import StrEnum
from typing import Annotated, ClassVar, Self

import numpy as np
from pydantic import Field, model_validator

from schemas.identifiers import PolicyVersion
from schemas.messages.arrays import Float32Array, Int32Array, UInt8Array
from schemas.messages.base import Message
from schemas.messages.prompts import Part, ShortText

_ZERO = np.zeros((), np.int32)
"""An array, because comparing with a Python number converts it anew each time."""


class FinishReason(StrEnum):
    """Why sampling ended: an end-of-sequence token, the length limit, or the engine gave up."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class VersionSpan(Part):
    """Tokens ``start`` (inclusive) to ``end`` (exclusive) of a completion were sampled by ``version``."""

    version: PolicyVersion
    start: Annotated[int, Field(ge=0)]
    end: Annotated[int, Field(ge=1)]


class TokenChunk(Message):
    """Worker → tokens topic: a run of tokens just sampled, all by one version. Delivered at most once."""

    SCHEMA: ClassVar[str] = "token-chunk"

    trajectory_id: ShortText
    worker_id: ShortText
    start: Annotated[int, Field(ge=0)]
    version: PolicyVersion
    token_ids: Int32Array
    logprobs: Float32Array
    finish_reason: FinishReason | None = None


class Trajectory(Message):
    """Worker → trajectories topic: one finished completion; the record all consumers share.

    Rewards are raw, by name and unweighted (``None``: not applicable or failed, see ``reward_errors``); advantages
    are the consumer's business. With P prompt and T completion tokens: ``prompt_token_ids`` int32 (P),
    ``token_ids`` int32 (T), ``logprobs`` float32 (T), of the behaviour policy at the sampling temperature,
    ``loss_mask`` uint8 (T). Times are seconds since the epoch. ``position``: of the prompt in the prompt source.
    ``due_step``: the earliest optimizer step that may train it, 0 for any.
    """

    SCHEMA: ClassVar[str] = "trajectory"
    MAX_BYTES: ClassVar[int] = 16 << 20

    trajectory_id: ShortText
    group_id: ShortText
    prompt_id: ShortText
    dataset: ShortText
    sample_index: Annotated[int, Field(ge=0)]
    num_generations: Annotated[int, Field(ge=1)]
    prompt_token_ids: Int32Array
    token_ids: Int32Array
    logprobs: Float32Array
    loss_mask: UInt8Array
    version_spans: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    prompt_text: str
    completion_text: str
    rewards: dict[str, float | None]
    reward_errors: dict[str, str] = Field(default_factory=dict)
    temperature: float
    bucket: Annotated[int, Field(ge=0)]
    predicted_length: Annotated[int, Field(ge=1)]
    worker_id: ShortText
    attempt: Annotated[int, Field(ge=0)]
    admitted_version: PolicyVersion
    position: Annotated[int, Field(ge=0)] = 0
    due_step: Annotated[int, Field(ge=0)] = 0
    created_at: float
    started_at: float
    finished_at: float

    @model_validator(mode="after")
    def _arrays_agree(self) -> Self:
        length = len(self.token_ids)
        if not len(self.logprobs) == len(self.loss_mask) == length:
            raise ValueError(
                f"expected token_ids, logprobs and loss_mask of one length, "
                f"got {length}, {len(self.logprobs)} and {len(self.loss_mask)}"
            )
        if np.count_nonzero(np.isfinite(self.logprobs)) != length:
            raise ValueError("expected finite logprobs, got NaN or infinity")
        if np.count_nonzero(self.token_ids < _ZERO):
            raise ValueError(f"expected token ids >= 0, got {self.token_ids.min()}")
        if np.count_nonzero(self.prompt_token_ids < _ZERO):
            raise ValueError(f"expected prompt token ids >= 0, got {self.prompt_token_ids.min()}")
        self._spans_tile(length)
        return self

    def _spans_tile(self, length: int) -> None:
        expected = 0
        for span in self.version_spans:
            if span.start != expected or span.end <= span.start:
                raise ValueError(f"expected a version span that starts at {expected}, got [{span.start}, {span.end})")
            expected = span.end
        if expected != length:
            raise ValueError(f"expected version spans that cover {length} tokens, got {expected}")

    @property
    def oldest_version(self) -> PolicyVersion:
        """The oldest weights that sampled a token of this completion (the admitted version if it is empty)."""
        return min((span.version for span in self.version_spans), default=self.admitted_version)

    @property
    def newest_version(self) -> PolicyVersion:
        """The newest weights that sampled a token of this completion (the admitted version if it is empty)."""
        return max((span.version for span in self.version_spans), default=self.admitted_version)
