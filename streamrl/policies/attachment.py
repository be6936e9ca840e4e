"""What a run's control says of one policy, and how its trainer stands to the stream by that. Waits for nothing.

The own versions of a policy that is not served say nothing of how old a trajectory is, since other weights sampled it.
So age is counted in *served* versions: optimizer steps of the served policy between the oldest weights that sampled a
token and those that are announced now. Ingest asks for it for each record.
"""

from collections.abc import Callable
from dataclasses import dataclass

import structlog

from streamrl.consumers.ingest.versions import OWN_STEPS, CountedVersions
from streamrl.consumers.training.ports import OwnStream, Standing
from streamrl.schemas.control import InstanceState, Promotion, RunFinished, RunIdentity, Served, WeightsReady
from streamrl.schemas.identifiers import SERVED_POLICY, PolicyVersion
from streamrl.schemas.messages import Message
from streamrl.schemas.trajectories import Trajectory

log = structlog.get_logger()

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
    """What control has said so far. ``policy``: the name of the policy whose trainer asks.

    ``begin``: where its reader starts without a checkpoint, as ``ingest.attach_from`` says it. ``newest``: the newest
    weights that are announced to workers, with the ``promotion`` in their announcement. ``run_id``: of the run, once
    known. ``mode``: what an operator asked of the instance last: ``run``, ``pause`` or ``detached``; empty: nothing.
    ``run_is_over``: no more trajectories come. ``served``: the last word on which policy is served; None: it has always
    been the run's own.
    """

    policy: str
    begin: str = "beginning"
    newest: PolicyVersion = NOTHING_SERVED
    promotion: Promotion | None = None
    run_id: str = ""
    mode: str = ""
    run_is_over: bool = False
    served: Served | None = None

    def hear(self, message: Message | None) -> None:
        """Take in the next message of control."""
        match message:
            case InstanceState(policy=self.policy):
                self.mode = message.mode
                log.info("instance", mode=message.mode, reason=message.reason)
            case WeightsReady() if message.version > self.newest:
                # After the end of a run, newer weights mean that it goes on.
                self.newest, self.run_is_over = message.version, False
                self.promotion = message.promotion
            case Served():
                self.served = message
            case RunFinished():
                self.run_is_over = True
            case RunIdentity():
                self.run_id = message.run_id

    @property
    def is_own(self) -> bool:
        """Whether this is the policy that the run began with."""
        return self.policy == SERVED_POLICY

    @property
    def is_served(self) -> bool:
        """Whether workers follow this policy's weights."""
        return self.policy == (SERVED_POLICY if self.served is None else self.served.policy)

    @property
    def place(self) -> tuple[bool, PolicyVersion | None]:
        """Whether the policy is served, and since when. A trainer begins a new lineage when this changes."""
        return self.is_served, self.served.since if self.is_served and self.served is not None else None

    def standing(self, max_served_age: int | None) -> Standing:
        """How the trainer stands to the stream by what control says now; for one lineage.

        ``max_served_age``: the bound of ages in served versions, while the policy is not served; None: no bound.
        """
        served, promotion, promoted = self.served, self.promotion, None
        if served is None and self.is_own:
            return OwnStream()
        if served is not None and self.is_served:
            # Its numbers go on as they were announced, also after a restart.
            is_known = promotion is not None and (promotion.policy, promotion.since) == (served.policy, served.since)
            promoted = Promoted(served.since, promotion.shift if promotion is not None and is_known else None)
        return SharedStream(self, promoted, ANY_STEP if max_served_age is None else max_served_age)


@dataclass(frozen=True)
class SharedStream:
    """``Standing`` of a trainer whose stream other policies sample or have sampled.

    ``attachment`` changes while the lineage lasts, and ages with it; ``promoted`` does not: None: another policy is
    served.
    """

    attachment: Attachment
    promoted: Promoted | None
    max_served_age: int

    @property
    def run_id(self) -> str:
        """The run belongs to its own trainer; an instance only joins it."""
        return "" if self.attachment.is_own else self.attachment.run_id

    @property
    def above_lineage(self) -> int:
        """A promoted policy's weights are to win over all that were announced before it was served."""
        return 0 if self.promoted is None else self.promoted.since.lineage

    def orphans_through(self, identity: RunIdentity) -> int:
        """Lineages of the run's own policy; an instance's identity says nothing of those that sampled the stream."""
        return identity.orphans_through if self.attachment.is_own else 0

    def shift_at(self, step: int) -> int | None:
        """A promoted policy's weights go on in the numbers of those that were served before."""
        return None if self.promoted is None else self.promoted.shift_at(step)

    def versions(self, own: Callable[[], PolicyVersion], max_age: int) -> CountedVersions:
        """The served ones."""
        return ServedVersions(self.attachment, self.promoted, own, max_age, self.max_served_age)


@dataclass(frozen=True)
class ServedVersions:
    """Ages in served versions, for a trainer that joined a stream which another policy's weights sample; or, once it is
    ``promoted``, in its own versions by the numbers under which they are served: ``own``.

    ``max_own_age``, ``max_served_age``: the bound while it is served, and while it is not.
    """

    attachment: Attachment
    promoted: Promoted | None
    own: Callable[[], PolicyVersion]
    max_own_age: int
    max_served_age: int
    may_choose: bool = False
    joined_late: bool = True

    @property
    def current(self) -> PolicyVersion:
        """The newest weights that are announced to workers."""
        return self.attachment.newest if self.promoted is None else self.own()

    @property
    def max_age(self) -> int:
        """The bound in served versions; once this policy is promoted, in its own steps."""
        return self.max_served_age if self.promoted is None else self.max_own_age

    @property
    def unit(self) -> str:
        """What ``max_age`` is counted in."""
        return "served versions of age" if self.promoted is None else OWN_STEPS

    @property
    def next_step(self) -> int:
        """Due steps are the served policy's: a trainer that is not served takes what is whole."""
        return ANY_STEP if self.promoted is None else self.own().number + 1

    @property
    def moves_alone(self) -> bool:
        """The served policy does not wait for a trainer that is not served."""
        return self.promoted is None

    @property
    def begin(self) -> str:
        """As the operator asked."""
        return self.attachment.begin

    @property
    def is_paused(self) -> bool:
        """An operator paused the instance."""
        return self.attachment.mode == "pause"

    def is_of_others(self, trajectory: Trajectory) -> bool:
        """An arm of a split sampled it, or weights that were served before this policy was."""
        if trajectory.policy:
            return trajectory.policy != self.attachment.policy
        return self.promoted is None or trajectory.newest_version <= self.promoted.since
