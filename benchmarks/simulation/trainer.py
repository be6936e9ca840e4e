"""The trainer as a station: groups come, steps end. Pure; virtual seconds.

A group is one sum here: the emulated trainer of ``streamrl.planning.simulation`` packs and launches micro-batches.
"""

from dataclasses import dataclass, field

from benchmarks.simulation.plant import Plant
from benchmarks.simulation.replica import Completion


class Group:
    """One prompt's samples. ``base``: the oldest weights that sampled it; ``due``: the step it is for, 0 for any."""

    __slots__ = ("base", "due", "group_id", "missing", "position", "samples", "tokens")

    def __init__(self, position: int, samples: list[Completion], tokens: int) -> None:
        self.position, self.samples, self.tokens = position, samples, tokens
        self.group_id = f"g{position}"
        self.missing = len(samples)
        self.base = self.due = 0


@dataclass
class Station:
    """Takes whole groups in the order in which they come, ``size`` a step; those of fixed batches, their own step's.

    ``streams``: a group's work is done when it comes; else a step's work begins with its last group.
    """

    plant: Plant
    size: int
    streams: bool
    free_at: float = 0.0
    collecting: int = 1
    _members: list[Group] = field(default_factory=list)
    _work_s: float = 0.0
    _early: dict[int, list[tuple[Group, float]]] = field(default_factory=dict)

    def whole(self, group: Group, now: float) -> list[tuple[float, list[Group]]]:
        """A group is whole: the steps that are complete by it, with the moments at which they end."""
        if group.due > self.collecting:
            self._early.setdefault(group.due, []).append((group, now))
            return []
        steps = self._take(group, now)
        while len(self._early.get(self.collecting, ())) and not self._members:
            for one, came in self._early.pop(self.collecting):
                steps += self._take(one, came)
        return steps

    def _take(self, group: Group, at: float) -> list[tuple[float, list[Group]]]:
        plant = self.plant
        work_s = plant.train_s_per_token * group.tokens + plant.train_s_per_step / self.size
        self._members.append(group)
        if self.streams:
            self.free_at = max(self.free_at, at) + work_s
        else:
            self._work_s += work_s
        if len(self._members) < self.size:
            return []
        if not self.streams:
            self.free_at = max(self.free_at, at) + self._work_s
            self._work_s = 0.0
        members, self._members = self._members, []
        self.collecting += 1
        ended = self.free_at
        # Handing the weights over comes between two steps.
        self.free_at += plant.stall_s
        return [(ended, members)]
