"""What a run came to: sums at the end of each step, so that what comes of them can leave out the first steps; and where
slots of the replicas are lost, and why, looked at every few seconds of virtual time.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from benchmarks.simulation.fleet import LINEAGE
from streamrl.schemas.identifiers import PolicyVersion

if TYPE_CHECKING:
    from benchmarks.simulation.world import World


@dataclass
class Marks:
    """Sums at the end of a step: the moment, then tokens trained, replica-seconds, cache-seconds, tokens sampled,
    training seconds, completions moved and replicas released so far.

    ``finished`` and ``consumed``: completions that ended, and that were trained, by staleness in steps; ``latencies``:
    how many of the outcome's are of before; ``slots``: by what they did, at each look.
    """

    at: float
    tokens: int
    busy_s: float
    kv_s: float
    sampled: int
    training_s: float
    moves: int = 0
    released: int = 0
    finished: Counter[int] = field(default_factory=Counter)
    consumed: Counter[int] = field(default_factory=Counter)
    latencies: int = 0
    slots: Counter[str] = field(default_factory=Counter)


@dataclass
class Outcome:
    """``marks``: one for the start and one a step. ``finished``, ``consumed``, ``slots``: as in ``Marks``, in all.

    ``wholes``: when each group was whole, and its tokens. ``probes``: moments that were asked for, each with the tokens
    that had been sampled by then.
    """

    replicas: int
    marks: list[Marks] = field(default_factory=list)
    finished: Counter[int] = field(default_factory=Counter)
    consumed: Counter[int] = field(default_factory=Counter)
    slots: Counter[str] = field(default_factory=Counter)
    latencies: list[float] = field(default_factory=list)
    wholes: list[tuple[float, int]] = field(default_factory=list)
    probes: list[tuple[float, int]] = field(default_factory=list)
    events: int = 0
    generated: int = 0
    trained: int = 0

    def per_s(self, name: str, warm_up: int) -> float:
        """How fast a sum grew after so many steps."""
        first, last = self.marks[warm_up], self.marks[-1]
        growth: float = getattr(last, name) - getattr(first, name)
        return growth / (last.at - first.at)

    def per_step(self, name: str, warm_up: int) -> float:
        """How much a sum grows in a step."""
        return self.per_s(name, warm_up) * self.step_s(warm_up)

    def rate(self, warm_up: int) -> float:
        """Trained tokens a second, prompts included, after so many steps."""
        return self.per_s("tokens", warm_up)

    def step_s(self, warm_up: int) -> float:
        """Mean seconds of a step."""
        return (self.marks[-1].at - self.marks[warm_up].at) / (len(self.marks) - 1 - warm_up)

    def share(self, name: str, warm_up: int) -> float:
        """Of all replica-seconds: ``busy_s`` with something running, or ``kv_s`` of the cache in use."""
        return self.per_s(name, warm_up) / self.replicas

    def sampled_rate(self, warm_up: int) -> float:
        """Tokens sampled a second."""
        return self.per_s("sampled", warm_up)

    def counted(self, name: str, warm_up: int) -> Counter[Any]:
        """Completions by staleness, ``finished`` or ``consumed``, or ``slots``, after so many steps."""
        first: Counter[Any] = getattr(self.marks[warm_up], name)
        last: Counter[Any] = getattr(self.marks[-1], name)
        return last - first

    def latencies_after(self, warm_up: int) -> list[float]:
        """Seconds of each completion that ended after so many steps."""
        return self.latencies[self.marks[warm_up].latencies : self.marks[-1].latencies]


KINDS = ("used", "not_admitted", "ramps_down", "free")
"""Slots that sample; free ones when admission allows no more under the bound of staleness; free ones of replicas that
will take new weights once they run nothing; and others."""


class Bubbles:
    """Of a world that is looked at every ``look_s`` of its system."""

    def __init__(self, world: "World") -> None:
        self._world = world
        if world.system.look_s:
            world.at(world.system.look_s, self._look)

    def _look(self) -> None:
        world, counts = self._world, self._world.outcome.slots
        world.at(world.now + world.system.look_s, self._look)
        room = world.ledger.room(PolicyVersion(LINEAGE, world.trained_version))
        for replica in world.replicas:
            used = min(len(replica.active), world.view.told_slots)
            counts["used"] += used
            free = world.view.told_slots - used
            # Whoever awaits weights could begin nothing either where admission allows no more.
            kind = "not_admitted" if not room else "ramps_down" if replica.number in world.view.awaiting else "free"
            counts[kind] += free
        counts["looks"] += 1
        counts["trainer_waits"] += world.station.free_at <= world.now
