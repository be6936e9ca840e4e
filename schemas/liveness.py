"""Which processes are alive, by their heartbeats. Pure: the caller passes the time.

Invariants, each with a test of its name:
- the_newest_incarnation_holds_the_name: newest by the first heartbeat on the topic, not by any clock. An incarnation
  that another one followed never gets the name back. So the order of the topic alone decides, before and after a
  restart of the reader;
- a_repeated_heartbeat_is_no_sign_of_life: only a higher sequence number renews a process's time;
- a_reader_s_own_silence_costs_no_process_its_name: time in which the reader heard nothing at all does not count.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar


class AnyBeat(Protocol):
    """A heartbeat: which process sent it, and how many it had sent before."""

    @property
    def incarnation(self) -> str:
        """Of the process: another one for every start."""
        ...

    @property
    def sequence(self) -> int:
        """Counts the heartbeats of an incarnation."""
        ...


Beat = TypeVar("Beat", bound=AnyBeat)


@dataclass(slots=True)
class _Last(Generic[Beat]):
    beat: Beat
    at: float


class LastBeats(Generic[Beat]):
    """The last heartbeat of each process, by name, and when it arrived, in seconds of the reader's clock.

    ``timeout_s``: a process that is silent for longer counts as lost.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._last: dict[str, _Last[Beat]] = {}
        self._former: set[tuple[str, str]] = set()

    def observe(self, name: str, beat: Beat, now: float) -> bool:
        """Note a heartbeat; False if it says nothing new: it is a repeat, or of an incarnation that was replaced."""
        if self.is_former(name, beat.incarnation):
            return False
        last = self._last.get(name)
        if last is not None and last.beat.incarnation != beat.incarnation:
            self._former.add((name, last.beat.incarnation))
        elif last is not None and beat.sequence <= last.beat.sequence:
            return False
        self._last[name] = _Last(beat, now)
        return True

    def is_former(self, name: str, incarnation: str) -> bool:
        """Whether another incarnation took over the name."""
        return (name, incarnation) in self._former

    def get(self, name: str) -> Beat | None:
        """The last heartbeat of a process; None if there was none."""
        last = self._last.get(name)
        return last.beat if last is not None else None

    def is_silent(self, name: str, now: float) -> bool:
        """Whether a process has sent nothing new for longer than ``timeout_s``."""
        last = self._last.get(name)
        return last is None or now - last.at > self.timeout_s

    def extend(self, seconds: float) -> None:
        """Give every process so much more time: the reader itself heard nothing for so long."""
        for last in self._last.values():
            last.at += seconds

    def __iter__(self) -> Iterator[tuple[str, Beat]]:
        """Names and last heartbeats, silent processes included."""
        return ((name, last.beat) for name, last in self._last.items())
