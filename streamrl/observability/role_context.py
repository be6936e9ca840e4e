"""What a process hands to the role that it builds, so that no part of a role is replaced once it is built."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from streamrl.bus.port import Bus

if TYPE_CHECKING:
    from streamrl.observability.metrics.families import Meters
    from streamrl.producers.generation.engines.port import Engine


class Role(Protocol):
    """What every role is, once built."""

    async def run(self, stop: asyncio.Event) -> None:
        """Work until stopped."""
        ...


@runtime_checkable
class StandbyRole(Role, Protocol):
    """A role that does nothing while another process does the work."""

    def take_over(self) -> None:
        """The other process is gone."""
        ...


def _same(engine: "Engine") -> "Engine":
    return engine


def _ignore(_: object) -> None:
    pass


def _ignore_response(_status: int, _weight_bytes: int) -> None:
    pass


@dataclass(frozen=True)
class ProcessContext:
    """What surrounds a role; without observers, the plain bus and engine.

    Args:
        name: of the process; a worker's is its id.
        bus: the bus, with whatever observes it.
        on_tick: called, by name, at every turn of a loop; the watchdog ends a process whose loops do not turn.
        around_engine: what a worker puts around its engine.
        on_response: called by the relay with the status and the bytes of weights of each answer that begins.
        meters: the figures that this process exports; None: it exports none.
        collect: given a function that sets figures of the role, to be called every few seconds.
        tracer: what the role's feature made to trace it (``FeatureRole.tracer``); None: nothing is traced.
        adopt: a trainer takes over a run that it finds on the topics and not in its directory.
    """

    name: str
    bus: Bus
    on_tick: Callable[[str], None] = _ignore
    around_engine: "Callable[[Engine], Engine]" = _same
    on_response: Callable[[int, int], None] = _ignore_response
    meters: "Meters | None" = None
    collect: "Callable[[Callable[[Meters], None]], None]" = _ignore
    tracer: Any = None
    adopt: bool = False
