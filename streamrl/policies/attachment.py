"""The state of one policy by a run's control topic, and how its trainer counts the age of trajectories. Never waits.

A policy that is not served cannot count a trajectory's age in its own versions, since other weights sampled it. So age
is counted in *served* versions: optimizer steps of the served policy between the oldest weights that sampled a token
and the newest announced ones. Ingest asks for the age of each record.
"""

from collections.abc import Callable
from dataclasses import dataclass

import structlog

from streamrl.consumers.ingest.versions import OWN_STEPS, CountedVersions
from streamrl.consumers.training.ports import OwnStream, Standing
from streamrl.schemas.control import InstanceState, Promotion, RunFinished, RunIdentity, Served, WeightsReady
from streamrl.schemas.identifiers import SERVED_POLICY, PolicyVersion
from streamrl.schemas.messages import Message

log = structlog.get_logger()

NOTHING_SERVED = PolicyVersion(0, 0)
ANY_STEP = 1 << 62
"""Means no bound: due steps and ages are in the served policy's numbers, and none is larger than this."""


@dataclass(frozen=True)
class Promoted:
    """A policy that is served now, but was not at the run's start.

    ``since``: the newest version before the promotion. ``shift``: served version number minus own number; None: not
    fixed yet, the policy's next lineage starts one above ``since``.
    """

    since: PolicyVersion
    shift: int | None = None

    def shift_at(self, step: int) -> int:
        """The shift of a lineage that starts at this step of the policy's own."""
        return self.since.number + 1 - step if self.shift is None else self.shift


@dataclass
class Attachment:
    """The state that the control topic gives so far. ``policy``: the name of the policy whose trainer asks.

    ``begin``: where its reader starts without a checkpoint, in the form of ``ingest.attach_from``. ``newest``: the
    newest weights announced to workers; ``promotion``: from the same announcement. ``run_id``: empty until known.
    ``mode``: an operator's last wish for the instance: ``run``, ``pause`` or ``detached``; empty: none.
    ``run_is_over``: no more trajectories come. ``served``: the last message on which policy is served; None: it was
    always the run's own.
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
        """Take the next message of the control topic into account."""
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
        """Whether this is the policy that the run started with."""
        return self.policy == SERVED_POLICY

    @property
    def is_served(self) -> bool:
        """Whether workers follow this policy's weights."""
        return self.policy == (SERVED_POLICY if self.served is None else self.served.policy)

    @property
    def place(self) -> tuple[bool, PolicyVersion | None]:
        """Whether the policy is served, and since which version. A trainer starts a new lineage when this changes."""
        return self.is_served, self.served.since if self.is_served and self.served is not None else None

    def standing(self, max_served_age: int | None) -> Standing:
        """The trainer's ``Standing``, by the current state of control; it is valid for one lineage.

        ``max_served_age``: the largest age in served versions, while the policy is not served; None: no bound.
        """
        served, promotion, promoted = self.served, self.promotion, None
        if served is None and self.is_own:
            return OwnStream()
        if served is not None and self.is_served:
            # The policy's numbers continue as announced, also after a restart.
            is_known = promotion is not None and (promotion.policy, promotion.since) == (served.policy, served.since)
            promoted = Promoted(served.since, promotion.shift if promotion is not None and is_known else None)
        return SharedStream(self, promoted, ANY_STEP if max_served_age is None else max_served_age)


@dataclass(frozen=True)
class SharedStream:
    """``Standing`` of a trainer whose stream other policies sample, or have sampled.

    During a lineage ``attachment`` changes, and ages with it. ``promoted`` stays the same; None: another policy is
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
        """The lineage to exceed: a promoted policy's weights must win over all those announced before its promotion."""
        return 0 if self.promoted is None else self.promoted.since.lineage

    def orphans_through(self, identity: RunIdentity) -> int:
        """The last orphaned lineage; 0 for an instance, whose identity does not know the lineages of the stream."""
        return identity.orphans_through if self.attachment.is_own else 0

    def shift_at(self, step: int) -> int | None:
        """The shift with which a promoted policy's versions continue the served numbers; None if not promoted."""
        return None if self.promoted is None else self.promoted.shift_at(step)

    def versions(self, own: Callable[[], PolicyVersion], max_age: int) -> CountedVersions:
        """Ages counted in served versions."""
        return ServedVersions(self.attachment, self.promoted, own, max_age, self.max_served_age)


@dataclass(frozen=True)
class ServedVersions:
    """Counts ages in served versions, for a trainer that joined a stream that another policy samples.

    Once the policy is ``promoted``, ages are counted in its own versions, under their served numbers: ``own``.
    ``max_own_age``, ``max_served_age``: the largest age while the policy is served, and while it is not.
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
        """The largest age in served versions; once this policy is promoted, in its own steps."""
        return self.max_served_age if self.promoted is None else self.max_own_age

    @property
    def unit(self) -> str:
        """What ``max_age`` is counted in."""
        return "served versions of age" if self.promoted is None else OWN_STEPS

    @property
    def next_step(self) -> int:
        """The step whose groups may be taken. Due steps are the served policy's; others take any whole group."""
        return ANY_STEP if self.promoted is None else self.own().number + 1

    @property
    def moves_alone(self) -> bool:
        """Whether the stream moves on without this trainer: it never waits for a trainer that is not served."""
        return self.promoted is None

    @property
    def begin(self) -> str:
        """Where reading starts without a checkpoint, as the operator asked."""
        return self.attachment.begin

    @property
    def is_paused(self) -> bool:
        """Whether an operator paused the instance."""
        return self.attachment.mode == "pause"
