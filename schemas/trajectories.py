"""From prompt to trajectory: the orders that send prompts to workers, and the records that workers send back.

A work order carries a prompt, an estimate of its output length, and the sampling parameters. The worker answers with
token chunks while it samples, and with one trajectory per finished completion.
"""

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator

from streamrl.schemas.identifiers import PolicyVersion, make_trajectory_id, named_version
from streamrl.schemas.messages import Float32Array, Int32Array, LongText, Message, UInt8Array

_ZERO = np.zeros((), np.int32)
"""Zero to compare arrays with. It is an array, because a Python number would be converted at each comparison."""

ShortText = Annotated[str, Field(max_length=256)]
StopStrings = Annotated[tuple[Annotated[str, Field(min_length=1, max_length=256)], ...], Field(max_length=16)]
"""Strings that end a completion. Their number and length are limited, because every order carries them."""


class Part(BaseModel):
    """A value inside a message."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class ChatTurn(Part):
    """One turn of a conversational prompt, with all that the data has in it, such as ``tool_calls`` and ``name``."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, JsonValue]

    role: ShortText
    content: Annotated[str, Field(max_length=1 << 20)]


class Prompt(Part):
    """One task for the policy, with the columns that its reward functions need.

    ``content`` is plain text, or chat turns that the worker renders with the model's chat template. ``stated`` is the
    prompt of the data, in the same form, if the settings word it otherwise for the model.
    """

    prompt_id: ShortText
    dataset: ShortText
    content: Annotated[str, Field(max_length=1 << 20)] | tuple[ChatTurn, ...]
    columns: dict[str, JsonValue] = Field(default_factory=dict)
    stated: Annotated[str, Field(max_length=1 << 20)] | tuple[ChatTurn, ...] | None = None

    @property
    def tools(self) -> list[dict[str, JsonValue]]:
        """The tools that the chat template describes to the model: the column of that name; empty without one."""
        tools = self.columns.get("tools")
        if isinstance(self.content, str) or not isinstance(tools, list):
            return []
        return [tool for tool in tools if isinstance(tool, dict)]

    @property
    def text(self) -> str:
        """The prompt as text, chat turns joined by line breaks; for length features and displays, never for tokens."""
        if isinstance(self.content, str):
            return self.content
        return "\n".join(turn.content for turn in self.content)


class LengthEstimate(Part):
    """Predicted output length in tokens. It is advice only: a wrong estimate costs time, never correctness.

    ``boundaries_version`` is the version of the bucket boundaries that gave ``bucket``; 0 for those of the settings.
    """

    median: Annotated[int, Field(ge=1)]
    upper: Annotated[int, Field(ge=1)]
    bucket: Annotated[int, Field(ge=0)]
    predictor: ShortText
    boundaries_version: Annotated[int, Field(ge=0)] = 0


class OrderingChance(Part):
    """Why the dispatcher ordered a prompt that it could have passed over.

    ``probability`` is the probability with which it ordered the prompt; 1 / probability weighs the samples as if every
    prompt were ordered. ``zero_advantage`` is the predicted chance that all samples of the group earn the same reward.
    ``alike`` names the prompts that the prediction started from.
    """

    probability: Annotated[float, Field(gt=0.0, le=1.0)]
    zero_advantage: Annotated[float, Field(ge=0.0, le=1.0)]
    alike: ShortText


