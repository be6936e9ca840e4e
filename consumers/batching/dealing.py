"""Distributes the rows of a micro-batch over the trainer's ranks. Pure.

All ranks compute at the same time and wait for the slowest, so the largest share decides. Rows are distributed when a
micro-batch is cut. No rank has its own queue, so none waits for a trajectory that another rank has.
"""

from collections.abc import Sequence
from itertools import accumulate

from streamrl.consumers.batching.micro_batches import MicroBatch
from streamrl.consumers.batching.prefixes import token_order
from streamrl.consumers.batching.settings import Packing


def deal_rows(batch: MicroBatch, rows: Sequence[int], ranks: int, packing: Packing) -> list[list[int]]:
    """The numbers of these rows of a micro-batch for each rank, see ``deal``."""
    lengths = batch.lengths[list(rows)]
    if packing == "shared":
        order, shared = token_order(batch.input_ids[list(rows)], lengths)
        dealt = deal_in_order(lengths[order].tolist(), shared.tolist(), ranks)
        rows = [rows[number] for number in order]
    else:
        dealt = deal(lengths.tolist(), ranks, packing)
    return [[rows[number] for number in share] for share in dealt]


def deal(lengths: Sequence[int], ranks: int, packing: Packing = "padded") -> list[list[int]]:
    """Row numbers for each rank, longest rows first, so that the largest share of computed tokens is minimal.

    Each share is a run of neighbours in length. If rows are padded, a share counts its first row's length times its
    number of rows; otherwise the sum of its lengths. With fewer rows than ranks the last shares are empty. The result
    depends only on the arguments.
    """
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    longest_first = [lengths[row] for row in order]
    runs = _best_runs(longest_first, [0] * len(lengths), ranks, packing)
    return [[order[number] for number in run] for run in runs]


def deal_in_order(lengths: Sequence[int], shared: Sequence[int], ranks: int) -> list[list[int]]:
    """Row numbers for each rank as runs of neighbours, so that the largest share of computed tokens is minimal.

    ``shared``: tokens that each row has in common with the one before it. A share computes them once, so rows with one
    prompt are divided only where that makes the largest share smaller.
    """
    return _best_runs(lengths, shared, ranks, "shared")


def _best_runs(lengths: Sequence[int], shared: Sequence[int], ranks: int, packing: Packing) -> list[list[int]]:
    # Bisection over the limit: if a limit is feasible, so are all larger ones. Shares of equally many rows always meet
    # the largest limit.
    low = max([1, *lengths])
    high = low * -(-len(lengths) // ranks)
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if _shares(lengths, shared, ranks, middle, packing) is None else (low, middle)
    sizes = _shares(lengths, shared, ranks, high, packing) or []
    ends = list(accumulate(sizes))
    runs = [list(range(end - size, end)) for end, size in zip(ends, sizes, strict=True)]
    return runs + [[] for _ in range(ranks - len(runs))]


def _shares(
    lengths: Sequence[int], shared: Sequence[int], ranks: int, limit: int, packing: Packing
) -> list[int] | None:
    """Numbers of rows of shares that keep the limit, filled greedily from the first row; None if too few ranks."""
    sizes: list[int] = []
    start = 0
    while start < len(lengths):
        if packing == "padded":
            rows = min(limit // max(lengths[start], 1), len(lengths) - start)
        else:
            # The first row of a share has all of its tokens, each further one those that it does not share.
            rest = zip(lengths[start + 1 :], shared[start + 1 :], strict=True)
            added = accumulate([lengths[start], *(own - common for own, common in rest)])
            rows = sum(1 for held in added if held <= limit)
        if not rows or len(sizes) == ranks:
            return None
        sizes.append(rows)
        start += rows
    return sizes
