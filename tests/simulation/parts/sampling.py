"""An engine, its tokenizer, a scorer and prompts that take virtual time and fail by chance. They know no model."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import xxhash

from streamrl.producers.generation.engines.port import Decode, GenerationRequest, Interrupted, TokenDelta
from streamrl.producers.rewards.runner import ScoreRequest, Scores
from streamrl.schemas.errors import EngineError, PromptRefused
from streamrl.schemas.identifiers import PolicyVersion, make_prompt_id
from streamrl.schemas.trajectories import FinishReason, Prompt, SamplingParams

VOCABULARY = 64
MARKS, POSITIONS, POLICIES = 1000, 64, 32
"""Engines that are told apart, positions and policies: all of a log-probability in float32, exactly."""
MARKS_OF_A_POLICY = 1024


@dataclass(frozen=True)
class SamplingFaults:
    """Probabilities per completion: a failing engine, an aborted completion, a reward that fails or does not apply; and
    per prompt: one that the engine refuses.
    """

    engine: float = 0.0
    abort: float = 0.0
    reward_error: float = 0.0
    no_reward: float = 0.0
    unloadable: float = 0.0
    refused: float = 0.0


@dataclass
class SimEngine:
    """Samples completions whose tokens depend on the request alone, in some pieces, ``token_s`` per token.

    A log-probability says which engine sampled its token, with whose weights, and which token of the completion it is
    (``sampled_at``). ``counts``: how often it sampled each token of each request, beside all others that count there.
    """

    chance: Random
    faults: SamplingFaults
    max_num_seqs: int
    token_s: float
    longest: int
    name: str = "simulated"
    kv_tokens: int | None = None
    version: PolicyVersion | None = None
    pieces: int = 2
    counts: "Counter[tuple[str, int]]" = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._slots = asyncio.Semaphore(self.max_num_seqs)
        self._running: set[str] = set()
        self._asked: set[str] = set()
        self._policy = 0
        # Of its own and yet of the seed, without a draw.
        self._mark = 1 + xxhash.xxh32_intdigest(repr(self.chance.getstate()[1][:4]).encode()) % MARKS

    async def start(self) -> None:
        """Take a moment."""
        await asyncio.sleep(0.2 * self.chance.random())

    async def generate(self, request: GenerationRequest) -> AsyncIterator[TokenDelta]:
        """One completion."""
        draw = xxhash.xxh32_intdigest(request.request_id.encode())
        length = 1 + draw % self.longest
        group_id = request.request_id.rpartition("/")[0]
        if xxhash.xxh32_intdigest(group_id.encode()) % 1000 < 1000 * self.faults.refused:
            raise PromptRefused("longer than 2 tokens", "expected a prompt of 1 to 2 tokens, got 3")
        known = len(request.prefix_token_ids)
        async with self._slots, self._interruptible(request.request_id):
            for piece in range(1, self.pieces):
                if (end := length * piece // self.pieces) < known:
                    continue
                await self._sample(known, length * (piece - 1) / self.pieces, length * piece / self.pieces)
                if piece == 1 and self.chance.random() < self.faults.engine:
                    raise EngineError(f"simulated failure of {request.request_id}")
                if end > known:
                    yield self._delta(request, known, end)
                    known = end
                if request.request_id in self._asked:
                    raise Interrupted("told to")
            await self._sample(known, length * (self.pieces - 1) / self.pieces, length)
            aborted = self.chance.random() < self.faults.abort
            yield self._delta(request, known, length, FinishReason.ABORT if aborted else FinishReason.STOP)

    async def _sample(self, known: int, start: float, end: float) -> None:
        await asyncio.sleep(self.token_s * max(0.0, end - max(start, known)))

    def _delta(
        self, request: GenerationRequest, start: int, end: int, reason: FinishReason | None = None
    ) -> TokenDelta:
        assert self.version is not None, "generation before the first weights"
        positions = range(start, end)
        self.counts.update((request.request_id, n) for n in positions)
        tokens = [simulated_token(request.request_id, n) for n in positions]
        mark = self._mark + self._policy
        return TokenDelta(tokens, [-mark - n / POSITIONS for n in positions], self.version, reason)

    @asynccontextmanager
    async def _interruptible(self, request_id: str) -> AsyncIterator[None]:
        self._running.add(request_id)
        try:
            yield
        finally:
            self._running.discard(request_id)
            self._asked.discard(request_id)

    def interrupt(self, request_id: str) -> bool:
        """At the end of a piece; or it has no such request, and is asked for no more by leaving its deltas."""
        if request_id not in self._running or self.chance.random() < 0.5:
            return False
        self._asked.add(request_id)
        return True

    async def adopt(self, directory: Path, version: PolicyVersion) -> None:
        """Swap weights between two pieces."""
        await asyncio.sleep(0.02)
        self.version, self._policy = version, mark_of_policy(directory.parent.name)

    async def close(self) -> None:
        """Nothing is held."""


def simulated_token(request_id: str, position: int) -> int:
    """The token of a completion, whoever samples it."""
    return (xxhash.xxh32_intdigest(request_id.encode()) + position) % VOCABULARY


def mark_of_policy(policy: str) -> int:
    """What its weights, those of an arm of a split, add to the mark of an engine; 0: the served policy's, without a
    name.
    """
    return MARKS_OF_A_POLICY * (1 + xxhash.xxh32_intdigest(policy.encode()) % (POLICIES - 1)) if policy else 0


def sampled_at(logprob: float) -> tuple[int, int]:
    """Which engine sampled the token, with whose weights (``mark_of_policy``), and at which position."""
    mark, part = divmod(-logprob, 1.0)
    return int(mark), round(part * POSITIONS)


class SimTokenizer:
    """Three tokens per prompt."""

    def encode_prompt(self, prompt: Prompt) -> list[int]:
        """By the prompt's name."""
        return [xxhash.xxh32_intdigest(prompt.prompt_id.encode()) % VOCABULARY, 1, 2]

    def decoder_for(self, sampling: SamplingParams) -> Decode:
        """The same for all parameters."""
        return self.decode

    def decode(self, token_ids: Sequence[int]) -> str:
        """How many there are."""
        return f"{len(token_ids)} tokens"


