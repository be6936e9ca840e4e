"""What a process hands to the role that it builds, so that no part of a role is replaced once it is built."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from streamrl.bus.port import Bus

if TYPE_CHECKING:
    from streamrl.producers.dispatch.status import DispatcherStatus
    from streamrl.producers.gateway.app import RequestObserver
    from streamrl.producers.gateway.calls import CallObserver
    from streamrl.producers.gateway.gateway import GatewayStatus
    from streamrl.producers.generation.engines.port import Engine


def _same(engine: "Engine") -> "Engine":
    return engine


def _ignore(_: object) -> None:
    pass


def _ignore_response(_status: int, _weight_bytes: int) -> None:
    pass


@dataclass(frozen=True)
class ProcessContext:
    """The world as a role meets it; without observers, the plain one.

    Args:
        name: of the process; a worker's is its id.
        bus: the bus, with whatever observes it.
        on_tick: called, by name, at every turn of a loop; the watchdog ends a process whose loops do not turn.
        around_engine: what a worker puts around its engine.
        watch_status: given the dispatcher's status, to ask for it now and then.
        on_response: called by the relay with the status and the bytes of weights of each answer that begins.
        request_observer: told by the gateway of its answers; None: nobody asks.
        calls: told by the gateway of the calls that it serves; None: nobody asks.
        watch_gateway: given the gateway's status, to ask for it now and then.
        adopt: a trainer takes over a run that it finds on the topics and not in its directory.
    """

    name: str
    bus: Bus
    on_tick: Callable[[str], None] = _ignore
    around_engine: "Callable[[Engine], Engine]" = _same
    watch_status: "Callable[[Callable[[], DispatcherStatus]], None]" = _ignore
    on_response: Callable[[int, int], None] = _ignore_response
    request_observer: "RequestObserver | None" = None
    calls: "CallObserver | None" = None
    watch_gateway: "Callable[[Callable[[], GatewayStatus]], None]" = _ignore
    adopt: bool = False
