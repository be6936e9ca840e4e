"""The versions from which ages are counted: how a trainer relates to the stream of trajectories. Waits for nothing.

Ingest asks this port how old a trajectory is, whose weights sampled it, and where reading starts. It never tests which
implementation it has. ``OwnVersions`` is for a trainer whose weights sample the stream. A trainer that joins the stream
of another policy has another implementation.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from streamrl.schemas.identifiers import SERVED_POLICY, PolicyVersion

OWN_STEPS = "steps of staleness"


class CountedVersions(Protocol):
    """What ingest asks. A reader uses the same object for as long as it reads."""

    @property
    def current(self) -> PolicyVersion:
        """The version from which ages are counted now."""
        ...

    @property
    def max_age(self) -> int:
        """The largest age of a sample, in ``unit``; older samples are skipped."""
        ...

    @property
    def unit(self) -> str:
        """The unit of ages, for messages."""
        ...

    @property
    def next_step(self) -> int:
        """The number of the next step, as in the due steps that orders carry."""
        ...

    @property
    def moves_alone(self) -> bool:
        """Whether ``current`` advances without this trainer, so that it may be far ahead of the records read."""
        ...

    @property
    def may_choose(self) -> bool:
        """Whether steps choose groups by ``ingest.sampling``; otherwise they take the oldest first."""
        ...

    @property
    def begin(self) -> str:
        """Where a reader without a checkpoint starts, in the form of ``ingest.attach_from``."""
        ...

    @property
    def joined_late(self) -> bool:
        """Whether records that expired before this reader started do not count as lost."""
        ...

    @property
    def is_paused(self) -> bool:
        """Whether the trainer takes no trajectories now."""
        ...


@dataclass(frozen=True)
class OwnVersions:
    """For a trainer whose own weights sample the stream. ``version``: gives its newest, called for each record.

    ``policy``: its name; trajectories of an arm of a split have another one.
    """

    version: Callable[[], PolicyVersion]
    max_age: int
    policy: str = SERVED_POLICY
    unit: str = OWN_STEPS
    moves_alone: bool = False
    may_choose: bool = True
    begin: str = "beginning"
    joined_late: bool = False
    is_paused: bool = False

    @property
    def current(self) -> PolicyVersion:
        """The trainer's newest version."""
        return self.version()

    @property
    def next_step(self) -> int:
        """The number after the newest version's."""
        return self.version().number + 1
