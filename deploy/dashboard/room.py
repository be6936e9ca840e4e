"""What the dashboard's handlers share: the run that is looked at, and how its topics are reached. Knows no web."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from deploy.inspection.bus_history import BusHistory
from deploy.inspection.replays.show import Piece
from deploy.live.state import LiveState
from schemas.ports.bus import Bus

CLIENT_ID = "streamrl-ui"
PLAIN: Piece = "#{}".format


@dataclass
class Room:
    """``run_path``: how the run is named on a command line. ``load_pieces``: slow; loads what spells tokens.

    ``advice``: what a user can do when the broker does not answer.
    """

    bus: Bus
    state: LiveState
    run_path: str
    load_pieces: Callable[[], Piece] = lambda: PLAIN
    advice: str = ""
    _pieces: Piece | None = None
    _loading: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def history(self) -> BusHistory:
        """The run's topics up to now."""
        return BusHistory(self.bus, CLIENT_ID)

    async def pieces(self) -> Piece:
        """Gives a token's text; loaded once, in a thread."""
        async with self._loading:
            if self._pieces is None:
                self._pieces = await asyncio.to_thread(self.load_pieces)
        return self._pieces
