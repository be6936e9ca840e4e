"""Prompts, advice about their output length, and the orders that send them to workers."""

from typing import Annotated, ClassVar

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from schemas.identifiers import PolicyVersion
from schemas.messages.base import Message

ShortText = Annotated[str, Field(max_length=256)]


class Part(BaseModel):
    """A value inside a message."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class ChatTurn(Part):
    """One turn of a conversational prompt."""

    role: ShortText
    content: Annotated[str, Field(max_length=1 << 20)]


class Prompt(Part):
    """One task for the policy, with the columns its reward functions will ask for.

    ``content`` is plain text, or chat turns that the worker renders with the model's chat template.
    """

    prompt_id: ShortText
    dataset: ShortText
    content: Annotated[str, Field(max_length=1 << 20)] | tuple[ChatTurn, ...]
    columns: dict[str, JsonValue] = Field(default_factory=dict)

    @property
    def text(self) -> str:
        """The prompt as text, chat turns joined by line breaks; for features and displays, never for tokens."""
        if isinstance(self.content, str):
            return self.content
        return "\n".join(turn.content for turn in self.content)


class LengthEstimate(Part):
    """Predicted output length in tokens. Advice only: a wrong one costs time, never correctness.

    ``boundaries_version``: of the bucket boundaries that the bucket was found with; 0 for those of the settings.
    """

    median: Annotated[int, Field(ge=1)]
    upper: Annotated[int, Field(ge=1)]
    bucket: Annotated[int, Field(ge=0)]
    predictor: ShortText
    boundaries_version: Annotated[int, Field(ge=0)] = 0


class SamplingParams(Part):
    """How completions are sampled; the names are vLLM's and TRL's."""

    max_completion_length: Annotated[int, Field(ge=1)]
    temperature: Annotated[float, Field(ge=0.0, le=100.0)] = 1.0
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    seed: int | None = None


class WorkOrder(Message):
    """Dispatcher → one worker: sample these completions of a prompt.

    ``sample_indices`` names the samples still wanted (all of them at first, the missing ones after a worker was
    lost); ``partition`` is where every trajectory of the group goes; ``position`` is the prompt cursor's value that
    gave this prompt, so that a restarted dispatcher can go on behind the largest one; ``due_step`` is the earliest
    optimizer step that may train the group, 0 for any.
    """

    SCHEMA: ClassVar[str] = "work-order"
    MAX_BYTES: ClassVar[int] = 4 << 20

    group_id: ShortText
    worker_id: ShortText
    position: Annotated[int, Field(ge=0)]
    prompt: Prompt
    estimate: LengthEstimate
    sampling: SamplingParams
    num_generations: Annotated[int, Field(ge=1, le=4096)]
    sample_indices: tuple[int, ...]
    partition: Annotated[int, Field(ge=0)]
    attempt: Annotated[int, Field(ge=0)] = 0
    due_step: Annotated[int, Field(ge=0)] = 0
    admitted_version: PolicyVersion
    created_at: float
