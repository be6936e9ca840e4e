"""Completions in the order in which their lengths were asked for, not in that in which they ended. Pure.

Short completions end first. Who learned from each as it comes would take the first ones of a batch for all of it, the
level of the short ones for the level, and fit to data that lacks the longest; in the order of asking, what was learned
from is at any moment a fair sample.

Invariants, each with a test of its name:
- what_was_not_asked_for_has_its_turn_at_once;
- a_group_that_never_ends_holds_others_up_only_so_long.
"""

from collections import OrderedDict
from typing import Generic, TypeVar

Finished = TypeVar("Finished")
"""A completion that has ended."""

MAX_ASKED = 8192
"""Groups that were asked for and did not end."""


class Turns(Generic[Finished]):
    """``samples`` make a group whole. At most ``most`` completions wait for one that was asked for before them."""

    def __init__(self, samples: int, most: int) -> None:
        self._samples, self._most = samples, most
        self._asked: OrderedDict[str, list[Finished]] = OrderedDict()
        self._waiting = 0

    def __contains__(self, group_id: str) -> bool:
        return group_id in self._asked

    def ask(self, group_id: str) -> None:
        """A group's turn comes after all that were asked for before it."""
        self._asked.setdefault(group_id, [])

    def take(self, group_id: str, completion: Finished) -> list[Finished]:
        """Those whose turn has come with this one of a group, itself or others."""
        held = self._asked.get(group_id)
        if held is None:
            return [completion]
        held.append(completion)
        self._waiting += 1
        due: list[Finished] = []
        while self._asked and self._is_due(next(iter(self._asked.values()))):
            _, held = self._asked.popitem(last=False)
            self._waiting -= len(held)
            due += held
        return due

    def _is_due(self, oldest: list[Finished]) -> bool:
        return len(oldest) >= self._samples or self._waiting > self._most or len(self._asked) > MAX_ASKED
