"""Seconds between optimizer steps in each mode, when nothing but decoding and training takes time. Pure.

``batches``: for each step, end (seconds from its start) and length of its completions, in the order of their ends.
"""

from collections.abc import Sequence
from statistics import fmean

Ends = Sequence[tuple[float, int]]


def synchronous_s(batches: Sequence[Ends], train_s_per_token: float) -> float:
    """Generate a batch, then train it."""
    return fmean(batch[-1][0] + train_s_per_token * _tokens(batch) for batch in batches)


def stream_s(batches: Sequence[Ends], train_s_per_token: float) -> float:
    """Train each completion as soon as it is there and the ones before it are trained."""
    return fmean(trained(batch, 0.0, 0.0, train_s_per_token) for batch in batches)


def one_step_async_s(batches: Sequence[Ends], train_s_per_token: float) -> float:
    """Generate a batch while the one before it is trained: it starts when that one is whole and the one before that
    is trained. The first batch is left out of the mean.
    """
    whole, done, dones = 0.0, [0.0, 0.0], []
    for batch in batches:
        start = max(whole, done[-2])
        whole = start + batch[-1][0]
        done.append(trained(batch, start, done[-1], train_s_per_token))
        dones.append(done[-1])
    return (dones[-1] - dones[0]) / (len(dones) - 1)


def trained(batch: Ends, start: float, free_at: float, train_s_per_token: float) -> float:
    """When the last completion of a batch is trained that began at ``start``, by a trainer that is free then."""
    for at, length in batch:
        free_at = max(free_at, start + at) + train_s_per_token * length
    return free_at


def _tokens(batch: Ends) -> int:
    return sum(length for _, length in batch)
