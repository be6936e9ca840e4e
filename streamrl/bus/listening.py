"""Reading heartbeats: how much of the silence of others is the reader's own.

When the reader's process did not run, or no broker answered, no heartbeat could arrive. That time is given back to
every process that is watched.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import structlog

from streamrl.bus.port import Record, Subscription
from streamrl.schemas.errors import BusUnavailable

log = structlog.get_logger()


@dataclass
class Listening:
    """Polls a subscription to heartbeats. ``timeout_s``: silence after which a process counts as lost.

    ``extend`` gets the seconds that are given back; ``given_back`` are those of the last poll, which ended at
    ``polled_at``. ``clock`` is monotonic.
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
        """The next records, within ``timeout_s``; time is given back before they are returned."""
        records = await self.subscription.poll(timeout_s=timeout_s)
        now, self.given_back = self.clock(), 0.0
        # A turn is short: one that took long means that this process stood still, in the poll or outside of it.
        if (paused := now - self.polled_at) > self.timeout_s / 2:
            self._give_back(paused)
            self._heard_at = now
        elif records:
            self._heard_at = now
        # A quarter of the time-out: the outage is noticed, and time given back, before any process counts as lost.
        elif now - self._heard_at >= self.timeout_s / 4:
            await self._ask()
        self.polled_at = self.clock()
        return records

    async def _ask(self) -> None:
        """When nothing at all is heard, ask the broker whether it is there; if it is not, no process is to blame."""
        try:
            # Any question that changes nothing would do.
            await self.subscription.end_offsets()
        except BusUnavailable as error:
            log.warning("the broker is silent, so time-outs are extended", error=str(error))
            self._give_back(self.clock() - self._heard_at)
        self._heard_at = self.clock()

    def _give_back(self, seconds: float) -> None:
        self.given_back = seconds
        self.extend(seconds)
