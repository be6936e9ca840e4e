"""Delta debugging (Zeller and Hildebrandt 2002): the smallest parts of a set that still fail. Pure.

Invariant what_is_found_fails_and_nothing_of_it_can_be_spared: each result is 1-minimal.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass
class Bisection(Generic[T]):
    """``fails`` says whether a subset (in its original order) still shows the fault; each is asked for once."""

    items: Sequence[T]
    fails: Callable[[list[T]], bool]
    answers: dict[tuple[int, ...], bool] = field(default_factory=dict)

    def culprits(self) -> list[list[T]]:
        """Minimal failing subsets, found one after the other until what is left does not fail."""
        left = list(range(len(self.items)))
        found: list[list[T]] = []
        while left and self._fails(left):
            smallest = self._minimal(left)
            found.append([self.items[index] for index in smallest])
            left = [index for index in left if index not in smallest]
        return found

    def _minimal(self, failing: list[int]) -> list[int]:
        parts = 2
        while len(failing) > 1:
            chunks = _split(failing, parts)
            rests = [[index for index in failing if index not in chunk] for chunk in chunks]
            if (chunk := next((each for each in chunks if self._fails(each)), None)) is not None:
                failing, parts = chunk, 2
            elif parts > 2 and (rest := next((each for each in rests if self._fails(each)), None)) is not None:
                failing, parts = rest, parts - 1
            elif parts >= len(failing):
                break
            else:
                parts = min(2 * parts, len(failing))
        return failing

    def _fails(self, subset: list[int]) -> bool:
        key = tuple(subset)
        if key not in self.answers:
            self.answers[key] = self.fails([self.items[index] for index in subset])
        return self.answers[key]


def _split(items: list[int], parts: int) -> list[list[int]]:
    edges = [len(items) * number // parts for number in range(parts + 1)]
    return [items[start:end] for start, end in pairwise(edges) if end > start]
