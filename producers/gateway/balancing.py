"""Which worker samples a request: by the work that is predicted to lie before it, and what its cache holds. Pure.

A worker's work is told in token-steps of one slot: what its running requests are predicted to sample still, over its
slots. Added is what of the prompt has to be prefilled; what a worker has sampled or read before is in its cache, so the
next call of a conversation goes where the last one was unless that worker has more to do by as much.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import xxhash

from streamrl.schemas.identifiers import PolicyVersion

BLOCK_TOKENS = 16
"""vLLM's block: a prefix is found in its cache by whole blocks."""
KNOWN_BLOCKS = 1 << 14
"""Of one worker: 256k tokens, far more than most caches hold."""
KNOWN_SESSIONS = 1 << 14
PREFILL_SHARE = 1 / 16
"""What prefilling a token costs of decoding one: prompts are read many tokens at once."""
LEAST_LEFT = 4.0
"""Tokens that a completion beyond its estimate is taken to have still before it."""


def prefix_blocks(token_ids: Sequence[int]) -> tuple[int, ...]:
    """A hash for every prefix of whole blocks, each over the one before and the block's tokens."""
    tokens = array("i", token_ids)
    blocks: list[int] = []
    before = 0
    for start in range(0, len(tokens) // BLOCK_TOKENS * BLOCK_TOKENS, BLOCK_TOKENS):
        before = xxhash.xxh3_64_intdigest(tokens[start : start + BLOCK_TOKENS], seed=before)
        blocks.append(before)
    return tuple(blocks)


@dataclass
class CachedPrefixes:
    """Blocks that a worker has computed with its present weights, the latest last."""

    version: PolicyVersion | None = None
    _blocks: "OrderedDict[int, None]" = field(default_factory=OrderedDict)

    def saw(self, blocks: Iterable[int], version: PolicyVersion) -> None:
        """The worker read a prompt of these blocks; what other weights computed is worth nothing."""
        if version != self.version:
            self.version = version
            self._blocks.clear()
        for block in blocks:
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > KNOWN_BLOCKS:
            self._blocks.popitem(last=False)

    def length(self, blocks: Sequence[int], version: PolicyVersion) -> int:
        """Tokens at the beginning of such a prompt that need not be computed."""
        if version != self.version:
            return 0
        known = 0
        for block in blocks:
            if block not in self._blocks:
                break
            known += BLOCK_TOKENS
        return known


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A worker that takes requests, as the choice sees it; ``left_tokens``: see ``tokens_left``."""

    worker_id: str
    slots: int
    running: int
    left_tokens: float
    version: PolicyVersion
    cached: CachedPrefixes


def tokens_left(median: int, upper: int, generated: int) -> float:
    """Tokens that a completion is predicted to sample still."""
    expected = median if generated < median else upper
    return max(LEAST_LEFT, float(expected - generated))


def choose(
    workers: Iterable[WorkerView], prompt_tokens: int, blocks: Sequence[int], last_worker: str | None = None
) -> str | None:
    """The worker that would be through soonest, of those with a free slot; none if there is none.

    ``last_worker``: who had the session's last call; of a session the prompt is taken to be in its cache.
    """

    def cost(worker: WorkerView) -> tuple[float, str]:
        cached = worker.cached.length(blocks, worker.version)
        if worker.worker_id == last_worker:
            cached = max(cached, prompt_tokens - BLOCK_TOKENS)
        unread = max(0, prompt_tokens - cached)
        return worker.left_tokens / worker.slots + unread * PREFILL_SHARE, worker.worker_id

    free = [worker for worker in workers if worker.running < worker.slots]
    return min(free, key=cost).worker_id if free else None
