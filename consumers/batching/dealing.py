"""Deals the rows of a micro-batch over the trainer's ranks. Pure.

All ranks compute at the same time and wait for the slowest, so the largest share decides. Rows are dealt the moment a
micro-batch is cut: no rank has a queue of its own, and so none waits for a trajectory that another one has.
"""

from collections.abc import Sequence
from itertools import accumulate

from streamrl.consumers.batching.settings import Packing


def deal(lengths: Sequence[int], ranks: int, packing: Packing = "padded") -> list[list[int]]:
    """Row numbers by rank, longest rows first: the largest share, in tokens that are computed, is as small as can be.

    Each is a run of neighbours in length. Padded to its longest row, it counts its first row's length times its rows,
    else the sum of its lengths. Fewer rows than ranks leave the last shares empty. The same lengths are always dealt
    alike.
    """
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    longest_first = [lengths[row] for row in order]
    # Bisected: whether a limit can be kept is monotone in it, and equal numbers of rows keep the highest.
    low = max([1, *longest_first])
    high = low * -(-len(order) // ranks)
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if _shares(longest_first, ranks, middle, packing) is None else (low, middle)
    sizes = _shares(longest_first, ranks, high, packing) or []
    ends = list(accumulate(sizes))
    runs = [order[end - size : end] for end, size in zip(ends, sizes, strict=True)]
    return runs + [[] for _ in range(ranks - len(runs))]


def _shares(longest_first: Sequence[int], ranks: int, limit: int, packing: Packing) -> list[int] | None:
    """Rows of each share if none is above the limit, greedily from the longest; None if so many ranks do not do."""
    sizes: list[int] = []
    start = 0
    while start < len(longest_first):
        if packing == "padded":
            rows = min(limit // max(longest_first[start], 1), len(longest_first) - start)
        else:
            rows = sum(1 for held in accumulate(longest_first[start:]) if held <= limit)
        if not rows or len(sizes) == ranks:
            return None
        sizes.append(rows)
        start += rows
    return sizes