class SamplingParams(Part):
    """How completions are sampled; the names are vLLM's and TRL's.

    They apply in this order. Logits are divided by ``temperature``. Probabilities below ``min_p`` times the largest are
    dropped. Then all but the ``top_k`` largest are dropped, then all outside the smallest set that sums to ``top_p``.
    """

    max_completion_length: Annotated[int, Field(ge=1)]
    temperature: Annotated[float, Field(ge=0.0, le=100.0)] = 1.0
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0  # 0: the whole vocabulary
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    stop: StopStrings = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    seed: int | None = None

    @property
    def truncates(self) -> bool:
        """Whether some tokens are never sampled, at any temperature."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0

    def find_stop(self, text: str) -> tuple[int, int] | None:
        """The place of the stop string that completes first in a text, as [start, end); None if there is none."""
        # If two end at the same place, the one listed first counts: vLLM's rule.
        spans = [(start, start + len(one)) for one in self.stop if (start := text.find(one)) >= 0]
        return min(spans, key=lambda span: span[1], default=None)


class PartialSource(Part):
    """Where tokens of an earlier attempt may be: from this offset on, in a partition of partial-trajectories."""

    partition: Annotated[int, Field(ge=0)]
    offset: Annotated[int, Field(ge=0)]


class WorkOrder(Message):
    """Dispatcher → one worker: sample these completions of a prompt.

    ``sample_indices`` lists the samples still wanted: all at first, the missing ones after a worker was lost.
    ``partition`` is the partition for every trajectory of the group. ``position`` is the prompt cursor's value for this
    prompt, so that a restarted dispatcher can continue after the largest one. ``due_step`` is the earliest optimizer
    step that may train the group, 0 for any. ``incarnation`` is the worker process that the order is for, so that a
    restarted dispatcher knows which orders went to a process that has exited; None means any process. ``partials`` says
    where earlier attempts may have left tokens to continue from; it is empty for the first attempt. ``moves`` counts
    the earlier attempts that ended because the dispatcher moved the group, not because a worker was lost. ``policy`` is
    the arm of a split whose weights sample the order, empty for the served policy. ``admitted_version`` is always a
    version of the served policy: the one that the worker held or, for an arm, the one that was served at that time.
    ``chance`` is set if the dispatcher orders some prompts less often than others. Then ``decided`` lists the positions
    that it decided about since the order before, each with its probability of being ordered, or 0 if it was passed
    over. So a restarted dispatcher does not decide again.
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
    sample_indices: tuple[int, ...]  # of 0 to num_generations - 1
    partition: Annotated[int, Field(ge=0)]
    attempt: Annotated[int, Field(ge=0)] = 0
    due_step: Annotated[int, Field(ge=0)] = 0
    incarnation: ShortText | None = None
    partials: Annotated[tuple[PartialSource, ...], Field(max_length=64)] = ()
    moves: Annotated[int, Field(ge=0)] = 0
    policy: ShortText = ""
    admitted_version: PolicyVersion
    chance: OrderingChance | None = None
    decided: tuple[tuple[Annotated[int, Field(ge=0)], Annotated[float, Field(ge=0.0, le=1.0)]], ...] | None = None
    created_at: float


class ReleaseOrder(Message):
    """Dispatcher → one worker: stop sampling these groups. Another worker continues from their last tokens.

    ``groups`` gives, by group id, the attempt whose order is taken back; later attempts of the group remain valid. The
    worker writes the tokens that it has to partial-trajectories and then reports this (``Heartbeat.released``). It
    delivers samples that are complete by then itself. ``settled`` gives, by group id, the last attempt that the worker
    need not report any more, and whose records it need not keep: either another order says where the tokens are, or no
    sample of the group is missing.
    """

    SCHEMA: ClassVar[str] = "release-order"

    worker_id: ShortText
    incarnation: ShortText
    groups: dict[ShortText, Annotated[int, Field(ge=0)]]
    settled: dict[ShortText, Annotated[int, Field(ge=0)]] = Field(default_factory=dict)
    sent_at: float


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
    """Worker → tokens topic: consecutive tokens just sampled, all by one version. Delivered at most once."""

    SCHEMA: ClassVar[str] = "token-chunk"

    trajectory_id: ShortText
    worker_id: ShortText
    start: Annotated[int, Field(ge=0)]
    version: PolicyVersion
    token_ids: Int32Array  # [tokens]
    logprobs: Float32Array  # [tokens], of the policy that sampled
    finish_reason: FinishReason | None = None


class TrajectoryPart(Part):
    """The worker that sampled a completion from token ``start`` on, and the attempt of its order."""

    worker_id: ShortText
    attempt: Annotated[int, Field(ge=0)]
    start: Annotated[int, Field(ge=0)]


