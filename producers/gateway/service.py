"""Checks requests against the run's engine and limits, and turns them into calls. Knows nothing of HTTP."""

from collections.abc import Sequence
from dataclasses import dataclass

from streamrl.bus.waiting import in_thread
from streamrl.producers.gateway.answers import AnswerShape
from streamrl.producers.gateway.calls import (
    DATASET,
    AnswerOptions,
    CallObserver,
    CallTraining,
    CompletionCall,
    EncodedPrompt,
    Requester,
    RunningCall,
    ServedModel,
)
from streamrl.producers.gateway.feedback import FeedbackDesk
from streamrl.producers.gateway.formats import AnswerFormat, format_of
from streamrl.producers.gateway.links import WorkerPool
from streamrl.producers.gateway.refusals import ApiError, invalid
from streamrl.producers.gateway.requests import ChatCompletionRequest, SamplingFields, TextCompletionRequest
from streamrl.producers.gateway.sessions import Segment, Session
from streamrl.producers.gateway.text import LONG_TEXT, chat_token_ids, conversation_text
from streamrl.producers.lengths.predictor import LengthPredictor, ObservedCompletion
from streamrl.schemas.trajectories import FinishReason, LengthEstimate, Prompt, SamplingParams

MAX_SEQUENCES = 64
"""Most completions of one request: its prompts times n."""
REQUEST_TIMEOUT_S = 3600.0
"""Seconds from a request's start to the end of its answer: more than the longest completions take on a busy worker. A
lost worker is noticed much sooner, by its silence."""
TEXT_TOKENS = 16
"""Tokens of a text completion that does not set ``max_tokens``: OpenAI's default."""


