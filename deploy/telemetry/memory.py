"""Remembers a bounded number of things; whoever is forgotten is only not told of."""

from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Memory(Generic[K, V]):
    """The newest ``limit`` entries, by when they were put."""

    def __init__(self, limit: int = 50_000) -> None:
        self._limit = limit
        self._kept: dict[K, V] = {}

    def put(self, key: K, value: V) -> None:
        """Remember; the oldest entry goes when there are too many."""
        self._kept.pop(key, None)
        self._kept[key] = value
        if len(self._kept) > self._limit:
            del self._kept[next(iter(self._kept))]

    def get(self, key: K) -> V | None:
        """What is remembered, or none."""
        return self._kept.get(key)

    def pop(self, key: K) -> V | None:
        """The same, and forget it."""
        return self._kept.pop(key, None)

    def __len__(self) -> int:
        return len(self._kept)
