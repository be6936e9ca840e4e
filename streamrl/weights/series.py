"""Which series of weights versions a run has besides its own, and which series each worker follows.

A version belongs to a series; numbers of different series are not comparable. The name of the run's own is empty.
Workers and relays handle every series alike, and ask here which ones are wanted.
"""

from typing import Protocol

from streamrl.schemas.messages import Message


class WantedSeries(Protocol):
    """The series that the control topic asks for."""

    def observe(self, message: Message) -> bool:
        """Take one message of the control topic into account; returns whether the answers may have changed."""
        ...

    @property
    def names(self) -> frozenset[str] | None:
        """The series, besides the run's own, that workers want now; None: not known yet."""
        ...

    def of_worker(self, worker_id: str) -> str:
        """The series that a worker follows. A change is logged."""
        ...


class OwnSeries:
    """The answers for a run with one series."""

    names: frozenset[str] | None = frozenset()

    def observe(self, message: Message) -> bool:
        """See ``WantedSeries``: nothing ever changes."""
        return False

    def of_worker(self, worker_id: str) -> str:
        """See ``WantedSeries``: the run's own series."""
        return ""
