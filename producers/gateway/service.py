"""Checks what is asked for against what this run's engine and limits allow, and makes calls of it. Knows no HTTP."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import structlog

from streamrl.bus.threads import in_thread
from streamrl.producers.gateway.answers import AnswerShape
from streamrl.producers.gateway.calls import (
    DATASET,
    CallObserver,
    CompletionCall,
    EncodedPrompt,
    NobodyTraces,
    RunningCall,
)
from streamrl.producers.gateway.feedback import FeedbackDesk
from streamrl.producers.gateway.formats import AnswerFormat, format_of
from streamrl.producers.gateway.keys import KeyUse
from streamrl.producers.gateway.links import WorkerPool
from streamrl.producers.gateway.refusals import ApiError, invalid
from streamrl.producers.gateway.requests import ChatCompletionRequest, SamplingFields, TextCompletionRequest
from streamrl.producers.gateway.sessions import Segment, Session, SessionBook
from streamrl.producers.gateway.settings import GatewaySettings
from streamrl.producers.gateway.text import (
    LONG_TEXT,
    ChatTokenizer,
    ReplyText,
    SpecialsShown,
    chat_token_ids,
    conversation_text,
)
from streamrl.producers.gateway.tool_calls import ParsedReply, ToolCallParser
from streamrl.producers.lengths.predictor import LengthPredictor, ObservedCompletion
from streamrl.schemas.settings import LoopSettings
from streamrl.schemas.trajectories import FinishReason, LengthEstimate, Prompt, SamplingParams

log = structlog.get_logger()

TEXT_TOKENS = 16
"""Of a text completion that does not say how many: OpenAI's default."""


