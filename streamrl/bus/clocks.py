"""The clocks of a role, handed in so that it can be simulated."""

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Clocks:
    """``monotonic``: seconds on a clock that is never set; decisions rest on it. ``time_of_day``: seconds since 1970,
    which are only written into messages.
    """

    monotonic: Callable[[], float] = time.monotonic
    time_of_day: Callable[[], float] = time.time
