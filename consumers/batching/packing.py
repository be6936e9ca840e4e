"""Which samples share a micro-batch: neighbours in length, within a token budget, with little padding. Pure.

Lengths are given longest first, so that a run of neighbours is padded to its first. Rows times that length stay within
the budget; a sample over the budget stands alone. Padding is weighed against the fixed cost of a micro-batch.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from consumers.batching.costs import CostModel, Lengths


class Run(NamedTuple):
    """Samples ``start`` (inclusive) to ``end`` (exclusive) of those given."""

    start: int
    end: int


def best_run(lengths: Lengths, budget: int, costs: CostModel) -> Run:
    """The micro-batch whose share of useful cost is the largest: the least padding for its fixed cost.

    A run from a given sample on gets better with each neighbour up to a point, and worse from there on; so the best
    end of all runs is found by bisection at once.
    """
    own = costs.of_sequences(lengths)
    sums = np.concatenate([[0.0], np.cumsum(own)])
    start = np.arange(len(lengths))
    rows = np.ones_like(start)
    most = _most_rows(lengths, budget)
    while (is_open := rows < most).any():
        middle = (rows + most) // 2
        beyond = own[np.minimum(start + middle, len(lengths) - 1)]
        gains = beyond * (middle * own + costs.launch) > own * (sums[start + middle] - sums[start])
        rows = np.where(is_open & gains, middle + 1, rows)
        most = np.where(is_open & ~gains, middle, most)
    useful = (sums[start + rows] - sums[start]) / (rows * own + costs.launch)
    best = int(np.argmax(useful))
    return Run(best, best + int(rows[best]))


def cheapest_runs(lengths: Lengths, budget: int, costs: CostModel) -> list[Run]:
    """All samples in micro-batches of the least total cost, longest first; found by dynamic programming."""
    count = len(lengths)
    own = costs.of_sequences(lengths)
    most = _most_rows(lengths, budget)
    total = np.full(count + 1, np.inf)
    total[0] = 0.0
    came_from = np.zeros(count + 1, dtype=np.int64)
    steps = np.arange(1, int(most.max(initial=0)) + 1)
    for start in range(count):
        reach = slice(start + 1, start + 1 + int(most[start]))
        offered = total[start] + costs.launch + own[start] * steps[: most[start]]
        is_better = offered < total[reach]
        total[reach][is_better] = offered[is_better]
        came_from[reach][is_better] = start
    runs: list[Run] = []
    end = count
    while end:
        runs.append(Run(int(came_from[end]), end))
        end = runs[-1].start
    return runs[::-1]


def split_to_multiple(runs: Sequence[Run], ranks: int) -> list[Run]:
    """As many runs as make whole rounds of ``ranks``: those of the most rows are halved. One-row runs stay whole,
    so that with fewer samples than needed the last round stays short.
    """
    found = sorted(runs, key=lambda run: run.end - run.start)
    while len(found) % ranks and found[-1].end - found[-1].start > 1:
        start, end = found.pop()
        middle = (start + end + 1) // 2
        found += [Run(start, middle), Run(middle, end)]
        found.sort(key=lambda run: run.end - run.start)
    return sorted(found)


def _most_rows(lengths: Lengths, budget: int) -> Lengths:
    """Rows that a run from each sample on may have."""
    fitting = np.maximum(1, budget // np.maximum(1, lengths))
    most: Lengths = np.minimum(fitting, np.arange(len(lengths), 0, -1))
    return most
