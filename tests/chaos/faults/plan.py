"""What is going to happen to a run, and when: a plan made from a seed. The same seed always makes the same plan."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.chaos.runs.brokers import Kind

if TYPE_CHECKING:
    from tests.chaos.runs.chaos_run import ChaosRun

Sections = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Fault:
    """One kind of fault. ``inject`` returns when it is over: the time at which it ended, none for now.

    ``fresh``: on a new broker, because one that is killed takes longer to come back the more topics it has.
    ``lasts``: shortest and longest duration in seconds. ``mixes``: a second fault may happen in the same run.
    ``cases``: of the catalogue. ``copies``: beside a relay that holds copies.
    """

    name: str
    inject: "Callable[[ChaosRun, Event], Awaitable[float | None]]"
    cases: tuple[str, ...] = ()
    targets: tuple[str, ...] = ("",)
    lasts: tuple[float, float] = (0.0, 0.0)
    broker: Kind = "one"
    mixes: bool = True
    fresh: bool = False
    settings: Sections = field(default_factory=dict)
    prepare: "Callable[[ChaosRun], None] | None" = None
    copies: bool = False


@dataclass(frozen=True)
class Event:
    """A fault that happens ``after_s`` seconds after the trainer has reached ``at_step``."""

    fault: Fault
    at_step: int
    after_s: float
    lasts_s: float
    target: str
    seed: int

    def __str__(self) -> str:
        target = f" {self.target}" if self.target else ""
        lasts = f" for {self.lasts_s:.1f} s" if self.lasts_s else ""
        return f"{self.fault.name}{target} at step {self.at_step} + {self.after_s:.2f} s{lasts}"


@dataclass(frozen=True)
class Plan:
    """A run's faults; the first one is what the run is about.

    ``drawn``: settings that are the seed's, where the first fault has none of its own; ``copies``: whether there is a
    relay with copies.
    """

    seed: int
    events: tuple[Event, ...]
    drawn: Sections = field(default_factory=dict)
    copies: bool = False

    @property
    def fault(self) -> Fault:
        return self.events[0].fault

    @property
    def broker(self) -> Kind:
        return self.fault.broker

    @property
    def mode(self) -> str:
        """One run in three has batches that are fixed when they are admitted, unless its first fault wants others."""
        return "one_step_async" if self.seed % 3 == 1 else "trajectory_async"

    @property
    def settings(self) -> Sections:
        layers = self.drawn, {"loop": {"mode": self.mode}}, self.fault.settings
        names = {name for layer in layers for name in layer}
        return {name: {key: value for one in layers for key, value in one.get(name, {}).items()} for name in names}

    @property
    def has_copies(self) -> bool:
        return self.copies or any(event.fault.copies for event in self.events)

    @property
    def preparations(self) -> "list[Callable[[ChaosRun], None]]":
        return [event.fault.prepare for event in self.events if event.fault.prepare is not None]

    @property
    def command(self) -> str:
        """What reproduces this run."""
        return f"python -m tests.chaos --only {self.fault.name} --seed {self.seed} --runs 1 --seeds 0"

    def __str__(self) -> str:
        settings = self.settings
        adopt = settings.get("generation", {}).get("adopt")
        said = [settings["loop"]["mode"], *([f"adopt {adopt}"] if adopt else [])]
        said += ["repack"] if settings.get("dispatch", {}).get("repack") else []
        said += ["copies"] if self.has_copies else []
        return f"seed {self.seed}, {', '.join(said)}: " + "; ".join(str(event) for event in self.events)