MAX_TURNS = 1024
"""Most turns of one trajectory, because of the limit on values in a header."""


class Turn(Part):
    """One call of a session: the policy sampled tokens [``start``, ``end``) of the completion, and all of them count.

    ``rewards`` are this turn's rewards by name. They are parts of the trajectory's rewards of the same names.
    """

    start: Annotated[int, Field(ge=0)]
    end: Annotated[int, Field(ge=1)]
    rewards: dict[str, float] = Field(default_factory=dict)


class PartialTrajectory(Message):
    """Worker → partial-trajectories topic: tokens of a completion that is not finished. Delivered at least once.

    Any worker can continue from them. A process's records of a trajectory start at token 0, so they suffice alone.
    Tokens from two processes are never joined, because each process sampled its own. ``incarnation`` is the process
    that wrote the record. ``prompt_hash`` is xxh3-64 of the prompt's token ids as int32. ``parts`` and ``policy`` are
    as in ``Trajectory``. If ``finish_reason`` is set, the completion is complete and only its rewards are missing.
    """

    SCHEMA: ClassVar[str] = "partial-trajectory"

    trajectory_id: ShortText
    group_id: ShortText
    worker_id: ShortText
    incarnation: ShortText
    attempt: Annotated[int, Field(ge=0)]
    prompt_hash: Annotated[int, Field(ge=0)]
    start: Annotated[int, Field(ge=0)]
    token_ids: Int32Array  # [tokens]
    logprobs: Float32Array  # [tokens], of the policy that sampled
    version_spans: tuple[VersionSpan, ...]  # in tokens of the completion
    parts: Annotated[tuple[TrajectoryPart, ...], Field(max_length=256)] = ()
    finish_reason: FinishReason | None = None
    policy: ShortText = ""

    @property
    def end(self) -> int:
        """Index after the last token."""
        return self.start + len(self.token_ids)

    @model_validator(mode="after")
    def _arrays_agree(self) -> Self:
        if len(self.logprobs) != len(self.token_ids):
            raise ValueError(
                f"expected a logprob for each token, got {len(self.logprobs)} for {len(self.token_ids)} tokens"
            )
        if np.count_nonzero(np.isfinite(self.logprobs)) != len(self.logprobs):
            raise ValueError("expected finite logprobs, got NaN or infinity")
        if np.count_nonzero(self.token_ids < _ZERO):
            raise ValueError(f"expected token ids >= 0, got {self.token_ids.min()}")
        _refuse_gaps(self.version_spans, self.start, self.end)
        return self


def _refuse_gaps(spans: Iterable[VersionSpan], start: int, end: int) -> None:
    """Raise ``ValueError`` unless version spans tile [start, end) without gaps, overlaps or empty spans."""
    expected = start
    for span in spans:
        if span.start != expected or span.end <= span.start:
            raise ValueError(f"expected a version span that starts at {expected}, got [{span.start}, {span.end})")
        expected = span.end
    if expected != end:
        raise ValueError(f"expected version spans up to token {end}, got up to {expected}")


