"""Remembers the trajectory ids that were accepted, and where, within a bounded window. Pure.

The window is exact as long as it holds more ids than can be in flight within the staleness bound: a later repeat of
the same tokens is refused as stale.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

Place = tuple[int, int]
"""Partition and offset."""


@dataclass
class DedupeWindow:
    """The last ``capacity`` accepted ids with their places, oldest first."""

    capacity: int
    ids: dict[str, Place] = field(default_factory=dict)

    def accept(self, trajectory_id: str, place: Place) -> bool:
        """Remember an id; false if it was accepted before, from whatever place."""
        if trajectory_id in self.ids:
            return False
        self.ids[trajectory_id] = place
        if len(self.ids) > self.capacity:
            del self.ids[next(iter(self.ids))]
        return True

    def restore(self, ids: Mapping[str, Place]) -> None:
        """Start from the finished ids of a checkpoint."""
        self.ids = {name: (int(place[0]), int(place[1])) for name, place in ids.items()}
