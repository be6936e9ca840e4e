"""The port for a worker's side work, besides its orders: samples of held-out prompts, or a gateway's requests.

Side work samples in the same engine, in slots of its own. The worker knows no kind of it by name.
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
    """The parts of a worker that its side work uses.

    ``rollout`` and ``outbox`` are those of the work orders, with their counts and places. Side work writes to
    ``status`` what heartbeats should report of it. ``on_tick`` is called with a loop's name at each turn of that loop.
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
        """The worker's id."""
        return self.rollout.worker_id


class SideWork(Protocol):
    """One kind of side work of one incarnation of a worker; the methods are called in this order."""

    @property
    def holds_up_leaving(self) -> bool:
        """Whether a leaving worker waits until this is idle, as for its orders; else running samples are dropped."""
        ...

    async def subscribe(self) -> None:
        """Subscribe to its topics, before the worker's first heartbeat, so that no later record is missed.

        Raises:
            BusUnavailable: no broker answers.
        """
        ...

    async def begin(self) -> Sequence[Coroutine[Any, Any, None]]:
        """Start, now that the engine runs. Returns loops, which the worker runs, and cancels when it leaves."""
        ...

    async def until_idle(self) -> None:
        """Return when no sample is running.

        The worker waits for this before it adopts another policy's weights. Side work for the served policy only starts
        no samples while the status says ``has_arm_weights``.
        """
        ...

    async def close(self) -> None:
        """Release its resources, also if it never started; idempotent."""
        ...


class SideWorkFactory(Protocol):
    """Builds one kind of side work, once for each incarnation of a worker."""

    @property
    def reserved_slots(self) -> int:
        """The engine's slots that work orders do not get."""
        ...

    def build(self, host: HostWorker) -> SideWork:
        """Build the side work of a worker."""
        ...
