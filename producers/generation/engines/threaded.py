"""An engine over a decoder: a thread of its own computes, and the event loop receives finished chunks of tokens.

Uses neither torch nor any library for generation. The event loop queues commands (start, drop, adopt), which the thread
executes between two decode steps, so each token belongs to exactly one version. Stop strings are found here for all
decoders. Decoders themselves end a completion only at an end-of-sequence token or at its length limit.

Invariants: every_delta_is_of_one_version; one_wakeup_per_step; closing_the_iterator_frees_the_slot.
"""

import asyncio
import queue
import secrets
import threading
from collections.abc import AsyncIterator, Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from streamrl.bus.waiting import in_thread
from streamrl.producers.generation.engines.model_files import ModelFacts
from streamrl.producers.generation.engines.port import (
    ActiveCompletion,
    Decoder,
    DecoderLost,
    GenerationRequest,
    Interrupted,
    TokenDelta,
    Tokenizer,
    refuse_unfit,
    refuse_unknown,
)
from streamrl.producers.generation.incremental_text import StopMatcher
from streamrl.producers.generation.pace import CHUNK_TOKENS
from streamrl.schemas.errors import EngineError, PromptRefused
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.trajectories import FinishReason

log = structlog.get_logger()

_JOIN_S = 30.0
"""Longest wait, in seconds, for a thread that is in a decode step or adopts weights."""
_UNPUBLISHED = PolicyVersion(0, 0)
"""Version of the weights that a model is loaded with; trainers number lineages from 1."""


