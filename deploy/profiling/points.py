"""Which points are measured: batch sizes, context lengths, prompts, micro-batches. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from deploy.settings.tree import Settings

SHORTEST = 8


@dataclass(frozen=True)
class Effort:
    """``decode_steps``: timed steps per point; ``repeats``: train steps per point; ``levels``: lengths of each kind."""

    decode_steps: int
    repeats: int
    levels: int


THOROUGH, QUICK = Effort(24, 3, 4), Effort(8, 1, 2)


def batches(max_num_seqs: int) -> list[int]:
    """1, 2, 4, … and the largest."""
    doubled = [1 << power for power in range(max_num_seqs.bit_length()) if 1 << power < max_num_seqs]
    return [*doubled, max_num_seqs]


def levels(shortest: int, longest: int, number: int) -> list[int]:
    """So many lengths from the shortest to the longest, each the same multiple of the one before."""
    if longest <= shortest or number < 2:
        return [max(1, min(shortest, longest))]
    factor = (longest / shortest) ** (1 / (number - 1))
    return sorted({round(shortest * factor**power) for power in range(number)})


def contexts(settings: Settings, longest: int, effort: Effort) -> list[int]:
    """Prompt lengths in place of contexts, up to what a run reaches or the model allows."""
    reached = settings.loop.max_prompt_length + settings.loop.max_completion_length
    return levels(SHORTEST, min(longest, reached), effort.levels)


def prompts(settings: Settings, longest: int, effort: Effort) -> list[int]:
    """Prompt lengths for prefills, the upper ones: a short prompt costs little in any case."""
    longest = min(longest, settings.loop.max_prompt_length)
    return levels(max(SHORTEST, longest // 8), longest, effort.levels)


def sequences(settings: Settings, positions: int, effort: Effort) -> Sequence[int]:
    """Sequence lengths for micro-batches: none that a budget could not hold."""
    reached = settings.loop.max_prompt_length + settings.loop.max_completion_length
    return levels(2 * SHORTEST, min(positions, reached, settings.batching.token_budget), effort.levels)
