"""Which of many are looked into, where looking into all would cost what the run needs."""

from collections.abc import Sequence

MOST, NEWEST = 200, 40


def sampled(places: Sequence[int], most: int = MOST, newest: int = NEWEST) -> set[int]:
    """All of them if they are not more than ``most``; else the newest, and others evenly from the rest."""
    if len(places) <= most:
        return set(places)
    rest = places[: len(places) - newest]
    wanted = most - newest
    return {*places[len(places) - newest :], *(rest[index * len(rest) // wanted] for index in range(wanted))}
