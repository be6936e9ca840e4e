"""The clocks of a role, passed in so that the role can be simulated."""

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Clocks:
    """``monotonic``: seconds on a clock that is never set; all decisions use it. ``time_of_day``: seconds since 1970,
    only for messages.
    """

    monotonic: Callable[[], float] = time.monotonic
    time_of_day: Callable[[], float] = time.time