class FinishedCompletion(Message):
    """The facts of a completion that has been sampled. ``Trajectory`` describes the fields."""

    trajectory_id: ShortText
    group_id: ShortText
    prompt_id: ShortText
    dataset: ShortText
    sample_index: Annotated[int, Field(ge=0)]
    num_generations: Annotated[int, Field(ge=1)]
    prompt_token_ids: Int32Array  # [P]
    token_ids: Int32Array  # [T]
    logprobs: Float32Array  # [T]
    loss_mask: UInt8Array  # [T], 1: counts in the loss
    version_spans: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    refusal: ShortText = ""
    prompt_text: LongText
    completion_text: LongText
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
    chance: OrderingChance | None = None
    parts: tuple[TrajectoryPart, ...] = ()
    policy: ShortText = ""
    source: Literal["order", "request"] = "order"
    session: ShortText = ""
    turns: Annotated[tuple[Turn, ...], Field(max_length=MAX_TURNS)] = ()
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
        # One NaN in a ratio makes the gradient of the whole step NaN.
        if np.count_nonzero(np.isfinite(self.logprobs)) != length:
            raise ValueError("expected finite logprobs, got NaN or infinity")
        if np.count_nonzero(self.token_ids < _ZERO):
            raise ValueError(f"expected token ids >= 0, got {self.token_ids.min()}")
        if np.count_nonzero(self.prompt_token_ids < _ZERO):
            raise ValueError(f"expected prompt token ids >= 0, got {self.prompt_token_ids.min()}")
        _refuse_gaps(self.version_spans, 0, length)
        if self.turns:
            self._refuse_wrong_turns()
        return self

    def _refuse_wrong_turns(self) -> None:
        sampled, before = np.zeros(len(self.token_ids), np.bool_), 0
        for turn in self.turns:
            if not before <= turn.start < turn.end <= len(sampled):
                raise ValueError(
                    f"expected a turn within tokens [{before}, {len(sampled)}), got [{turn.start}, {turn.end})"
                )
            sampled[turn.start : turn.end] = True
            before = turn.end
        if np.count_nonzero(self.loss_mask[~sampled]):
            raise ValueError("expected a loss mask of 0 between turns, got 1 for a token that was not sampled")

    @property
    def sampled_tokens(self) -> int:
        """Number of tokens that the policy sampled: all tokens of the completion except those between turns."""
        return sum(turn.end - turn.start for turn in self.turns) if self.turns else len(self.token_ids)

    @property
    def oldest_version(self) -> PolicyVersion:
        """The oldest weights that sampled a token of this completion (the admitted version if it is empty)."""
        # Versions compare by lineage first, then by number.
        return min((span.version for span in self.version_spans), default=self.admitted_version)

    @property
    def newest_version(self) -> PolicyVersion:
        """The newest weights that sampled a token of this completion (the admitted version if it is empty)."""
        return max((span.version for span in self.version_spans), default=self.admitted_version)

    def named(self, version: PolicyVersion) -> str:
        """A version of its spans, for people: ``2-40``, or ``rloo/1-7`` for an arm."""
        return named_version(self.policy or None, version)


class Trajectory(FinishedCompletion):
    """Worker → trajectories topic: one finished completion; the record that all consumers share.

    ``rewards`` are raw, by name and unweighted. None means that a reward does not apply or failed (``reward_errors``).
    Consumers compute advantages. With P prompt tokens and T completion tokens: ``prompt_token_ids`` is int32 (P).
    ``token_ids`` is int32 (T) and holds every sampled token, a stop string's tokens too. ``logprobs`` is float32 (T):
    log-probabilities by the behaviour policy at the sampling temperature over the whole vocabulary, as the trainer
    computes its own. Top-p, top-k and min-p limit which tokens are sampled and do not change the recorded values.
    ``loss_mask`` is uint8 (T). ``completion_text`` is the text that rewards see: without special tokens, and without
    the stop string unless the order asks for it. Times are seconds since the epoch.

    ``refusal`` is the reason why no worker can sample the prompt, in a few words that are equal for all such prompts;
    it is empty if the prompt can be sampled. ``position`` is the prompt's position in the prompt source. ``due_step``
    is the earliest optimizer step that may train the trajectory, 0 for any. ``parts`` says which worker sampled from
    which token on, if a worker continued another's tokens; if empty, ``worker_id`` sampled everything. ``source`` says
    whether a work order or a gateway's request caused it. A request's group has no order, and its prompt is in no
    prompt source. ``policy`` is the arm of a split whose weights sampled it and whose versions the spans name; empty
    for the served policy. ``admitted_version`` is always a served version; the age of an arm's trajectory is counted
    from it. ``chance`` is the order's.

    ``session`` names the session whose consecutive calls the trajectory holds; it is empty for a single completion. In
    a session, ``turns`` mark the sampled tokens. Tokens between turns were read and not sampled: answers of tools and
    users, and the chat template's text around them. Their ``loss_mask`` and ``logprobs`` are 0, and their version is
    that of the turn that read them. A session's ``completion_text`` is the whole text with special tokens.
    """

    SCHEMA: ClassVar[str] = "trajectory"
    MAX_BYTES: ClassVar[int] = 16 << 20


