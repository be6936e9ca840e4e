"""One batch: prompts of random tokens and completions of forced lengths with a heavy tail, the same ones for a seed."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

P99 = NormalDist().inv_cdf(0.99)


@dataclass(frozen=True)
class Trace:
    """Requests that all arrive at once; lengths are lognormal, cut off at ``longest``."""

    requests: int = 96
    median: float = 80.0
    p99_over_median: float = 8.0
    longest: int = 640
    shortest_prompt: int = 8
    longest_prompt: int = 64
    seed: int = 5

    def sizes(self) -> list[tuple[int, int]]:
        """Tokens of prompt and of completion of each request, in order of arrival."""
        chance = random.Random(self.seed)
        return [
            (chance.randint(self.shortest_prompt, self.longest_prompt), self._length(chance.gauss(0.0, 1.0)))
            for _ in range(self.requests)
        ]

    def _length(self, score: float) -> int:
        factor: float = self.p99_over_median ** (score / P99)
        return max(1, min(self.longest, round(self.median * factor)))


def prompt_tokens(length: int, vocabulary: int, seed: int) -> Sequence[int]:
    """Token ids of a prompt."""
    chance = random.Random(seed)
    return [chance.randrange(vocabulary) for _ in range(length)]
