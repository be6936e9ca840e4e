"""Chooses the worker for a request, from each worker's predicted work and cached prefixes. Pure functions.

A worker's work is counted in decode steps of one slot: the tokens that its running requests are predicted to sample,
divided by its slots. The tokens of the prompt that the worker has to prefill are added. Tokens that it has read or
sampled before are in its cache. So the next call of a conversation goes to the worker that had the last one, unless
prefilling at a less busy worker is cheaper.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import xxhash

from streamrl.schemas.identifiers import PolicyVersion

BLOCK_TOKENS = 16
"""Tokens in a block of vLLM's cache, which finds a prefix by whole blocks."""
KNOWN_BLOCKS = 1 << 14
"""Blocks remembered for each worker: 256k tokens, far more than most caches hold."""
KNOWN_SESSIONS = 1 << 14
PREFILL_SHARE = 1 / 16
"""Cost of prefilling a token, as a share of decoding one: a prompt is read many tokens at once."""
MIN_TOKENS_LEFT = 4.0
"""Tokens that a completion is assumed to have left when it is longer than its estimate."""


def prefix_blocks(token_ids: Sequence[int]) -> tuple[int, ...]:
    """A hash of every prefix of whole blocks; each hash covers the previous hash and its own block's tokens."""
    tokens = array("i", token_ids)
    blocks: list[int] = []
    before = 0
    for start in range(0, len(tokens) // BLOCK_TOKENS * BLOCK_TOKENS, BLOCK_TOKENS):
        before = xxhash.xxh3_64_intdigest(tokens[start : start + BLOCK_TOKENS], seed=before)
        blocks.append(before)
    return tuple(blocks)


@dataclass
class CachedPrefixes:
    """Blocks that a worker has computed with its current weights, the latest last."""

    version: PolicyVersion | None = None
    _blocks: "OrderedDict[int, None]" = field(default_factory=OrderedDict)

    def add_blocks(self, blocks: Iterable[int], version: PolicyVersion) -> None:
        """Add the blocks of a prompt that the worker reads. A new version makes all earlier blocks worthless."""
        if version != self.version:
            self.version = version
            self._blocks.clear()
        for block in blocks:
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > KNOWN_BLOCKS:
            self._blocks.popitem(last=False)

    def length(self, blocks: Sequence[int], version: PolicyVersion) -> int:
        """Tokens at the start of a prompt of these blocks that need not be computed."""
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
    """Predicted tokens that a completion has left to sample."""
    expected = median if generated < median else upper
    return max(MIN_TOKENS_LEFT, float(expected - generated))


def choose(
    workers: Iterable[WorkerView], prompt_tokens: int, blocks: Sequence[int], last_worker: str | None = None
) -> str | None:
    """The worker with a free slot and the least work, or None if no slot is free.

    ``last_worker``: the worker that had the session's last call. The prompt is assumed to be in that worker's cache.
    """

    def cost(worker: WorkerView) -> tuple[float, str]:
        cached = worker.cached.length(blocks, worker.version)
        if worker.worker_id == last_worker:
            cached = max(cached, prompt_tokens - BLOCK_TOKENS)
        unread = max(0, prompt_tokens - cached)
        return worker.left_tokens / worker.slots + unread * PREFILL_SHARE, worker.worker_id

    free = [worker for worker in workers if worker.running < worker.slots]
    return min(free, key=cost).worker_id if free else None
