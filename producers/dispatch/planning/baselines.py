"""Plans that keep every slot busy and look at lengths little or not at all. Pure."""

from collections.abc import Sequence

from producers.dispatch.planning.plans import Item, Lane, Plan, Worker
from producers.dispatch.planning.spreading import all_slots, longest_first, spread
from schemas.profiles.decode import DecodeCurve


def round_robin(items: Sequence[Item], workers: Sequence[Worker], curve: DecodeCurve) -> Plan:
    """The first item to the first worker, the second to the second, and so on, whatever their lengths are."""
    return Plan(
        tuple(
            Lane(worker, max(1, worker.slots), tuple(items[number :: len(workers)]))
            for number, worker in enumerate(workers)
        )
    )


def least_loaded(items: Sequence[Item], workers: Sequence[Worker], curve: DecodeCurve) -> Plan:
    """In their own order, each to the worker with the fewest expected tokens for what it can do."""
    return spread(items, workers, all_slots(workers), curve)


def lpt(items: Sequence[Item], workers: Sequence[Worker], curve: DecodeCurve) -> Plan:
    """Longest processing time first: as ``least_loaded``, but the longest begin."""
    return spread(longest_first(items), workers, all_slots(workers), curve)
