"""Spreads items over lanes, next to the one that would be free first. Pure."""

from collections.abc import Mapping, Sequence
from heapq import heapify, heapreplace

from producers.dispatch.planning.plans import Item, Lane, Plan, Worker
from schemas.profiles.decode import DecodeCurve


def longest_first(items: Sequence[Item]) -> list[Item]:
    """By the longest sample; among equals first those whose other samples are long, then in their own order."""
    return sorted(items, key=lambda item: (-item.longest, -item.tokens, item.key))


def spread(
    items: Sequence[Item],
    workers: Sequence[Worker],
    concurrency: Sequence[int],
    curve: DecodeCurve,
    reserved: Mapping[int, Sequence[Item]] | None = None,
) -> Plan:
    """Each item in turn goes to the lane with the least expected seconds of work, at its concurrency's rate.

    ``reserved``: by lane, what it begins with.
    """
    queues: list[list[Item]] = [[*(reserved or {}).get(lane, ())] for lane in range(len(workers))]
    token_s = [curve.batch_s(at_once) / at_once for at_once in concurrency]
    loads = [
        ((worker.load + sum(item.load for item in queues[lane])) * token_s[lane], lane)
        for lane, worker in enumerate(workers)
    ]
    heapify(loads)
    for item in items:
        busy_s, lane = loads[0]
        queues[lane].append(item)
        heapreplace(loads, (busy_s + item.load * token_s[lane], lane))
    return Plan(
        tuple(
            Lane(worker, at_once, tuple(queue))
            for worker, at_once, queue in zip(workers, concurrency, queues, strict=True)
        )
    )


def all_slots(workers: Sequence[Worker]) -> list[int]:
    """The concurrencies that leave no slot empty."""
    return [max(1, worker.slots) for worker in workers]
