"""Seeds → plans. Pure."""

import random
from collections.abc import Sequence

from tests.chaos.faults import broker, clocks, disk, moving, network, processes, stream
from tests.chaos.faults.plan import Event, Fault, Plan
from tests.chaos.runs.setting import DRAWN, MAX_STEPS

FAULTS: tuple[Fault, ...] = (
    *processes.FAULTS,
    *stream.FAULTS,
    *disk.FAULTS,
    *broker.FAULTS,
    *network.FAULTS,
    *clocks.FAULTS,
    *moving.FAULTS,
)
BY_NAME = {fault.name: fault for fault in FAULTS}
SECOND_FAULT_SHARE = 0.4
COPIES_SHARE = 0.4
"""Of the runs that have a relay with copies, whatever happens to them."""


def plan_of(seed: int, only: str | None = None) -> Plan:
    """The plan of a seed; ``only``: its main fault, which otherwise goes round with the seed."""
    generator = random.Random(seed)
    fault = BY_NAME[only] if only else FAULTS[seed % len(FAULTS)]
    events = [_event(fault, generator, 3, 9)]
    if fault.mixes and generator.random() < SECOND_FAULT_SHARE:
        events.append(_event(generator.choice(processes.SECONDARY), generator, MAX_STEPS // 2, MAX_STEPS - 12))
    return Plan(seed, tuple(events), generator.choice(DRAWN), copies=generator.random() < COPIES_SHARE)


def plans(runs: int, first_seed: int = 0, only: str | None = None) -> list[Plan]:
    """Plans of seeds in a row, those that share a broker next to each other."""
    found: Sequence[Plan] = [plan_of(seed, only) for seed in range(first_seed, first_seed + runs)]
    return sorted(found, key=lambda plan: plan.broker)


def _event(fault: Fault, generator: random.Random, first: int, last: int) -> Event:
    return Event(
        fault,
        at_step=generator.randint(first, last),
        after_s=round(generator.uniform(0.0, 0.4), 3),
        lasts_s=round(generator.uniform(*fault.lasts), 2),
        target=generator.choice(fault.targets),
        seed=generator.getrandbits(32),
    )
