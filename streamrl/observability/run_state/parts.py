"""The part that an optional feature adds to a run's state: it takes the same records, and gives displays sections."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from streamrl.observability.run_state.aggregates import EventLog
from streamrl.observability.run_state.trajectory_summary import TrajectorySummary
from streamrl.schemas.messages import Message

Section = Callable[[float], Any]
"""Gives a section of a snapshot, which ``json.dumps`` accepts, for a time in epoch seconds."""


class RunPart:
    """A part of a run's state. A feature overrides the methods that it needs; by default they do nothing.

    Like the whole state it is pure and bounded: time comes with the records, and its size has an upper limit.
    """

    def observe(self, message: Message, log: EventLog) -> None:
        """Take a decoded message of one of the run's topics into account, and add notable events to ``log``."""

    def sampled(self, summary: TrajectorySummary) -> None:
        """Take a trajectory into account. If very many arrive at once, only some are passed on."""

    def note_ends(self, ends: Mapping[int, int]) -> None:
        """Take the ends of the trajectories' topic into account; ``ends``: their sums by length bucket."""

    @property
    def topics(self) -> frozenset[str]:
        """Full names of further topics to read, as far as they are known."""
        return frozenset()

    @property
    def own_trainer_leads(self) -> bool:
        """Whether the run ends with the last step of its own trainer."""
        return True

    def warning(self, now: float) -> str | None:
        """One line that tells a user what to do; None: nothing."""
        return None

    @property
    def warning_topics(self) -> frozenset[str]:
        """The subset of ``topics`` whose newest record decides whether there is a warning."""
        return frozenset()

    @property
    def sections(self) -> Mapping[str, Section]:
        """The part's sections of a snapshot, by name; the names never change."""
        return {}

    def status_lines(self) -> Iterator[str]:
        """The part's lines of `streamrl status`."""
        return iter(())