@dataclass
class CompletionService:
    """``engine``: its name in the settings, by which its limits are known; ``feedback`` None: nothing is kept.

    ``learns_alone``: whether something is learnt from a completion that is the only one of its prompt. ``sessions``
    None: calls of one session are not joined. ``calls`` is told of calls.
    """

    model: str
    engine: str
    loop: LoopSettings
    settings: GatewaySettings
    tokenizer: ChatTokenizer
    parser: ToolCallParser
    pool: WorkerPool
    predictor: LengthPredictor
    feedback: FeedbackDesk | None = None
    learns_alone: bool = True
    sessions: SessionBook | None = None
    calls: CallObserver = field(default_factory=NobodyTraces)

    async def chat_call(self, request: ChatCompletionRequest, use: KeyUse, session: str | None) -> CompletionCall:
        """What a conversation asks for.

        Raises:
            ApiError: it cannot be done.
        """
        self._check(request)
        form = self._format(request)
        text = conversation_text(request)
        sampling = self._sampling(request, self._limit(request.limit, self.loop.max_completion_length))
        n = self._count(request.n, 1)
        turn = None
        if form is None and (begun := self._session(request, use, session, sampling, n)) is not None:
            book, joined = begun
            if len(text) > LONG_TEXT:
                candidates = list(book.candidates(joined, sampling.temperature))
                place = await in_thread(book.find_place, candidates, request)
                prompt, turn = book.enter(joined, place, text)
            else:
                prompt, turn = book.chat_turn(joined, request, text, sampling.temperature)
        elif len(text) > LONG_TEXT:
            prompt = EncodedPrompt(text, await in_thread(chat_token_ids, self.tokenizer, request))
        else:
            prompt = EncodedPrompt(text, chat_token_ids(self.tokenizer, request))
        return CompletionCall(
            "chat",
            self.model,
            (self._fitting(prompt, "messages"),),
            n,
            sampling,
            use,
            train=turn is not None or (form is None and self._trains(request, use, sampling, n)),
            format=form,
            constrained=form is not None and self._agrees(request, use, sampling),
            stream=bool(request.stream),
            include_usage=bool(request.stream_options and request.stream_options.include_usage),
            logprobs=bool(request.logprobs),
            return_token_ids=bool(request.return_token_ids),
            tools=tuple(request.offered_tools) if form is None else (),
            session=session or request.prompt_cache_key,
            turn=turn,
        )

    async def text_call(self, request: TextCompletionRequest, use: KeyUse, session: str | None) -> CompletionCall:
        """What a text completion asks for.

        Raises:
            ApiError: it cannot be done.
        """
        self._check(request)
        n = self._count(request.n, len(request.prompts))
        if sum(len(prompt) for prompt in request.prompts) > LONG_TEXT:
            prompts = await in_thread(self._encoded, request.prompts)
        else:
            prompts = self._encoded(request.prompts)
        sampling = self._sampling(request, self._limit(request.max_tokens, TEXT_TOKENS))
        turn = None
        if (begun := self._session(request, use, session, sampling, n * len(prompts))) is not None:
            book, joined = begun
            prompt, turn = book.text_turn(joined, prompts[0], sampling.temperature)
            prompts = (self._fitting(prompt, "prompt"),)
        return CompletionCall(
            "text",
            self.model,
            prompts,
            n,
            sampling,
            use,
            train=turn is not None or self._trains(request, use, sampling, n),
            stream=bool(request.stream),
            include_usage=bool(request.stream_options and request.stream_options.include_usage),
            logprobs=request.logprobs is not None,
            return_token_ids=bool(request.return_token_ids),
            session=session or request.prompt_cache_key,
            turn=turn,
        )

    def run(self, call: CompletionCall) -> tuple[RunningCall, AnswerShape]:
        """Begin with it.

        Raises:
            ApiError: there is no room, or the key is at a limit.
        """
        running = RunningCall(
            call,
            self.pool,
            self._estimate,
            lambda: self._new_text(call),
            self.settings.request_timeout_s,
            self.calls.begun(call),
        )
        call.use.enter()
        try:
            running.submit()
        except BaseException:
            call.use.leave(0)
            raise
        return running, AnswerShape(running, self.tokenizer, self.parser)

    def end(self, running: RunningCall) -> None:
        """It is answered, or nobody waits for the answer: frees its slots, charges its key, keeps it for feedback."""
        running.close()
        call = running.call
        call.use.leave(running.prompt_tokens + running.completion_tokens)
        segment = call.turn.segment if call.turn is not None else None
        if running.is_over:
            segment = self._keep(running)
        self.calls.answered(running, call.created_at if segment is None else segment.created_at)

    def _keep(self, running: RunningCall) -> Segment | None:
        """Learn from it how long answers are, and keep it to be trained on; what it is a turn of, if it is one."""
        call = running.call
        for reply in running.replies:
            self.predictor.observe(
                ObservedCompletion(
                    _prompt(reply.prompt),
                    call.public_id,
                    len(reply.sampled.token_ids),
                    censored=reply.sampled.finish_reason is FinishReason.LENGTH,
                )
            )
        if call.turn is not None:
            assert self.sessions is not None, "who else would have made the turn"
            return self.sessions.add(running, call.turn, self._answered(running))
        if call.train and self.feedback is not None:
            self.feedback.keep(running)
        if call.constrained and self.feedback is not None:
            self.feedback.pass_over(call)
        return None

    def _answered(self, running: RunningCall) -> ParsedReply:
        """What the requester of a single reply was told."""
        (reply,), tools = running.replies, running.call.tools
        return self.parser.parse(reply.text.text, tools) if tools else ParsedReply(reply.text.text, ())

    def _check(self, request: SamplingFields) -> None:
        if request.model != self.model:
            raise ApiError(
                404,
                f"expected model {self.model}, got {request.model!r:.80}",
                kind="not_found_error",
                param="model",
                code="model_not_found",
            )
        request.check()

    def _format(self, request: ChatCompletionRequest) -> AnswerFormat | None:
        form = format_of(request)
        if form is not None and self.engine != "vllm":
            asked, free = ("tool_choice", "auto or none") if form.param == "tools" else ("response_format", "text")
            raise invalid(
                asked,
                f"expected {asked} {free} of a run with generation.engine = {self.engine}, got another: only vllm "
                "holds what it samples to a schema",
            )
        return form

    def _count(self, n: int | None, prompts: int) -> int:
        n = n or 1
        if n * prompts > self.settings.max_sequences:
            raise invalid(
                "n", f"expected at most {self.settings.max_sequences} completions in one request, got {n * prompts}"
            )
        return n

    def _limit(self, wanted: int | None, default: int) -> int:
        longest = self.loop.max_completion_length
        if wanted is not None and wanted > longest:
            raise invalid(
                "max_tokens", f"expected max_tokens up to {longest} (loop.max_completion_length), got {wanted}"
            )
        return min(longest, wanted or default)

    def _sampling(self, request: SamplingFields, limit: int) -> SamplingParams:
        """What is left out is as in the run's own sampling, whose completions are what the model is trained on."""
        loop = self.loop
        sampling = SamplingParams(
            max_completion_length=limit,
            temperature=loop.temperature if request.temperature is None else request.temperature,
            top_p=request.top_p or loop.top_p,
            top_k=loop.top_k if request.top_k is None else request.top_k,
            min_p=loop.min_p if request.min_p is None else request.min_p,
            stop=request.stops,
            include_stop_str_in_output=request.include_stop_str_in_output,
            seed=request.seed,
        )
        if self.engine == "vllm":
            self._check_vllm(sampling)
        return sampling

    def _check_vllm(self, sampling: SamplingParams) -> None:
        """VLLM's log-probabilities are those of the trainer for one of two kinds of request, settled at its start."""
        ours = self.loop.sampling_params()
        if sampling.truncates and not ours.truncates:
            raise invalid(
                "top_p", "expected no top_p, top_k or min_p, got one: this run's vLLM samples from all tokens only"
            )
        if ours.truncates and sampling.temperature not in (0.0, ours.temperature):
            raise invalid(
                "temperature",
                f"expected temperature {ours.temperature:g} or 0, got {sampling.temperature:g}: this run's vLLM, which "
                "truncates, was started for that one",
            )

    def _session(
        self, request: SamplingFields, use: KeyUse, name: str | None, sampling: SamplingParams, sequences: int
    ) -> tuple[SessionBook, Session] | None:
        """The session whose next turn this is; None where it is of none, or not to be trained on.

        A greedy call is no turn, nor is one held to a format: what it says is read by the next one, as what a tool
        says is.
        """
        if name is None or self.sessions is None:
            return None
        if not self._agrees(request, use, sampling):
            return None
        if sequences > 1:
            raise invalid(
                "n", f"expected one completion in a call of a session, got {sequences}: a session is one line"
            )
        return self.sessions, self.sessions.of(use.key.name, name)

    def _trains(self, request: SamplingFields, use: KeyUse, sampling: SamplingParams, n: int) -> bool:
        # What teaches nothing would only take the place of a group that does.
        return self._agrees(request, use, sampling) and (n > 1 or self.learns_alone)

    def _agrees(self, request: SamplingFields, use: KeyUse, sampling: SamplingParams) -> bool:
        # A likeliest token was not sampled, so it has no probability to weigh a gradient with.
        return use.key.train and not request.prefers_no_training() and sampling.temperature > 0

    def _encoded(self, prompts: Sequence[str | list[int]]) -> tuple[EncodedPrompt, ...]:
        return tuple(self._fitting(self._encode(prompt), "prompt") for prompt in prompts)

    def _encode(self, prompt: str | list[int]) -> EncodedPrompt:
        if isinstance(prompt, str):
            return EncodedPrompt(prompt, self.tokenizer.encode_text(prompt))
        try:
            return EncodedPrompt(self.tokenizer.decode_with_special(prompt), prompt)
        except Exception as error:  # tokenizers raise what they like, of ids that they do not have
            raise invalid("prompt", "expected token ids of this model, got others") from error

    def _fitting(self, prompt: EncodedPrompt, param: str) -> EncodedPrompt:
        tokens, longest = len(prompt.token_ids), self.loop.max_prompt_length
        if not tokens:
            raise invalid(param, "expected a prompt of at least one token, got none")
        if tokens > longest:
            raise invalid(
                param,
                f"expected a prompt of at most {longest} tokens, got {tokens} (loop.max_prompt_length)",
                "context_length_exceeded",
            )
        return prompt

    def _estimate(self, prompt: EncodedPrompt) -> LengthEstimate:
        return self.predictor.predict(_prompt(prompt))

    def _new_text(self, call: CompletionCall) -> ReplyText:
        if call.tools:
            shown = SpecialsShown(self.tokenizer)
            return ReplyText(shown, call.sampling, self.parser.openers, shown.is_special)
        return ReplyText(self.tokenizer, call.sampling)


def _prompt(prompt: EncodedPrompt) -> Prompt:
    return Prompt(prompt_id=DATASET, dataset=DATASET, content=prompt.text)
