"""Reads heartbeats, and extends time-outs by the time in which the reader itself could not hear any.

No heartbeat can arrive while the reader's process does not run or while no broker answers. That time is given back to
every watched process.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import structlog

from streamrl.bus.port import Record, Subscription
from streamrl.schemas.errors import BusUnavailable

log = structlog.get_logger()


@dataclass
class HeartbeatReader:
    """Polls a subscription to heartbeats. ``timeout_s``: seconds of silence after which a process counts as lost.

    ``extend`` is called with the seconds to give back. ``given_back`` holds the seconds given back in the last poll,
    which ended at ``polled_at``. ``clock`` is monotonic.
    """

    subscription: Subscription
    timeout_s: float
    extend: Callable[[float], None]
    clock: Callable[[], float]
    polled_at: float = field(init=False)
    given_back: float = field(default=0.0, init=False)
    _heard_at: float = field(init=False)

    def __post_init__(self) -> None:
        self.polled_at = self._heard_at = self.clock()

    async def poll(self, timeout_s: float) -> Sequence[Record]:
        """The next records, within ``timeout_s``. Time is given back before the records are returned."""
        records = await self.subscription.poll(timeout_s=timeout_s)
        now, self.given_back = self.clock(), 0.0
        # A turn is short. A long one means that this process was stopped, inside the poll or outside.
        if (paused := now - self.polled_at) > self.timeout_s / 2:
            self._give_back(paused)
            self._heard_at = now
        elif records:
            self._heard_at = now
        # At a quarter of the time-out, an outage is noticed and time given back before any process counts as lost.
        elif now - self._heard_at >= self.timeout_s / 4:
            await self._ask()
        self.polled_at = self.clock()
        return records

    async def _ask(self) -> None:
        """After silence from all processes, ask the broker for an answer. Without one, the silence is the broker's."""
        try:
            # Any request that changes nothing would do.
            await self.subscription.end_offsets()
        except BusUnavailable as error:
            log.warning("the broker is silent, so time-outs are extended", error=str(error))
            self._give_back(self.clock() - self._heard_at)
        self._heard_at = self.clock()

    def _give_back(self, seconds: float) -> None:
        self.given_back = seconds
        self.extend(seconds)
