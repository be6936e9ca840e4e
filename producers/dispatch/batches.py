"""Which optimizer step each group in flight is for, where that is settled when it is admitted. Pure.

Invariant batches_fill_in_order: a new group is for the lowest step to come that has fewer than B of them, so the place
of a group that ended untrained is taken by the next one that is admitted.
"""

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Batches:
    """``size``: groups_per_step; ``current``: steps taken. A group that outlasted its step is for the next one."""

    size: int
    current: int = 0
    _due: dict[str, int] = field(default_factory=dict)
    _groups: Counter[int] = field(default_factory=Counter)

    def add(self, group_id: str, due_step: int) -> None:
        """A group is in flight; one of an older trainer's life may be so again."""
        self.remove(group_id)
        self._due[group_id] = due_step
        self._groups[due_step] += 1

    def remove(self, group_id: str) -> None:
        """It ended, trained or not."""
        if (due := self._due.pop(group_id, None)) is not None:
            self._groups[due] -= 1
            if not self._groups[due]:
                del self._groups[due]

    def due_step(self, group_id: str) -> int:
        """The step that trains this group if nothing keeps it."""
        return max(self._due[group_id], self.current + 1)

    def next_due(self) -> int:
        """The step that the next new group is for."""
        step, taken = self.current + 1, self._taken(self.current + 1)
        while taken >= (step - self.current) * self.size:
            step += 1
            taken += self._groups[step]
        return step

    def room(self, last: int) -> int:
        """How many more groups the steps up to ``last`` can take.

        After a resume a later step may have too many. Then an earlier one still gets what it lacks: the trainer waits.
        """
        most, taken = 0, self._taken(self.current)
        for step in range(self.current + 1, last + 1):
            taken += self._groups[step]
            most = max(most, (step - self.current) * self.size - taken)
        return most

    def _taken(self, last: int) -> int:
        return sum(groups for due, groups in self._groups.items() if due <= last)
