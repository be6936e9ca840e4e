"""The rewards of a run's newest trajectories, and which prompts are solved always, sometimes or never. Pure.

Both are bounded: only the newest rewards and the newest prompts are kept.
"""

import math
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import nsmallest
from typing import NamedTuple

from cachetools import LRUCache

REWARDS_KEPT = 2000
BARS = 10
"""Most bars of a histogram: more than these cannot be read in a small chart."""
PROMPTS_KEPT = 2000
HARDEST = 10


class Bar(NamedTuple):
    """A bar of a histogram: rewards from ``low`` to below ``high``; both are equal for a single value."""

    low: float
    high: float
    number: int


@dataclass
class RecentRewards:
    """The total rewards of the newest trajectories that have one."""

    newest: deque[float] = field(default_factory=lambda: deque(maxlen=REWARDS_KEPT))

    def add(self, reward: float) -> None:
        """Note the reward of a trajectory."""
        self.newest.append(reward)

    def bars(self) -> list[Bar]:
        """A histogram: a bar for each value if there are few, else bars of equal width."""
        counts = Counter(round(reward, 4) for reward in self.newest)
        if len(counts) <= BARS:
            return [Bar(value, value, count) for value, count in sorted(counts.items())]
        low, high = min(counts), max(counts)
        width = (high - low) / BARS
        found = Counter[int]()
        for value, count in counts.items():
            # The largest value belongs to the last bar, not to one of its own.
            found[min(BARS - 1, math.floor((value - low) / width))] += count
        return [
            Bar(round(low + place * width, 4), round(low + (place + 1) * width, 4), found[place])
            for place in range(BARS)
        ]


@dataclass
class PromptResult:
    """The trajectories of one prompt. ``solved``: how many have full rewards."""

    samples: int = 0
    total: float = 0.0
    solved: int = 0

    @property
    def mean(self) -> float:
        """Mean reward."""
        return self.total / self.samples


@dataclass
class PromptDifficulty:
    """Rewards by prompt, for the prompts that were sampled last."""

    prompts: LRUCache[str, PromptResult] = field(default_factory=lambda: LRUCache(PROMPTS_KEPT))

    def add(self, group_id: str, reward: float, *, solved: bool) -> None:
        """Note a trajectory. A prompt's groups have its id and the number of the pass over the prompts."""
        prompt = group_id.rpartition("/")[0]
        found = self.prompts.get(prompt) or PromptResult()
        found.samples, found.total, found.solved = found.samples + 1, found.total + reward, found.solved + solved
        self.prompts[prompt] = found

    def counts(self) -> dict[str, int]:
        """Numbers of prompts whose trajectories have full rewards always, sometimes and never."""
        found = Counter(_word(result) for result in self.prompts.values())
        return {word: found[word] for word in ("always", "sometimes", "never")}

    def hardest(self) -> Iterator[tuple[str, PromptResult]]:
        """The prompts with the lowest mean rewards, the lowest first, without those that are always solved."""
        open_ones = ((name, each) for name, each in self.prompts.items() if each.solved < each.samples)
        yield from nsmallest(HARDEST, open_ones, key=lambda pair: (pair[1].mean, pair[0]))


@dataclass
class RewardHistory:
    """The rewards of the newest trajectories, and of the newest prompts."""

    recent: RecentRewards = field(default_factory=RecentRewards)
    by_prompt: PromptDifficulty = field(default_factory=PromptDifficulty)

    def add(self, group_id: str, reward: float | None, *, solved: bool) -> None:
        """Note a trajectory. ``reward`` None: it has none, and says nothing. ``solved``: its rewards are full."""
        if reward is not None:
            self.recent.add(reward)
            self.by_prompt.add(group_id, reward, solved=solved)


def _word(result: PromptResult) -> str:
    return "always" if result.solved == result.samples else "sometimes" if result.solved else "never"
