"""The clock of group time-outs: it runs only while samples that are late could have been heard."""

from collections.abc import Callable
from dataclasses import dataclass, field

from schemas.errors import BusError
from schemas.ports.bus import Subscription

STALL_S = 5.0
"""Most of one round that counts: when this process stood still, nobody else was late."""
ASK_S = 1.0
"""After so long without a record the broker is asked whether it is there: its silence is not the workers'."""


@dataclass
class Patience:
    """``listened_s``: seconds in which everything on the topic was read, and more could have come."""

    clock: Callable[[], float]
    listened_s: float = 0.0
    _looked_at: float = field(init=False)

    def __post_init__(self) -> None:
        self._looked_at = self.clock()

    async def listen(self, subscription: Subscription, heard: int, *, caught_up: bool) -> None:
        """Count the time since the last look, after a read that brought so many records."""
        now = self.clock()
        silent_s = max(0.0, now - self._looked_at)
        if not heard and silent_s < ASK_S:
            return
        if caught_up and (heard or await _answers(subscription)):
            self.listened_s += min(silent_s, STALL_S)
        self._looked_at = now


async def _answers(subscription: Subscription) -> bool:
    try:
        await subscription.end_offsets()
    except BusError:
        return False
    return True
