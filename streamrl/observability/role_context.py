"""The context that a process passes to its role, such as a worker or a trainer, when it builds the role.

The context includes all observers, so that no part of a built role has to be replaced later.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from streamrl.bus.port import Bus

if TYPE_CHECKING:
    from streamrl.observability.metrics.families import Meters
    from streamrl.producers.generation.engines.port import Engine


class Role(Protocol):
    """A built role, ready to run."""

    async def run(self, stop: asyncio.Event) -> None:
        """Work until stopped."""
        ...


@runtime_checkable
class StandbyRole(Role, Protocol):
    """A role that waits while another process does the work."""

    def take_over(self) -> None:
        """Start to work, because the other process is gone."""
        ...


def _unchanged(engine: "Engine") -> "Engine":
    return engine


def _ignore(_: object) -> None:
    pass


def _ignore_response(_status: int, _weight_bytes: int) -> None:
    pass


@dataclass(frozen=True)
class ProcessContext:
    """Everything that a role gets from its process. By default, nothing is observed and the engine is not wrapped.

    Args:
        name: name of the process; for a worker, its id.
        bus: the bus, wrapped by its observers.
        on_tick: called with a loop's name at each iteration; the watchdog ends a process whose loops stall.
        around_engine: wraps a worker's engine.
        on_response: called when a relay starts a response, with the HTTP status and the number of weight bytes.
        meters: the metrics that this process exports; None: it exports none.
        collect: registers a function that sets the role's metrics and is called every few seconds.
        tracer: the tracer of the role's feature (``FeatureRole.tracer``); None: nothing is traced.
        adopt: whether a trainer takes over a run that exists on the topics but not in the trainer's directory.
    """

    name: str
    bus: Bus
    on_tick: Callable[[str], None] = _ignore
    around_engine: "Callable[[Engine], Engine]" = _unchanged
    on_response: Callable[[int, int], None] = _ignore_response
    meters: "Meters | None" = None
    collect: "Callable[[Callable[[Meters], None]], None]" = _ignore
    tracer: Any = None
    adopt: bool = False
