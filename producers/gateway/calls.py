"""One request from its checked body to its last token: the sequences that it asks for, and their sampled tokens."""

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Literal, Protocol

import xxhash

from streamrl.producers.gateway.formats import AnswerFormat
from streamrl.producers.gateway.keys import KeyUse
from streamrl.producers.gateway.links import SequenceRequest, ServedSequence, WorkerPool
from streamrl.producers.gateway.refusals import ApiError, failed, invalid
from streamrl.producers.gateway.requests import SamplingFields, ToolDefinition
from streamrl.producers.gateway.text import ChatTokenizer, ReplyText
from streamrl.producers.gateway.tool_calls import ParsedReply, ToolCallParser
from streamrl.producers.gateway.worker_requests import SampledTokens
from streamrl.producers.generation.engines.port import TokenDelta
from streamrl.producers.generation.rollout import SampledCompletion
from streamrl.schemas.errors import EngineError
from streamrl.schemas.identifiers import PolicyVersion, make_group_id, make_trajectory_id
from streamrl.schemas.settings import LoopSettings
from streamrl.schemas.trajectories import FinishReason, LengthEstimate, SamplingParams

if TYPE_CHECKING:
    from streamrl.producers.gateway.sessions import SessionTurn

DATASET = "gateway"
"""Name of the data set of requesters' prompts, in trajectories and for length estimates."""
FEEDBACK = "feedback"
"""Name of the reward that requesters give."""


@dataclass(frozen=True)
class EncodedPrompt:
    """One prompt of a request as text and as token ids."""

    text: str
    token_ids: Sequence[int]


@dataclass(frozen=True)
class ServedModel:
    """The model that answers: its name in requests, its tokenizer and tool parser, and the run's limits.

    ``engine``: the workers' engine as the settings name it, which decides what a request may ask for.
    """

    name: str
    engine: str
    loop: LoopSettings
    tokenizer: ChatTokenizer
    parser: ToolCallParser

    def new_text(self, call: "CompletionCall") -> ReplyText:
        """A decoder for the text of one completion of a call."""
        openers = self.parser.openers if call.answer.tools else ()
        return ReplyText(self.tokenizer.decoder_for(call.sampling), call.sampling, openers)

    def parse(self, reply: "Reply", call: "CompletionCall") -> ParsedReply:
        """The text and the tool calls of a complete reply to a call without a forced format."""
        text, tools = reply.text.text, call.answer.tools
        return self.parser.parse(text, tools) if tools else ParsedReply(text, ())


@dataclass(frozen=True)
class Requester:
    """The requester of a call. ``session``: the session that the path or a header names.

    ``caller``: the requester's own span, from its ``traceparent`` header; empty if it sent none.
    """

    use: KeyUse
    session: str | None = None
    caller: str = ""


@dataclass(frozen=True)
class AnswerOptions:
    """What the answer contains. ``logprobs``, ``token_ids``: whether it has them. ``format``: the format forced on it.

    ``tools``: tools whose calls are searched for in the text.
    """

    stream: bool
    include_usage: bool
    logprobs: bool
    token_ids: bool
    format: AnswerFormat | None
    tools: tuple[ToolDefinition, ...]

    @classmethod
    def of(
        cls, request: SamplingFields, *, logprobs: bool, form: AnswerFormat | None, tools: Sequence[ToolDefinition]
    ) -> "AnswerOptions":
        """The options that a request asks for."""
        usage = bool(request.stream_options and request.stream_options.include_usage)
        return cls(bool(request.stream), usage, logprobs, bool(request.return_token_ids), form, tuple(tools))


@dataclass(frozen=True)
class CallTraining:
    """Whether a call is trained on. ``kept``: key and request consent, and the call can be trained on.

    ``constrained``: it would be trained on if no format were forced on it. ``turn``: its place in its session, if the
    session is to become a trajectory.
    """

    kept: bool
    constrained: bool = False
    turn: "SessionTurn | None" = None


