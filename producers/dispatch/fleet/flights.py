"""The orders under way: which samples are still missing, and with which worker. Pure; knows no topics.

A group stays here until it is trained or skipped; its worker carries it only as long as samples are missing.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from schemas.identifiers import make_trajectory_id
from schemas.messages.prompts import WorkOrder


@dataclass(slots=True)
class Flight:
    """One group under way. ``worker_id`` none: its worker was lost and no other has it yet.

    ``progress_at``: when it was ordered last or a sample of it arrived.
    """

    order: WorkOrder
    worker_id: str | None
    incarnation: str | None
    sent_at: float
    missing: set[int]
    progress_at: float
    skipped: dict[str, int] = field(default_factory=dict)

    @property
    def missing_tokens(self) -> int:
        """Predicted tokens still to be sampled."""
        return len(self.missing) * self.order.estimate.median

    @property
    def samples(self) -> list[tuple[str, int]]:
        """Group id and index of each sample missing, in order."""
        return [(self.order.group_id, index) for index in sorted(self.missing)]


class FlightTable:
    """All groups under way, and the load of each worker that follows from them."""

    def __init__(self) -> None:
        self._flights: dict[str, Flight] = {}
        self._sequences: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._flights)

    def get(self, group_id: str) -> Flight | None:
        """The flight of a group, if it is under way."""
        return self._flights.get(group_id)

    def unfinished(self) -> Iterator[Flight]:
        """Flights with samples missing, the longest under way first."""
        return (flight for flight in self._flights.values() if flight.missing)

    def load(self, worker_id: str) -> tuple[int, int]:
        """Sequences and predicted tokens that a worker still owes."""
        return self._sequences[worker_id], self._tokens[worker_id]

    def send(self, order: WorkOrder, incarnation: str | None, sent_at: float) -> None:
        """An order goes to its worker: a new group's, or one for what is missing of a known group."""
        flight = self._flights.get(order.group_id)
        if flight is None:
            flight = Flight(order, None, None, sent_at, set(order.sample_indices), sent_at)
            self._flights[order.group_id] = flight
        self.release(flight)
        flight.order, flight.worker_id, flight.incarnation = order, order.worker_id, incarnation
        flight.sent_at = flight.progress_at = sent_at
        self._account(flight, 1)

    def release(self, flight: Flight) -> None:
        """Its worker no longer has this flight."""
        self._account(flight, -1)
        flight.worker_id = None

    def extend(self, seconds: float) -> None:
        """Nothing could arrive for so long."""
        for flight in self._flights.values():
            flight.progress_at += seconds

    def produced(self, group_id: str, sample_index: int, at: float) -> Flight | None:
        """A sample is on the topic; its flight if that is news."""
        flight = self._flights.get(group_id)
        if flight is None or sample_index not in flight.missing:
            return None
        self._account(flight, -1)
        flight.missing.discard(sample_index)
        flight.progress_at = max(flight.progress_at, at)
        self._account(flight, 1)
        return flight

    def give_up(self, flight: Flight) -> bool:
        """Stop waiting for what is missing; true if no sample of the group exists, so that nobody will end it."""
        nothing_exists = len(flight.missing) == flight.order.num_generations
        self._account(flight, -1)
        flight.missing.clear()
        return nothing_exists

    def skip(self, group_id: str, sample: str, step: int, *, closed: bool) -> bool:
        """The trainer skipped a sample at a step; true once nothing of the group can be trained any more.

        That is when it has skipped every sample, or, ``closed``, every one that exists: it waits for no others.
        """
        flight = self._flights[group_id]
        flight.skipped[sample] = step
        if len(flight.skipped) >= flight.order.num_generations:
            return True
        produced = set(range(flight.order.num_generations)) - flight.missing
        return closed and all(make_trajectory_id(group_id, index) in flight.skipped for index in produced)

    def forget_skips_after(self, step: int) -> None:
        """The trainer went back to a step and will judge again what it skipped since."""
        for flight in self._flights.values():
            flight.skipped = {sample: at for sample, at in flight.skipped.items() if at <= step}

    def end(self, group_id: str) -> None:
        """The group was trained or skipped."""
        flight = self._flights.pop(group_id, None)
        if flight is not None:
            self._account(flight, -1)

    def _account(self, flight: Flight, sign: int) -> None:
        if flight.worker_id is not None:
            self._sequences[flight.worker_id] += sign * len(flight.missing)
            self._tokens[flight.worker_id] += sign * flight.missing_tokens
