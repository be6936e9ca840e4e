"""Times of a relay, and how many versions it keeps. No user sets these; tests shorten the times."""

from dataclasses import dataclass

KEEP_VERSIONS = 2
"""Newest versions that a relay with copies keeps: the one that workers fetch, and the one before, for slow ones."""
LEASE_S = 30.0
"""Seconds that a version stays after it was last read, even if it is old: a reader pauses between its files."""


@dataclass(frozen=True, slots=True)
class RelayTimes:
    """In seconds. ``upstream_timeout_s``: of silence, after which another upstream is asked."""

    heartbeat_interval_s: float = 1.0
    upstream_timeout_s: float = 5.0


TIMES = RelayTimes()
"""The times of every relay outside of tests."""
