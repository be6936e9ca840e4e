"""Which series of weights versions there are beside the run's own, and who is to follow which.

A version belongs to a series; the numbers of two series say nothing of each other. The name of the run's own is empty.
Workers and relays hold, fetch and pass on every series alike, and ask here which ones are wanted.
"""

from typing import Protocol

from streamrl.schemas.messages import Message


class WantedSeries(Protocol):
    """What control says of series."""

    def observe(self, message: Message) -> bool:
        """Take one message of the control topic into account; whether the answers may be others now."""
        ...

    @property
    def names(self) -> frozenset[str] | None:
        """The series beside the run's own that workers want now; None: not known yet."""
        ...

    def of_worker(self, worker_id: str) -> str:
        """The series that a worker is to follow; the log gets a line when it is another than before."""
        ...


class OwnSeries:
    """The answers for a run with one series."""

    names: frozenset[str] | None = frozenset()

    def observe(self, message: Message) -> bool:
        """See ``WantedSeries``: nothing is said of series."""
        return False

    def of_worker(self, worker_id: str) -> str:
        """See ``WantedSeries``: the run's own."""
        return ""