@dataclass
class CompletionService:
    """Makes calls from requests, and runs them. ``feedback``: keeps the calls to be trained on, and their sessions.

    ``observer``: observes calls.
    """

    model: ServedModel
    pool: WorkerPool
    predictor: LengthPredictor
    feedback: FeedbackDesk
    observer: CallObserver

    async def chat_call(self, request: ChatCompletionRequest, requester: Requester) -> CompletionCall:
        """The call that a chat request asks for.

        Raises:
            ApiError: the request cannot be served.
        """
        self._check(request)
        form = self._format(request)
        text = conversation_text(request)
        sampling = self._sampling(request, self._limit(request.limit, self.model.loop.max_completion_length))
        tools = request.offered_tools if form is None else ()
        if tools:  # some models write special tokens around tool calls
            sampling = sampling.model_copy(update={"skip_special_tokens": False})
        n = self._count(request.n, 1)
        turn = None
        if form is None and (joined := self._session(request, requester, sampling, n)) is not None:
            book = self.feedback.book
            if len(text) > LONG_TEXT:
                candidates = list(book.candidates(joined, sampling.temperature))
                place = await in_thread(book.find_place, candidates, request)
                prompt, turn = book.enter(joined, place, text)
            else:
                prompt, turn = book.chat_turn(joined, request, text, sampling.temperature)
        elif len(text) > LONG_TEXT:
            prompt = EncodedPrompt(text, await in_thread(chat_token_ids, self.model.tokenizer, request))
        else:
            prompt = EncodedPrompt(text, chat_token_ids(self.model.tokenizer, request))
        return CompletionCall(
            "chat",
            (self._fitting(prompt, "messages"),),
            n,
            sampling,
            requester,
            requester.session or request.prompt_cache_key,
            AnswerOptions.of(request, logprobs=bool(request.logprobs), form=form, tools=tools),
            CallTraining(
                kept=turn is not None or (form is None and self._trains(request, requester, sampling, n)),
                constrained=form is not None and _agrees(request, requester, sampling),
                turn=turn,
            ),
        )

    async def text_call(self, request: TextCompletionRequest, requester: Requester) -> CompletionCall:
        """The call that a text request asks for.

        Raises:
            ApiError: the request cannot be served.
        """
        self._check(request)
        n = self._count(request.n, len(request.prompts))
        if sum(len(prompt) for prompt in request.prompts) > LONG_TEXT:
            prompts = await in_thread(self._encoded, request.prompts)
        else:
            prompts = self._encoded(request.prompts)
        sampling = self._sampling(request, self._limit(request.max_tokens, TEXT_TOKENS))
        turn = None
        if (joined := self._session(request, requester, sampling, n * len(prompts))) is not None:
            prompt, turn = self.feedback.book.text_turn(joined, prompts[0], sampling.temperature)
            prompts = (self._fitting(prompt, "prompt"),)
        return CompletionCall(
            "text",
            prompts,
            n,
            sampling,
            requester,
            requester.session or request.prompt_cache_key,
            AnswerOptions.of(request, logprobs=request.logprobs is not None, form=None, tools=()),
            CallTraining(kept=turn is not None or self._trains(request, requester, sampling, n), turn=turn),
        )

    def run(self, call: CompletionCall) -> tuple[RunningCall, AnswerShape]:
        """Start a call.

        Raises:
            ApiError: there is no room, or the key has reached a limit.
        """
        traceparent = self.observer.begun(call)
        running = RunningCall(call, self.model, self.pool, self._estimate, REQUEST_TIMEOUT_S, traceparent)
        call.requester.use.enter()
        try:
            running.submit()
        except BaseException:
            call.requester.use.leave(0)
            raise
        return running, AnswerShape(running)

    def end(self, running: RunningCall) -> None:
        """End a call, answered or abandoned: free its slots, charge its key, and keep it for feedback."""
        running.close()
        call = running.call
        call.requester.use.leave(running.prompt_tokens + running.completion_tokens)
        turn = call.training.turn
        segment = turn.segment if turn is not None else None
        if running.is_over:
            segment = self._keep(running)
        self.observer.answered(running, call.created_at if segment is None else segment.created_at)

    def _keep(self, running: RunningCall) -> Segment | None:
        """Teach the length predictor, and keep the call for training; the segment that it is a turn of, if any."""
        call, training = running.call, running.call.training
        for reply in running.replies:
            self.predictor.observe(
                ObservedCompletion(
                    _prompt(reply.prompt),
                    call.public_id,
                    len(reply.sampled.token_ids),
                    censored=reply.sampled.finish_reason is FinishReason.LENGTH,
                )
            )
        if training.turn is not None:
            (reply,) = running.replies
            return self.feedback.book.record_turn(running, training.turn, self.model.parse(reply, call))
        if training.kept:
            self.feedback.keep(running)
        if training.constrained:
            self.feedback.pass_over(call)
        return None

    def _check(self, request: SamplingFields) -> None:
        if request.model != self.model.name:
            raise ApiError(
                404,
                f"expected model {self.model.name}, got {request.model!r:.80}",
                kind="not_found_error",
                param="model",
                code="model_not_found",
            )
        request.check()

    def _format(self, request: ChatCompletionRequest) -> AnswerFormat | None:
        form = format_of(request)
        engine = self.model.engine
        if form is not None and engine != "vllm":
            asked, free = ("tool_choice", "auto or none") if form.param == "tools" else ("response_format", "text")
            raise invalid(
                asked,
                f"expected {asked} {free} with generation.engine = {engine}, got another: only vllm can force a "
                "completion to fit a schema",
            )
        return form

    def _count(self, n: int | None, prompts: int) -> int:
        n = n or 1
        if n * prompts > MAX_SEQUENCES:
            raise invalid("n", f"expected at most {MAX_SEQUENCES} completions in one request, got {n * prompts}")
        return n

    def _limit(self, wanted: int | None, default: int) -> int:
        longest = self.model.loop.max_completion_length
        if wanted is not None and wanted > longest:
            raise invalid(
                "max_tokens", f"expected max_tokens up to {longest} (loop.max_completion_length), got {wanted}"
            )
        return min(longest, wanted or default)

    def _sampling(self, request: SamplingFields, limit: int) -> SamplingParams:
        """The request's sampling parameters; missing ones are the run's own, under which the model is trained."""
        loop = self.model.loop
        sampling = SamplingParams(
            max_completion_length=limit,
            temperature=loop.temperature if request.temperature is None else request.temperature,
            top_p=request.top_p or loop.top_p,
            top_k=loop.top_k if request.top_k is None else request.top_k,
            min_p=loop.min_p if request.min_p is None else request.min_p,
            stop=request.stops,
            include_stop_str_in_output=request.include_stop_str_in_output,
            skip_special_tokens=(
                loop.skip_special_tokens if request.skip_special_tokens is None else request.skip_special_tokens
            ),
            seed=request.seed,
        )
        if self.model.engine == "vllm":
            self._check_vllm(sampling)
        return sampling

    def _check_vllm(self, sampling: SamplingParams) -> None:
        """Refuse truncation or a temperature that vLLM was not started for: its log-probabilities would differ from the
        trainer's.
        """
        ours = self.model.loop.sampling_params()
        if sampling.truncates and not ours.truncates:
            raise invalid(
                "top_p",
                "expected no top_p, top_k or min_p, got one: this run's vLLM was started for sampling from all tokens",
            )
        if ours.truncates and sampling.temperature not in (0.0, ours.temperature):
            raise invalid(
                "temperature",
                f"expected temperature {ours.temperature:g} or 0, got {sampling.temperature:g}: this run's vLLM was "
                f"started for truncated sampling at temperature {ours.temperature:g}",
            )

    def _session(
        self, request: SamplingFields, requester: Requester, sampling: SamplingParams, sequences: int
    ) -> Session | None:
        """The session whose next turn this call is; None if it has no session, or is not to be trained on.

        A greedy call and a call with a forced format are no turns. The session's next turn reads their text as it reads
        a tool's output.
        """
        if requester.session is None or not _agrees(request, requester, sampling):
            return None
        if sequences > 1:
            raise invalid(
                "n", f"expected one completion in a call of a session, got {sequences}: a session has no branches"
            )
        return self.feedback.book.of(requester.use.key.name, requester.session)

    def _trains(self, request: SamplingFields, requester: Requester, sampling: SamplingParams, n: int) -> bool:
        # A call that teaches nothing would only take the place of a group that does.
        return _agrees(request, requester, sampling) and (n > 1 or self.feedback.learns_alone)

    def _encoded(self, prompts: Sequence[str | list[int]]) -> tuple[EncodedPrompt, ...]:
        return tuple(self._fitting(self._encode(prompt), "prompt") for prompt in prompts)

    def _encode(self, prompt: str | list[int]) -> EncodedPrompt:
        if isinstance(prompt, str):
            return EncodedPrompt(prompt, self.model.tokenizer.encode_text(prompt))
        try:
            return EncodedPrompt(self.model.tokenizer.decode_with_special(prompt), prompt)
        except Exception as error:  # tokenizers raise various errors for unknown ids
            raise invalid("prompt", "expected token ids of this model, got others") from error

    def _fitting(self, prompt: EncodedPrompt, param: str) -> EncodedPrompt:
        tokens, longest = len(prompt.token_ids), self.model.loop.max_prompt_length
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


def _agrees(request: SamplingFields, requester: Requester, sampling: SamplingParams) -> bool:
    # A greedy token was not sampled, so it has no probability to weight a gradient with.
    return requester.use.key.train and not request.prefers_no_training() and sampling.temperature > 0


def _prompt(prompt: EncodedPrompt) -> Prompt:
    return Prompt(prompt_id=DATASET, dataset=DATASET, content=prompt.text)