@dataclass(frozen=True)
class CompletionCall:
    """A checked request for ``n`` completions of each prompt.

    ``session``: names the conversation that the call belongs to; one worker has the start of that in its cache.
    """

    kind: Literal["chat", "text"]
    prompts: tuple[EncodedPrompt, ...]
    n: int
    sampling: SamplingParams
    requester: Requester
    session: str | None
    answer: AnswerOptions
    training: CallTraining
    id: str = field(init=False, default_factory=lambda: uuid.uuid4().hex)
    created_at: float = field(init=False, default_factory=time.time)

    @property
    def begun_at(self) -> float:
        """When the first call of its trajectory was made, unless another call continues that trajectory first."""
        turn = self.training.turn
        return turn.segment.created_at if turn is not None and turn.segment is not None else self.created_at

    @property
    def public_id(self) -> str:
        """The id that answers show and feedback refers to."""
        return f"{'chatcmpl' if self.kind == 'chat' else 'cmpl'}-{self.id}"

    def group_id(self, index: int) -> str:
        """Id of the group that a choice is in. The choices of each prompt are a group, numbered as the prompt."""
        return make_group_id(f"{DATASET}/{self.public_id}", index // self.n)

    def trajectory_id(self, index: int) -> str:
        """Id of a choice's trajectory, if the choice is no turn of a session."""
        return make_trajectory_id(self.group_id(index), index % self.n)


@dataclass(eq=False)
class Reply:
    """One completion of a call so far. ``index``: of the choice, over all prompts."""

    index: int
    prompt: EncodedPrompt
    estimate: LengthEstimate
    text: ReplyText
    sequence: ServedSequence
    sampled: SampledCompletion = field(default_factory=SampledCompletion)
    started_at: float = 0.0
    finished_at: float = 0.0


@dataclass(frozen=True)
class ReplyDelta:
    """New tokens of a reply, the text that can be sent now, and why the reply ended, if it did."""

    reply: Reply
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    text: str
    finish_reason: FinishReason | None


class RunningCall:
    """A running call. Always ``close`` it, which frees its slots. ``traceparent``: its span, for workers."""

    def __init__(
        self,
        call: CompletionCall,
        model: ServedModel,
        pool: WorkerPool,
        estimate: Callable[[EncodedPrompt], LengthEstimate],
        timeout_s: float,
        traceparent: str = "",
    ) -> None:
        self.call = call
        self.model = model
        self._traceparent = traceparent
        self.replies: list[Reply] = []
        self.version: PolicyVersion | None = None
        self._pool = pool
        self._arrived: list[tuple[int, SampledTokens | ApiError]] = []
        self._wake = asyncio.Event()
        self._is_late = False
        # One timer a call: a timer for each wait would be a large part of a token's cost.
        self._timer = asyncio.get_running_loop().call_later(timeout_s, self._run_out)
        self._timeout_s = timeout_s
        for number, prompt in enumerate(call.prompts):
            expected = estimate(prompt)
            self.replies += [self._reply(prompt, number * call.n + index, expected) for index in range(call.n)]

    def _reply(self, prompt: EncodedPrompt, index: int, estimate: LengthEstimate) -> Reply:
        sampling = self.call.sampling
        if sampling.seed is not None:
            # Each choice has its own seed, of 31 bits, since every engine accepts those.
            own = xxhash.xxh32_intdigest(str(index).encode(), seed=sampling.seed & 0xFFFFFFFF) & 0x7FFFFFFF
            sampling = sampling.model_copy(update={"seed": own})
        request = SequenceRequest(
            prompt.token_ids,
            sampling,
            estimate,
            session=self.call.session,
            stream_as=self.call.trajectory_id(index) if self.call.training.kept else "",
            format=self.call.answer.format,
            traceparent=self._traceparent,
        )
        sequence = ServedSequence(request, partial(self._take, index))
        return Reply(index, prompt, estimate, self.model.new_text(self.call), sequence)

    def submit(self) -> None:
        """Queue its sequences for sampling.

        Raises:
            ApiError: the queue is full.
        """
        self._pool.submit([reply.sequence for reply in self.replies])

    @property
    def is_over(self) -> bool:
        """Whether every reply has its last token."""
        return all(reply.sampled.finish_reason is not None for reply in self.replies)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts, each counted once."""
        return sum(len(prompt.token_ids) for prompt in self.call.prompts)

    @property
    def completion_tokens(self) -> int:
        """Tokens sampled."""
        return sum(len(reply.sampled.token_ids) for reply in self.replies)

    def _take(self, index: int, event: SampledTokens | ApiError) -> None:
        self._arrived.append((index, event))
        self._wake.set()

    def _run_out(self) -> None:
        self._is_late = True
        self._wake.set()

    async def next(self) -> list[ReplyDelta]:
        """Wait for at least one token or end; one delta for each reply that has grown since the last call of this.

        Raises:
            ApiError: a sequence failed, or the call takes too long.
        """
        while not self._arrived:
            if self._is_late:
                raise failed(f"expected an answer within {self._timeout_s:g} s, got none; ask for fewer tokens")
            self._wake.clear()
            await self._wake.wait()
        arrived, self._arrived = self._arrived, []
        grown: dict[Reply, tuple[list[int], list[float]]] = {}
        for index, event in arrived:
            if isinstance(event, ApiError):
                raise event
            reply = self.replies[index]
            token_ids, logprobs = grown.setdefault(reply, ([], []))
            self._extend(reply, event)
            token_ids += event.token_ids
            logprobs += event.logprobs
        return [self._delta(reply, *tokens) for reply, tokens in grown.items()]

    def _extend(self, reply: Reply, event: SampledTokens) -> None:
        now = time.time()
        if not reply.started_at:
            reply.started_at = now
        if self.version is None:
            self.version = event.version
        reason = None if event.finish_reason is None else FinishReason(event.finish_reason)
        try:
            reply.sampled.extend(TokenDelta(event.token_ids, event.logprobs, event.version, reason))
        except EngineError as error:
            raise failed(str(error)) from error
        form = self.call.answer.format
        if reason is FinishReason.ABORT and form is not None and not reply.sampled.token_ids:
            raise invalid(form.param, "expected a JSON schema that the engine can compile, got one that it could not")
        if reason is FinishReason.ABORT:
            raise failed("expected a complete answer, got one that the engine aborted; send the request again")
        if reason is not None:
            reply.finished_at = now

    def _delta(self, reply: Reply, token_ids: list[int], logprobs: list[float]) -> ReplyDelta:
        reason = reply.sampled.finish_reason
        text = reply.text.decode_next(token_ids) if token_ids else ""
        if reason is not None:
            text += reply.text.finish(reason)
        return ReplyDelta(reply, token_ids, logprobs, text, reason)

    def close(self) -> None:
        """Cancel the sequences that still run or wait."""
        self._timer.cancel()
        for reply in self.replies:
            self._pool.withdraw(reply.sequence)


class CallObserver(Protocol):
    """Observes calls, for traces."""

    def begun(self, call: CompletionCall) -> str:
        """A call starts. Returns the ``traceparent`` of its span, for workers; empty if the call is not traced."""
        ...

    def answered(self, running: RunningCall, begun_at: float) -> None:
        """A call is over, or its requester left. ``begun_at``: when its trajectory's first call was made."""
        ...


@dataclass(frozen=True)
class NoCallObserver:
    """A ``CallObserver`` that does nothing."""

    def begun(self, call: CompletionCall) -> str:
        """Do nothing."""
        return ""

    def answered(self, running: RunningCall, begun_at: float) -> None:
        """Do nothing."""
