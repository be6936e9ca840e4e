"""Deals micro-batches to data-parallel ranks, which wait for each other after each round. Pure.

Invariants, each with a test of its name:
- a_round_waits_for_its_costliest: micro-batches of like cost share a round, so that the sum of the rounds' maxima is
  the least possible;
- no_rank_does_much_more_than_another: loads differ by at most the cost of one micro-batch.
"""

from collections.abc import Sequence

from streamrl.consumers.batching.micro_batches import SampleRange

Round = tuple[int | None, ...]
"""The micro-batch of each rank, by its number; none where there was none left."""


def deal(costs: Sequence[float], ranks: int) -> list[Round]:
    """Costliest rounds first; within a round the rank that has done least so far takes the costliest."""
    order = sorted(range(len(costs)), key=lambda index: (-costs[index], index))
    loads = [0.0] * ranks
    rounds: list[Round] = []
    for first in range(0, len(order), ranks):
        dealt: list[int | None] = [None] * ranks
        free = sorted(range(ranks), key=lambda rank: (loads[rank], rank))
        for rank, index in zip(free, order[first : first + ranks], strict=False):
            dealt[rank] = index
            loads[rank] += costs[index]
        rounds.append(tuple(dealt))
    return rounds


def split_to_multiple(runs: Sequence[SampleRange], ranks: int) -> list[SampleRange]:
    """As many runs as make whole rounds of ``ranks``: those of the most rows are halved. One-row runs stay whole,
    so that with fewer samples than needed the last round stays short.
    """
    found = sorted(runs, key=lambda run: run.end - run.start)
    while len(found) % ranks and found[-1].end - found[-1].start > 1:
        start, end = found.pop()
        middle = (start + end + 1) // 2
        found += [SampleRange(start, middle), SampleRange(middle, end)]
        found.sort(key=lambda run: run.end - run.start)
    return sorted(found)


def waiting_share(costs: Sequence[float], rounds: Sequence[Round]) -> float:
    """Share of the ranks' time that they wait for the costliest of their round; 0 without any micro-batch."""
    taken = sum(len(each) * max(_cost(costs, index) for index in each) for each in rounds)
    return 1.0 - sum(costs[index] for each in rounds for index in each if index is not None) / taken if taken else 0.0


def _cost(costs: Sequence[float], index: int | None) -> float:
    return 0.0 if index is None else costs[index]