class UngradedTrajectory(FinishedCompletion):
    """Worker → ungraded topic: a finished completion that graders still have to judge. Trainers do not read it.

    The fields are as in ``Trajectory``. ``rewards`` are those of the reward functions that the worker called.
    ``prompt_json`` is the prompt as JSON, with the columns that reward functions need.
    """

    SCHEMA: ClassVar[str] = "ungraded-trajectory"
    MAX_BYTES: ClassVar[int] = 16 << 20

    prompt_json: LongText

    @classmethod
    def of(cls, trajectory: Trajectory, prompt: Prompt) -> Self:
        """A worker's trajectory in the form that graders read."""
        unset = {"stated"} if prompt.stated is None else None
        return cls(**trajectory.__dict__, prompt_json=prompt.model_dump_json(exclude=unset))

    @property
    def prompt(self) -> Prompt:
        """The prompt as the data set gave it.

        Raises:
            ValidationError: the field holds no valid prompt.
        """
        return Prompt.model_validate_json(self.prompt_json)

    def graded(self, rewards: dict[str, float | None], errors: dict[str, str]) -> Trajectory:
        """The trajectory with the graders' rewards added to the worker's."""
        fields = {name: getattr(self, name) for name in Trajectory.model_fields}
        return Trajectory.model_validate(
            fields | {"rewards": self.rewards | rewards, "reward_errors": self.reward_errors | errors}
        )


SHOWN_CHARACTERS = 1000
"""Characters that a record keeps of a prompt that cannot be sampled: enough to recognise it, never too many to send."""


def total_reward(rewards: Mapping[str, float | None], weights: Mapping[str, float]) -> float | None:
    """The weighted sum of the rewards that apply, or None if none applies. TRL's rule: rewards of None are left out.

    A function without a weight has weight 1.
    """
    given = {name: value for name, value in rewards.items() if value is not None}
    return sum(weights.get(name, 1.0) * value for name, value in given.items()) if given else None


def aborted_trajectory(
    order: WorkOrder, sample_index: int, reason: str, *, rewards: Iterable[str], now: float, refusal: str = ""
) -> Trajectory:
    """The record of a sample that was not made. It completes its group and has the reason as the error of each reward.

    ``rewards``: names of the reward functions; if empty, the error has the name ``generation``. ``refusal``: see
    ``Trajectory``.
    """
    names = tuple(rewards)
    return Trajectory(
        **fields_from_order(order, sample_index),
        prompt_token_ids=[],
        token_ids=[],
        logprobs=[],
        loss_mask=[],
        version_spans=(),
        finish_reason=FinishReason.ABORT,
        refusal=refusal,
        prompt_text=order.prompt.text[:SHOWN_CHARACTERS],
        completion_text="",
        rewards=dict.fromkeys(names),
        reward_errors=dict.fromkeys(names or ("generation",), reason),
        started_at=now,
        finished_at=now,
    )


def fields_from_order(order: WorkOrder, sample_index: int) -> dict[str, Any]:
    """The fields of a trajectory that it takes from its order and its sample index."""
    return {
        "trajectory_id": make_trajectory_id(order.group_id, sample_index),
        "group_id": order.group_id,
        "prompt_id": order.prompt.prompt_id,
        "dataset": order.prompt.dataset,
        "sample_index": sample_index,
        "num_generations": order.num_generations,
        "temperature": order.sampling.temperature,
        "bucket": order.estimate.bucket,
        "predicted_length": order.estimate.median,
        "worker_id": order.worker_id,
        "attempt": order.attempt,
        "policy": order.policy,
        "admitted_version": order.admitted_version,
        "position": order.position,
        "due_step": order.due_step,
        "chance": order.chance,
        "created_at": order.created_at,
    }