class ThreadedEngine:
    """An ``Engine`` with a thread: requests wait in order of arrival while ``max_num_seqs`` completions are running.

    ``chunk_tokens``: tokens of a completion that are gathered before they are handed over. A change of weights and the
    end of a completion hand over at once. ``open_tokenizer``: called at the first request with stop strings; without it
    such requests are refused.
    """

    def __init__(
        self,
        decoder: "Decoder[Any]",
        max_num_seqs: int,
        chunk_tokens: int = CHUNK_TOKENS,
        open_tokenizer: Callable[[], Tokenizer] | None = None,
    ) -> None:
        self.name = decoder.name
        self.max_num_seqs = max_num_seqs
        self._decoder = decoder
        self._chunk_tokens = chunk_tokens
        self._version = _UNPUBLISHED
        self._open_tokenizer = open_tokenizer
        self._tokenizer: Tokenizer | None = None
        self._facts: ModelFacts | None = None
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._active: set[ActiveCompletion] = set()
        self._requested: dict[str, ActiveCompletion] = {}
        self._outbox: list[tuple[ActiveCompletion, TokenDelta | EngineError]] = []
        self._stopping, self._ended_by = False, ""
        self._gate, self._closed = threading.Lock(), False
        self._thread: threading.Thread | None = None
        self._ended = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop
        self._adopting = asyncio.Lock()

    @property
    def kv_tokens(self) -> int | None:
        """See ``Engine``."""
        return self._decoder.kv_tokens

    async def start(self) -> None:
        """Load the model in the engine's thread.

        If the caller is cancelled or times out, the thread aborts loading and ends.

        Raises:
            ModelError: the model cannot be loaded.
        """
        self._loop = asyncio.get_running_loop()
        loaded: asyncio.Future[ModelFacts] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, args=(loaded,), name=f"{self.name}-engine", daemon=True)
        self._thread.start()
        try:
            self._facts = await loaded
        except asyncio.CancelledError:
            self._commands.put(self._stop)
            self._decoder.give_up()
            raise

    async def generate(self, request: GenerationRequest) -> AsyncIterator[TokenDelta]:
        """Sample one completion. Closing the iterator early frees its slot.

        Raises:
            EngineError: the engine failed or is closed.
            PromptRefused: the prompt does not fit the model.
        """
        # Refusals are raised here, in the caller, before the engine's thread gets the request.
        completion = ActiveCompletion(request, self._limit(request), self._seed(request))
        self._submit(partial(self._begin, completion))
        self._requested[request.request_id] = completion
        ended = False
        try:
            while not ended:
                delta = await completion.mailbox.get()
                ended = isinstance(delta, EngineError) or delta.finish_reason is not None
                if isinstance(delta, EngineError):
                    raise delta
                yield delta
        finally:
            if self._requested.get(request.request_id) is completion:
                del self._requested[request.request_id]
            # Queued without the lock: it does not matter if the thread ends without executing a drop.
            if not ended and not self._closed:
                self._commands.put(partial(self._drop, completion))

    def interrupt(self, request_id: str) -> bool:
        """See ``Engine``."""
        completion = self._requested.get(request_id)
        if completion is None or self._closed:
            return False
        self._commands.put(partial(self._interrupt, completion))
        return True

    async def adopt(self, directory: Path, version: PolicyVersion) -> None:
        """See ``Engine``."""
        self._running_facts()
        # One adoption at a time. Weights are read outside the engine's thread, so decoding continues during the read.
        async with self._adopting:
            # A cancelled caller waits for the reading to end: of two readings, one could get the other's sent weights.
            weights = await in_thread(self._decoder.read_weights, directory, on_cancel=self._decoder.give_up)
            adopted: asyncio.Future[None] = self._loop.create_future()
            self._submit(partial(self._adopt, weights, version, adopted))
            await adopted

    async def close(self) -> None:
        """Stop the thread and fail all running completions; idempotent.

        A thread that does not return from the decoder's library is left running, with an error in the log. It ends with
        the process, and so do the processes that it started.
        """
        thread, self._thread = self._thread, None
        if thread is None:
            return
        if not self._closed:
            self._commands.put(self._stop)
        if self._facts is None:
            self._decoder.give_up()
        # Not joined in another thread, which would outlive a cancelled caller. The event loop must also run, to deliver
        # the last tokens of this thread.
        try:
            async with asyncio.timeout(_JOIN_S):
                await self._ended.wait()
        except TimeoutError:
            log.error("engine thread still busy, left to end with the process", engine=self.name, waited_s=_JOIN_S)
        else:
            thread.join()  # it is at its last line

    def _limit(self, request: GenerationRequest) -> int:
        facts = self._running_facts()
        prompt = request.prompt_token_ids
        refuse_unfit(prompt, facts.max_length - 1)  # a completion needs at least one position after it
        refuse_unknown(prompt, facts.vocab_size)
        prefix = request.prefix_token_ids
        if prefix and not 0 <= min(prefix) <= max(prefix) < facts.vocab_size:
            found = f"{min(prefix)} to {max(prefix)}"
            raise EngineError(f"expected a prefix of token ids below {facts.vocab_size}, got {found}")
        return min(request.sampling.max_completion_length, facts.max_length - len(prompt))

    def _running_facts(self) -> ModelFacts:
        if self._facts is None or self._closed:
            raise self._not_running()
        return self._facts

    def _not_running(self) -> EngineError:
        found = f"one that has not started or has ended{self._ended_by}"
        return EngineError(f"expected a running {self.name} engine, got {found}")

    def _submit(self, command: Callable[[], None]) -> None:
        # Checked and queued under the lock: otherwise ``_end`` could run its last commands in between, without this.
        with self._gate:
            if self._closed:
                raise self._not_running()
            self._commands.put(command)

    @staticmethod
    def _seed(request: GenerationRequest) -> int:
        seed = request.sampling.seed
        return secrets.randbits(63) if seed is None else seed

    # The methods below run in the engine's thread, except for ``_deliver``. They need no lock: the two sides share only
    # the queue of commands, ``_closed`` (under ``_gate``, so that no command is queued after the last check),
    # ``_ended_by`` (set before ``_closed``) and the mailboxes. ``_requested`` belongs to the event loop.

    def _run(self, loaded: "asyncio.Future[ModelFacts]") -> None:
        try:
            self._work(loaded)
        finally:
            self._call_loop(self._ended.set)

    def _work(self, loaded: "asyncio.Future[ModelFacts]") -> None:
        try:
            facts = self._decoder.load()
        except BaseException as error:
            # Any exception, even SystemExit: ``start`` must not wait forever.
            self._settle(loaded, error)
            return
        self._settle(loaded, facts)
        try:
            while not self._stopping:
                # If there is nothing to decode, the thread waits for a command; otherwise it only checks for one.
                self._run_commands(wait=not self._decoder.busy)
                if self._decoder.busy and not self._stopping:
                    self._step()
                self._hand_over()
        finally:
            self._end()

    def _end(self) -> None:
        # Accepts no more commands, then runs those in the queue, so that no caller is left waiting.
        with self._gate:
            self._closed = True
        self._stopping = True
        self._run_commands(wait=False)
        said = f"expected the {self.name} engine to keep running, but it has ended{self._ended_by}"
        self._fail_all(f"{said}; repeat the request elsewhere")
        self._hand_over()
        self._decoder.close()

    def _run_commands(self, *, wait: bool) -> None:
        try:
            self._commands.get(block=wait)()
            while True:
                self._commands.get_nowait()()
        except queue.Empty:
            return

    def _step(self) -> None:
        try:
            self._process(self._decoder.step())
        except DecoderLost as error:
            self._give_up(error)
        except Exception as error:
            # The library's state is unknown now, so all completions fail, and callers may repeat their requests.
            log.exception("engine step failed", engine=self.name, running=len(self._active))
            self._decoder.clear()
            self._fail_all(f"expected a decode step, got {type(error).__name__}: {error}; the request may be repeated")

    def _process(self, advanced: "Iterable[ActiveCompletion]") -> None:
        """Queue the tokens of completions that ended or have a full chunk, all sampled by the current version."""
        for completion in advanced:
            if completion.matcher is not None and completion.matcher.is_complete(
                completion.generated, completion.tokens
            ):
                if completion.finish_reason is None:
                    self._decoder.drop(completion)
                completion.finish_reason = FinishReason.STOP
            has_ended = completion.finish_reason is not None
            if has_ended:
                self._active.discard(completion)
            if has_ended or len(completion.tokens) >= (completion.request.chunk_tokens or self._chunk_tokens):
                self._outbox.append((completion, completion.take(self._version)))

    def _give_up(self, error: Exception) -> None:
        log.error("engine lost", engine=self.name, running=len(self._active), error=str(error))
        self._stopping, self._ended_by = True, f": {error}"

    def _begin(self, completion: "ActiveCompletion") -> None:
        if self._stopping:
            self._outbox.append((completion, self._not_running()))
            return
        try:
            if completion.request.sampling.stop:
                completion.matcher = StopMatcher(completion.request.sampling, self._opened_tokenizer())
            if (reason := self._reason_to_end_at(completion)) is not None:
                completion.finish_reason = reason
                self._outbox.append((completion, completion.take(self._version)))
                return
            self._decoder.queue(completion)
            self._active.add(completion)
        except DecoderLost as error:
            self._give_up(error)
            self._outbox.append((completion, self._not_running()))
        except PromptRefused as error:
            self._outbox.append((completion, error))
        except EngineError as error:
            self._outbox.append((completion, EngineError(f"expected a request the engine can run, got: {error}")))
        except Exception as error:
            # The request has not started, so the error is the request's own and does not affect others.
            detail = f"expected a request the engine can run, got {type(error).__name__}: {error}"
            self._outbox.append((completion, PromptRefused(f"refused by {self.name}", detail)))

    def _reason_to_end_at(self, completion: "ActiveCompletion") -> FinishReason | None:
        """Why a completion's prefix is already complete; None if there is more to sample."""
        prefix = completion.request.prefix_token_ids
        if not prefix:
            return None
        found = completion.matcher is not None and completion.matcher.start_after(prefix)
        assert self._facts is not None, "requests come after the start"
        if found or prefix[-1] in self._facts.ends.ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if completion.generated >= completion.limit else None

    def _opened_tokenizer(self) -> Tokenizer:
        # Opened only when needed: most runs have no stop strings.
        if self._tokenizer is None:
            if self._open_tokenizer is None:
                raise EngineError("no stop strings, since this engine has no tokenizer")
            self._tokenizer = self._open_tokenizer()
        return self._tokenizer

    def _drop(self, completion: "ActiveCompletion") -> None:
        if completion in self._active:
            self._active.discard(completion)
            try:
                self._decoder.drop(completion)
            except DecoderLost as error:
                self._give_up(error)

    def _interrupt(self, completion: "ActiveCompletion") -> None:
        if completion in self._active:  # otherwise it has ended already
            self._drop(completion)
            self._outbox.append((completion, completion.take(self._version)))
            self._outbox.append((completion, Interrupted("expected a complete completion, but it was interrupted")))

    def _adopt(self, weights: Any, version: PolicyVersion, adopted: "asyncio.Future[None]") -> None:
        if self._stopping:
            self._settle(adopted, self._not_running())
            return
        try:
            self._process(self._decoder.pause())
            # Tokens sampled so far are handed over with the old version, since a delta has one version.
            for completion in self._active:
                if completion.tokens:
                    self._outbox.append((completion, completion.take(self._version)))
            self._decoder.adopt(weights)
        except Exception as error:  # some tensors may be new and some old, so no more tokens may be sampled
            log.exception("weights half adopted", engine=self.name, version=str(version))
            ended = EngineError(f"expected checked weights to load, got {error}; restart the worker")
            self._settle(adopted, ended)
            self._stopping, self._ended_by = True, f": {ended}"
            return
        self._version = version
        self._settle(adopted, None)

    def _stop(self) -> None:
        self._stopping = True

    def _fail_all(self, message: str) -> None:
        self._outbox.extend((completion, EngineError(message)) for completion in self._active)
        self._active.clear()

    def _hand_over(self) -> None:
        # One wake-up of the event loop for each step, for all completions together: wake-ups are a step's main cost.
        if self._outbox:
            batch, self._outbox = self._outbox, []
            self._call_loop(partial(self._deliver, batch))

    @staticmethod
    def _deliver(batch: "list[tuple[ActiveCompletion, TokenDelta | EngineError]]") -> None:
        for completion, delta in batch:
            completion.mailbox.put_nowait(delta)

    def _settle(self, future: "asyncio.Future[Any]", result: object) -> None:
        def settle() -> None:
            # If its caller was cancelled, the future is done, and setting a result would raise InvalidStateError.
            if not future.done() and isinstance(result, BaseException):
                future.set_exception(result)
            elif not future.done():
                future.set_result(result)

        self._call_loop(settle)

    def _call_loop(self, callback: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:
            self._stopping = True  # the event loop was closed, so no caller is left