@dataclass
class SimRewards:
    """One reward; the same completion always gets the same, failures aside. ``slow``: share of those that take a
    minute or so.
    """

    chance: Random
    faults: SamplingFaults
    names: tuple[str, ...] = ("length",)
    seconds: float = 0.005
    slow: float = 0.0

    async def start(self) -> None:
        """Nothing to load."""

    async def score(self, request: ScoreRequest, only: Collection[str] | None = None) -> Scores:
        """0 to 3, none, or an error."""
        # Drawn only where it decides anything: seeds of other scenarios go on meaning what they meant.
        is_slow = self.slow > 0 and self.chance.random() < self.slow
        await asyncio.sleep(40 + 60 * self.chance.random() if is_slow else self.seconds)
        (name,) = self.names
        draw = self.chance.random()
        if draw < self.faults.reward_error:
            return Scores({name: None}, {name: "simulated failure"})
        if draw < self.faults.reward_error + self.faults.no_reward:
            return Scores({name: None}, {})
        return Scores({name: float(sum(request.completion_ids) % 4)}, {})

    async def close(self) -> None:
        """Nothing is held."""


@dataclass(frozen=True)
class SimPrompts:
    """``size`` prompts, over and over again."""

    size: int

    def prompt_at(self, position: int) -> tuple[Prompt, int]:
        """The prompt at a position and the pass over the data it belongs to."""
        data_pass, index = divmod(position, self.size)
        name = make_prompt_id("sim", index)
        return Prompt(prompt_id=name, dataset="sim", content=f"prompt {index}"), data_pass
