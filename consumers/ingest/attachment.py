"""How an instance of the trainer that is not served stands to the run whose stream it reads. Waits for nothing.

Its own versions say nothing of how old a trajectory is, for other weights sampled it. So age is counted in *served*
versions: optimizer steps of the served policy between the oldest weights that sampled a token and those that are
announced now. Whoever follows the run's control topic keeps this up to date; ingest asks it for each record.
"""

from collections.abc import Callable
from dataclasses import dataclass

from streamrl.consumers.ingest.settings import IngestSettings
from streamrl.consumers.ingest.versions import OWN_STEPS, CountedVersions, OwnVersions
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.settings import LoopSettings
from streamrl.schemas.trajectories import Trajectory

NOTHING_SERVED = PolicyVersion(0, 0)
ANY_STEP = 1 << 62
"""Due steps and ages are in the served policy's numbers: without a bound, none of them is too far."""


@dataclass(frozen=True)
class Promoted:
    """This policy is served, and was not from the run's beginning. ``since``: the newest version before it was;
    ``shift``: what its own numbers lack to be served ones; None: its next lineage begins one above ``since``.
    """

    since: PolicyVersion
    shift: int | None = None

    def shift_at(self, step: int) -> int:
        """The shift of a lineage that begins at this step of its own."""
        return self.since.number + 1 - step if self.shift is None else self.shift


@dataclass
class Attachment:
    """``run_id``: of the run, once known. ``begin``: where an instance without a checkpoint starts to read, as
    ``ingest.attach_from`` says it. ``served``: the newest weights that are announced to workers. ``is_paused``: it is
    to take no trajectories for now; ``run_is_over``: no more of them come. ``promoted``:
    this policy is the one that is served.
    """

    begin: str = "now"
    served: PolicyVersion = NOTHING_SERVED
    run_id: str = ""
    is_paused: bool = False
    run_is_over: bool = False
    promoted: Promoted | None = None


@dataclass(frozen=True)
class ServedVersions:
    """Ages in served versions, for a trainer that joined a stream which another policy's weights sample; or, once it is
    promoted, in its own versions by the numbers under which they are served: ``own``.

    ``max_own_age``, ``max_served_age``: the bound while it is served, and while it is not.
    """

    attachment: Attachment
    own: Callable[[], PolicyVersion]
    max_own_age: int
    max_served_age: int
    policy: str
    may_choose: bool = False
    joined_late: bool = True

    @property
    def _promoted(self) -> Promoted | None:
        return self.attachment.promoted

    @property
    def current(self) -> PolicyVersion:
        """The newest weights that are announced to workers."""
        return self.attachment.served if self._promoted is None else self.own()

    @property
    def max_age(self) -> int:
        """The bound in served versions; once this policy is promoted, in its own steps."""
        return self.max_served_age if self._promoted is None else self.max_own_age

    @property
    def unit(self) -> str:
        """What ``max_age`` is counted in."""
        return "served versions of age" if self._promoted is None else OWN_STEPS

    @property
    def next_step(self) -> int:
        """Due steps are the served policy's: a trainer that is not served takes what is whole."""
        return ANY_STEP if self._promoted is None else self.own().number + 1

    @property
    def moves_alone(self) -> bool:
        """The served policy does not wait for a trainer that is not served."""
        return self._promoted is None

    @property
    def begin(self) -> str:
        """As the operator asked."""
        return self.attachment.begin

    @property
    def is_paused(self) -> bool:
        """An operator paused the instance."""
        return self.attachment.is_paused

    def is_of_others(self, trajectory: Trajectory) -> bool:
        """An arm of a split sampled it, or weights that were served before this policy was."""
        if trajectory.policy:
            return trajectory.policy != self.policy
        return self._promoted is None or trajectory.newest_version <= self._promoted.since


def versions_of(
    attachment: Attachment | None,
    own: Callable[[], PolicyVersion],
    loop: LoopSettings,
    settings: IngestSettings,
    policy: str,
) -> CountedVersions:
    """The versions that count for a trainer. ``own``: its newest one, by the number under which workers know it."""
    max_age = settings.max_age(loop)
    if attachment is None:
        return OwnVersions(own, max_age, policy)
    max_served_age = ANY_STEP if settings.max_served_age is None else settings.max_served_age
    return ServedVersions(attachment, own, max_age, max_served_age, policy)
