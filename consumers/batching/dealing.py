"""Distributes the rows of a micro-batch over the trainer's ranks. Pure.

All ranks compute at the same time and wait for the slowest, so the largest share decides. Rows are distributed when a
micro-batch is cut. No rank has its own queue, so none waits for a trajectory that another rank has.
"""

from collections.abc import Sequence
from itertools import accumulate

from streamrl.consumers.batching.settings import Packing


def deal(lengths: Sequence[int], ranks: int, packing: Packing = "padded") -> list[list[int]]:
    """Row numbers for each rank, longest rows first, so that the largest share of computed tokens is minimal.

    Each share is a run of neighbours in length. If rows are padded, a share counts its first row's length times its
    number of rows; otherwise the sum of its lengths. With fewer rows than ranks the last shares are empty. The result
    depends only on the arguments.
    """
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    longest_first = [lengths[row] for row in order]
    # Bisection over the limit: if a limit is feasible, so are all larger ones. Shares of equally many rows always meet
    # the largest limit.
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
    """Numbers of rows of shares that keep the limit, filled greedily from the longest row; None if too few ranks."""
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
