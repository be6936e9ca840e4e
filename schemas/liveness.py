"""Which processes are alive, judged by their heartbeats. Pure: the caller passes the time.

Invariants, each with a test of its name:
- the_newest_incarnation_owns_the_name: the newest is the one whose first heartbeat is last on the topic, by no clock. A
  replaced incarnation never gets the name back. So only the topic's order decides, before and after a restart of the
  reader;
- a_repeated_heartbeat_does_not_renew_the_timeout: only a higher sequence number does;
- time_when_the_reader_hears_nothing_does_not_count: a process is not lost because its reader was cut off.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar


class AnyBeat(Protocol):
    """A heartbeat: the process that sent it, and how many that process had sent before."""

    @property
    def incarnation(self) -> str:
        """Id of the process; every start gets a new one."""
        ...

    @property
    def sequence(self) -> int:
        """Number of the heartbeat within its incarnation."""
        ...


Beat = TypeVar("Beat", bound=AnyBeat)


@dataclass(slots=True)
class _Last(Generic[Beat]):
    beat: Beat
    at: float


class LastBeats(Generic[Beat]):
    """The last heartbeat of each process, by name, and its arrival time in seconds of the reader's clock.

    ``timeout_s``: seconds of silence after which a process counts as lost.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._last: dict[str, _Last[Beat]] = {}
        self._former: set[tuple[str, str]] = set()

    def observe(self, name: str, beat: Beat, now: float) -> bool:
        """Record a heartbeat; False if it is a repeat or comes from a replaced incarnation."""
        if self.was_replaced(name, beat.incarnation):
            return False
        last = self._last.get(name)
        if last is not None and last.beat.incarnation != beat.incarnation:
            self._former.add((name, last.beat.incarnation))
        elif last is not None and beat.sequence <= last.beat.sequence:
            return False
        self._last[name] = _Last(beat, now)
        return True

    def was_replaced(self, name: str, incarnation: str) -> bool:
        """Whether another incarnation has taken over the name."""
        return (name, incarnation) in self._former

    def get(self, name: str) -> Beat | None:
        """The last heartbeat of a process; None if there is none."""
        last = self._last.get(name)
        return last.beat if last is not None else None

    def is_silent(self, name: str, now: float) -> bool:
        """Whether a process has sent nothing new for longer than ``timeout_s``."""
        last = self._last.get(name)
        return last is None or now - last.at > self.timeout_s

    def extend(self, seconds: float) -> None:
        """Give every process more time, because the reader itself heard nothing for ``seconds``."""
        for last in self._last.values():
            last.at += seconds

    def __iter__(self) -> Iterator[tuple[str, Beat]]:
        """Names and last heartbeats, silent processes included."""
        return ((name, last.beat) for name, last in self._last.items())
