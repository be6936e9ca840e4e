"""Groups that are closed and usable, until the trainer takes them. Pure.

Invariant a_group_for_a_later_step_waits_for_it: what fixed batches keep for a later step is not handed out before.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

from consumers.batching.samples import Group


@dataclass
class ReadyGroups:
    """Those for the earliest step first, and of these the oldest. ``step``: number of the step to come."""

    step: Callable[[], int]
    _groups: list[tuple[int, float, str, Group]] = field(default_factory=list)

    def __bool__(self) -> bool:
        """Whether there is a group that the step to come may train."""
        return bool(self._groups) and self._groups[0][0] <= self.step()

    def add(self, group: Group) -> None:
        """A group was closed."""
        heapq.heappush(self._groups, (group.due_step, group.created_at, group.group_id, group))

    def take(self) -> Group:
        """The next group; there must be one."""
        return heapq.heappop(self._groups)[-1]
