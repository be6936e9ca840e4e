"""How many devices generate and how many train (StreamRL, 2025, algorithm 1). Pure; stage times are functions, in s.

Invariant: no_split_within_the_budget_is_faster.
"""

from collections.abc import Callable
from dataclasses import dataclass

StageSeconds = Callable[[int], float]
"""Best seconds of a stage for one step on so many devices; never longer on more of them."""
Composed = Callable[[float, float], float]
"""Seconds of a step from those of its generation and of its training."""


@dataclass(frozen=True)
class Split:
    """Devices of the two stages, their own times and that of a step, in seconds."""

    workers: int
    trainers: int
    generate_s: float
    train_s: float
    step_s: float


def one_site(
    devices: int, generate_s: StageSeconds, train_s: StageSeconds, composed: Composed, candidates: int = 1
) -> list[Split]:
    """The fastest splits of up to so many like devices, the fastest first; among equals, the one with fewest devices.

    Devices that make a step no faster are left over.
    """
    found: list[Split] = []
    for workers in range(1, devices):
        for trainers in range(1, devices - workers + 1):
            bound = found[-1].step_s if len(found) >= candidates else float("inf")
            training = train_s(trainers)
            if training > bound:
                continue
            generating = generate_s(workers)
            split = Split(workers, trainers, generating, training, composed(generating, training))
            found = sorted([*found, split], key=_rank)[:candidates]
    return found


def two_sites(
    workers: int, trainers: int, generate_s: StageSeconds, train_s: StageSeconds, composed: Composed
) -> Split:
    """Of devices that only generate and others that only train: the faster stage gives back what it does not need."""
    generating, training = generate_s(workers), train_s(trainers)
    if generating < training:
        workers = min(range(1, workers + 1), key=lambda number: (abs(generate_s(number) - training), number))
    else:
        trainers = min(range(1, trainers + 1), key=lambda number: (abs(train_s(number) - generating), number))
    generating, training = generate_s(workers), train_s(trainers)
    return Split(workers, trainers, generating, training, composed(generating, training))


def _rank(split: Split) -> tuple[float, int]:
    return split.step_s, split.workers + split.trainers
