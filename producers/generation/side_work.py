"""The port for what a worker does besides its orders, such as samples of held-out prompts or a gateway's requests.

Side work samples in the same engine, in slots of its own. The worker knows none of it by name.
"""

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from streamrl.bus.port import Bus
from streamrl.producers.generation.outbox import Outbox
from streamrl.producers.generation.rollout import Rollout
from streamrl.producers.generation.status import WorkerStatus


@dataclass(frozen=True)
class HostWorker:
    """The worker, as far as its side work uses it.

    ``rollout`` and ``outbox`` are those of its orders: their counts and places are the orders'. What side work has to
    say in heartbeats it writes to ``status``. ``on_tick`` is called, with a name, at every turn of a loop.
    """

    bus: Bus
    run_name: str
    incarnation: str
    max_prompt_length: int
    rollout: Rollout
    outbox: Outbox
    status: WorkerStatus
    on_tick: Callable[[str], None]

    @property
    def worker_id(self) -> str:
        """Its name."""
        return self.rollout.worker_id


class SideWork(Protocol):
    """One kind of side work of one incarnation of a worker; the methods are called in this order."""

    @property
    def holds_up_leaving(self) -> bool:
        """Whether a worker that leaves waits, as for its orders, until this is idle; else what runs is dropped."""
        ...

    async def subscribe(self) -> None:
        """Open what it reads from: what is sent after the worker's first heartbeat must not be missed.

        Raises:
            BusUnavailable: no broker answers.
        """
        ...

    async def begin(self) -> Sequence[Coroutine[Any, Any, None]]:
        """Start, now that the engine runs; its loops, which the worker runs and cancels when it has left."""
        ...

    async def until_idle(self) -> None:
        """Return when nothing is sampled.

        The worker waits for it before it takes weights of another policy; it takes none while the status says
        ``is_of_an_arm``, if it is for the served policy alone.
        """
        ...

    async def close(self) -> None:
        """Release what it holds, whether it began or not; idempotent."""
        ...


class SideWorkFactory(Protocol):
    """How a worker comes by side work; each incarnation builds its own."""

    @property
    def reserved_slots(self) -> int:
        """How many of the engine's slots no order gets."""
        ...

    def build(self, host: HostWorker) -> SideWork:
        """The side work of this worker."""
        ...
