"""What an optional feature adds to a run's state: a part that takes the same records, and sections for displays."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from streamrl.observability.run_state.aggregates import EventLog
from streamrl.observability.run_state.trajectory_summary import TrajectorySummary
from streamrl.schemas.messages import Message

Section = Callable[[float], Any]
"""A section of a snapshot at a moment in epoch seconds; ``json.dumps`` takes it."""


class RunPart:
    """A part of a run's state. A feature's own overrides what it needs; what is here says nothing.

    Like the whole it is pure and bounded: time comes with the records, and what it holds has an upper limit.
    """

    def observe(self, message: Message, log: EventLog) -> None:
        """Take a decoded message of one of the run's topics into account; ``log`` gets what is worth a line."""

    def sampled(self, summary: TrajectorySummary) -> None:
        """Take a trajectory into account; of very many at once only some are told."""

    @property
    def topics(self) -> frozenset[str]:
        """Further topics that it wants to be read, by their full names, as far as they are known by now."""
        return frozenset()

    @property
    def own_trainer_leads(self) -> bool:
        """Whether the run ends with the last step of its own trainer."""
        return True

    def warning(self, now: float) -> str | None:
        """What a user is to do, in one line; None: nothing."""
        return None

    @property
    def warning_topics(self) -> frozenset[str]:
        """Of ``topics``, those whose newest record decides whether there is a warning."""
        return frozenset()

    @property
    def sections(self) -> Mapping[str, Section]:
        """Its sections of a snapshot, by name; the same names at all times."""
        return {}

    def status_lines(self) -> Iterator[str]:
        """What `streamrl status` tells of it."""
        return iter(())
