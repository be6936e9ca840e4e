"""What the control topic tells one worker: the newest weights, whether to start anything new, whether to leave."""

import asyncio
from dataclasses import dataclass, field
from typing import Literal

import structlog

from producers.generation.weights.adopter import Adopter
from schemas.errors import WireError
from schemas.messages.control import DrainWorker, FlowControl, RunFinished, WeightsReady
from schemas.ports.bus import Record, Subscription

log = structlog.get_logger()

POLL_S = 0.5


@dataclass
class Control:
    """Follows the control topic from its beginning; what it says holds from ``caught_up`` on.

    An order to drain this worker that stood there before this process began was meant for an earlier one.
    """

    subscription: Subscription
    worker_id: str
    adopter: Adopter
    mode: Literal["run", "pause", "drain"] = "run"
    drained: bool = False
    finished: bool = False
    caught_up: asyncio.Event = field(default_factory=asyncio.Event)
    _newest: WeightsReady | None = None

    @property
    def may_start(self) -> bool:
        """Whether new completions may be started."""
        return self.caught_up.is_set() and self.mode == "run" and not self.leaving

    @property
    def leaving(self) -> bool:
        """Whether this worker is to finish what it holds and leave."""
        return self.caught_up.is_set() and (self.drained or self.finished or self.mode == "drain")

    async def control_loop(self) -> None:
        """Follow the topic.

        Consumes: control. Produces: offers to the adopter, ``mode``, ``drained``, ``finished``.
        Waits for: the coordinator.
        On failure: a record that does not decode is logged and passed over; a failing bus raises.
        On stop: is cancelled; nothing is lost.
        """
        ends = await self.subscription.end_offsets()
        while any(position < ends[tp] for tp, position in (await self.subscription.positions()).items()):
            for record in await self.subscription.poll(timeout_s=POLL_S):
                self._obey(record, is_old=True)
        self.caught_up.set()
        self._offer()
        while True:
            for record in await self.subscription.poll(timeout_s=POLL_S):
                self._obey(record, is_old=False)
            self._offer()

    def _offer(self) -> None:
        if self._newest is not None:
            self.adopter.offer(self._newest)

    def _obey(self, record: Record, *, is_old: bool) -> None:
        try:
            message = record.message()
        except WireError as error:
            log.error("control record not understood", offset=record.offset, error=str(error))
            return
        match message:
            case WeightsReady():
                self._newest = max(self._newest or message, message, key=lambda ready: ready.version)
            case FlowControl():
                self.mode = message.mode
                log.info("flow changed", mode=message.mode, reason=message.reason)
            case DrainWorker() if message.worker_id == self.worker_id and not is_old:
                self.drained = True
                log.info("asked to leave", reason=message.reason)
            case RunFinished():
                self.finished = True
