"""A hand-written engine and tokenizer: deterministic, and slow, failing or held where a test says so."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from streamrl.producers.generation.engines.port import (
    Decode,
    GenerationRequest,
    Interrupted,
    TokenDelta,
    refuse_unfit,
)
from streamrl.schemas.errors import EngineError, WeightsError
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.trajectories import FinishReason, Prompt, SamplingParams

VOCAB_SIZE = 128


@dataclass
class FakeEngine:
    """Samples ``length`` tokens per request, ``chunk`` per delta, that depend on the request alone.

    ``failures``: how often each request (or ``"*"``: the next ones of any) still fails, from token ``fails_at`` on.
    ``hold_at``: requests wait before this token until ``release`` is set, but for the ``unheld``. ``delay_s``: pause
    before each delta.
    ``refuse``: versions not adopted. ``longest``: tokens of a prompt at most, as its model would have it. ``sampled``
    counts all tokens.
    """

    name: str = "fake"
    max_num_seqs: int = 8
    kv_tokens: int | None = None
    length: int = 8
    chunk: int = 4
    delay_s: float = 0.0
    hold_at: int | None = None
    unheld: frozenset[str] = frozenset()
    failures: dict[str, int] = field(default_factory=dict)
    fails_at: int = 0
    refuse: set[PolicyVersion] = field(default_factory=set)
    finish_reason: FinishReason = FinishReason.STOP
    longest: int = 1 << 20
    start_error: Exception | None = None
    start_delay_s: float = 0.0
    release: asyncio.Event = field(default_factory=asyncio.Event)
    version: PolicyVersion | None = None
    adopted: list[tuple[PolicyVersion, list[str]]] = field(default_factory=list)
    requests: list[GenerationRequest] = field(default_factory=list)
    running: int = 0
    sampled: int = 0
    asked: dict[str, asyncio.Event] = field(default_factory=dict)
    left_early: int = 0
    started: bool = False
    closed: bool = False

    def __post_init__(self) -> None:
        self._slots = asyncio.Semaphore(self.max_num_seqs)

    async def start(self) -> None:
        await asyncio.sleep(self.start_delay_s)
        if self.start_error is not None:
            raise self.start_error
        self.started = True

    async def generate(self, request: GenerationRequest) -> AsyncIterator[TokenDelta]:
        assert self.started
        assert self.version is not None, "generation before the first weights"
        refuse_unfit(request.prompt_token_ids, self.longest)
        self.requests.append(request)
        async with self._slots, aclosing(self._sample(request)) as deltas:
            async for delta in deltas:
                yield delta

    async def _sample(self, request: GenerationRequest) -> AsyncGenerator[TokenDelta, None]:
        self.running += 1
        finished = False
        asked = self.asked[request.request_id] = asyncio.Event()
        try:
            for start in range(len(request.prefix_token_ids), self.length, self.chunk):
                is_held = self.hold_at is not None and start >= self.hold_at
                if is_held and request.request_id not in self.unheld:
                    await first_of(self.release.wait(), asked.wait())
                await asyncio.sleep(self.delay_s)
                if asked.is_set():
                    raise Interrupted("told to")
                if start >= self.fails_at:
                    self._fail_if_told(request.request_id)
                self.sampled += min(self.chunk, self.length - start)
                token_ids = fake_tokens(request, self.length)[start : start + self.chunk]
                finished = start + self.chunk >= self.length
                assert self.version is not None
                logprobs = [-0.5 - token / VOCAB_SIZE for token in token_ids]
                yield TokenDelta(token_ids, logprobs, self.version, self.finish_reason if finished else None)
        finally:
            self.running -= 1
            del self.asked[request.request_id]
            self.left_early += not finished

    def _fail_if_told(self, request_id: str) -> None:
        for key in (request_id, "*"):
            if self.failures.get(key, 0) > 0:
                self.failures[key] -= 1
                raise EngineError(f"fake failure of {request_id}")

    def interrupt(self, request_id: str) -> bool:
        if (asked := self.asked.get(request_id)) is None:
            return False
        asked.set()
        return True

    async def adopt(self, directory: Path, version: PolicyVersion) -> None:
        if version in self.refuse:
            raise WeightsError(f"fake refusal of {version}")
        self.adopted.append((version, sorted(path.name for path in directory.iterdir() if path.name[0] != ".")))
        self.version = version

    async def close(self) -> None:
        self.closed = True


async def first_of(*waiting: Coroutine[Any, Any, object]) -> None:
    """Until one of them ends."""
    tasks = [asyncio.ensure_future(one) for one in waiting]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


def fake_tokens(request: GenerationRequest, length: int) -> list[int]:
    """The tokens that the fake engine samples for a request."""
    seed = xxhash.xxh32_intdigest(request.request_id.encode()) + sum(request.prompt_token_ids)
    return [(seed + 7 * position) % VOCAB_SIZE for position in range(length)]


class FakeTokenizer:
    """One token per character; it has no chat template."""

    def encode_prompt(self, prompt: Prompt) -> list[int]:
        if not isinstance(prompt.content, str):
            raise ValueError("this tokenizer has no chat template")
        return [ord(character) % VOCAB_SIZE for character in prompt.content]

    def decoder_for(self, sampling: SamplingParams) -> Decode:
        return self.decode

    def decode(self, token_ids: Sequence[int]) -> str:
        return " ".join(map(str, token_ids))
