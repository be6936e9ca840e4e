"""Which versions count: how a reader's trainer stands to the stream of trajectories. Waits for nothing.

Ingest asks this port how old a trajectory is, whose weights sampled it, and where reading begins. It never tests which
implementation it has. ``OwnVersions`` is a trainer whose weights sample the stream. A trainer that joins the stream of
another policy brings its own implementation.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from streamrl.schemas.identifiers import SERVED_POLICY, PolicyVersion
from streamrl.schemas.trajectories import Trajectory

OWN_STEPS = "steps of staleness"


class CountedVersions(Protocol):
    """What ingest asks. A reader keeps one for as long as it reads."""

    @property
    def current(self) -> PolicyVersion:
        """The version from which ages are counted at this moment."""
        ...

    @property
    def max_age(self) -> int:
        """Samples that are older are skipped; in units of ``unit``."""
        ...

    @property
    def unit(self) -> str:
        """What ages are counted in, for people."""
        ...

    @property
    def next_step(self) -> int:
        """The step to come, in the numbers of the due steps that orders carry."""
        ...

    @property
    def moves_alone(self) -> bool:
        """Whether ``current`` moves on without this trainer, so that it may be far ahead of the records read."""
        ...

    @property
    def may_choose(self) -> bool:
        """Whether steps take groups as ``ingest.sampling`` says; else oldest first."""
        ...

    @property
    def begin(self) -> str:
        """Where a reader without a checkpoint starts, as ``ingest.attach_from`` says it."""
        ...

    @property
    def joined_late(self) -> bool:
        """Whether records that expired before this reader began are no loss to it."""
        ...

    @property
    def is_paused(self) -> bool:
        """Whether no trajectories are taken for now."""
        ...

    def is_of_others(self, trajectory: Trajectory) -> bool:
        """Whether another policy's weights sampled it."""
        ...


@dataclass(frozen=True)
class OwnVersions:
    """A trainer whose own weights sample the stream. ``version``: its newest, asked for each record.

    ``policy``: its name; trajectories of an arm of a split bear another one.
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
        """Its newest version."""
        return self.version()

    @property
    def next_step(self) -> int:
        """The one after its newest version."""
        return self.version().number + 1

    def is_of_others(self, trajectory: Trajectory) -> bool:
        """An arm of a split sampled it."""
        return bool(trajectory.policy) and trajectory.policy != self.policy
