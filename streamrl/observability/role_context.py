"""What a process passes to the role that it builds, so that no part of a built role has to be replaced."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from streamrl.bus.port import Bus

if TYPE_CHECKING:
    from streamrl.observability.metrics.families import Meters
    from streamrl.producers.generation.engines.port import Engine


class Role(Protocol):
    """A built role."""

    async def run(self, stop: asyncio.Event) -> None:
        """Work until stopped."""
        ...


@runtime_checkable
class StandbyRole(Role, Protocol):
    """A role that waits while another process does the work."""

    def take_over(self) -> None:
        """Start to work: the other process is gone."""
        ...


def _same(engine: "Engine") -> "Engine":
    return engine


def _ignore(_: object) -> None:
    pass


def _ignore_response(_status: int, _weight_bytes: int) -> None:
    pass


@dataclass(frozen=True)
class ProcessContext:
    """The surroundings of a role. By default the engine is plain and nothing is observed.

    Args:
        name: name of the process; a worker's id.
        bus: the bus, wrapped by its observers.
        on_tick: called with a loop's name at each of its turns; the watchdog ends a process whose loops do not turn.
        around_engine: wraps a worker's engine.
        on_response: called by the relay when an answer starts, with its status and its bytes of weights.
        meters: the metrics that this process exports; None: it exports none.
        collect: takes a function that sets metrics of the role, and calls it every few seconds.
        tracer: the tracer of the role's feature (``FeatureRole.tracer``); None: nothing is traced.
        adopt: a trainer takes over a run that is on the topics but not in its directory.
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
