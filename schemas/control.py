"""Coordinator → everyone, on the compacted control topic: a tagged union; the last message of each key holds."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, TypeAdapter

from streamrl.schemas.errors import IdentityError
from streamrl.schemas.identifiers import SERVED_POLICY, PolicyVersion
from streamrl.schemas.messages import Message, refuse_far_version
from streamrl.schemas.trajectories import Part, ShortText
from streamrl.schemas.weights import Sha256


class Control(Message):
    """Common head: every control message is numbered by its single writer."""

    SCHEMA: ClassVar[str] = "control"
    sequence: Annotated[int, Field(ge=0)]
    sent_at: float


class Promotion(Part):
    """Whose weights are announced, if not those of the policy that was served from the run's beginning.

    ``since``: the newest weights that were announced before it was promoted; ``lineage``: the first of its own that was
    announced after. Its lineages are all above those before, so these keep their number. ``shift``: what is added to
    its own step number, so that the numbers of served versions go on where they were: ages are counted in them.
    """

    policy: ShortText
    since: PolicyVersion
    lineage: Annotated[int, Field(ge=1)]
    shift: int

    def version_of(self, own: PolicyVersion) -> PolicyVersion:
        """One of its own versions in the served numbers; what it was before the promotion is of lineage 0.

        Numbers of then may be below 0: it may have taken more steps than the policies that were served before it.
        """
        return PolicyVersion(own.lineage if own.lineage >= self.lineage else 0, own.number + self.shift)


class AnnouncedWeights(Control):
    """These weights can be fetched from any of the relays.

    ``relay_hosts``: the machine of each of the first of them, by its name; the others may be anywhere. Announced again
    when other relays are there. ``step``: in the own count of the policy whose weights they are.
    """

    version: PolicyVersion
    step: Annotated[int, Field(ge=0)]
    manifest_sha256: Sha256
    relays: tuple[ShortText, ...]
    relay_hosts: tuple[ShortText, ...] = ()

    @property
    def series(self) -> str:
        """The series of versions that they belong to; empty: the run's own."""
        return ""


class WeightsReady(AnnouncedWeights):
    """Weights of the served policy."""

    kind: Literal["weights_ready"] = "weights_ready"
    promotion: Promotion | None = None

    @property
    def trained_by(self) -> str:
        """The policy whose trainer exported them, and gave them their lineage."""
        return SERVED_POLICY if self.promotion is None else self.promotion.policy


class ArmWeights(AnnouncedWeights):
    """Weights of a policy that is an arm of a split, for the workers that are dealt to it; versions are its own."""

    kind: Literal["arm_weights"] = "arm_weights"
    policy: ShortText

    @property
    def series(self) -> str:
        """See ``AnnouncedWeights``."""
        return self.policy


class FlowControl(Control):
    """Workers and dispatcher go on (``run``), start nothing new (``pause``), or finish and leave (``drain``).

    ``command_offset``: of the operator's command that asked for it, -1 for none; later ones are not carried out yet.
    """

    kind: Literal["flow"] = "flow"
    mode: Literal["run", "pause", "drain"]
    reason: ShortText = ""
    command_offset: Annotated[int, Field(ge=-1)] = -1


class DrainWorker(Control):
    """One worker finishes what it holds and leaves. ``command_offset`` as in ``FlowControl``."""

    kind: Literal["drain_worker"] = "drain_worker"
    worker_id: ShortText
    reason: ShortText = ""
    command_offset: Annotated[int, Field(ge=-1)] = -1


class WorkerClaimed(Control):
    """This incarnation holds the worker id now; every other one of this id ends."""

    kind: Literal["worker_claimed"] = "worker_claimed"
    worker_id: ShortText
    incarnation: ShortText


class FleetTarget(Control):
    """So many generation workers are wanted; whoever runs workers starts or drains some. The last one holds."""

    kind: Literal["fleet_target"] = "fleet_target"
    workers: Annotated[int, Field(ge=0, le=4096)]
    reason: ShortText = ""


class RunFinished(Control):
    """The trainer has taken its last step; every process may end."""

    kind: Literal["run_finished"] = "run_finished"
    step: Annotated[int, Field(ge=0)]
    reason: ShortText = ""


class InstanceState(Control):
    """An instance of the trainer beside the served one: attached, and working (``run``) or not; the last one holds.

    ``pause``: it takes no trajectories and keeps its group; ``detached``: it ends, and what it has stays where it is.
    ``command_offset`` as in ``FlowControl``.
    """

    kind: Literal["instance"] = "instance"
    policy: ShortText
    algorithm: ShortText = ""
    mode: Literal["run", "pause", "detached"]
    reason: ShortText = ""
    command_offset: Annotated[int, Field(ge=-1)] = -1


class Served(Control):
    """Which policy is served from now on: workers are to follow the weights that its trainer exports from now on.

    ``since``: the newest weights that were announced until now. ``command_offset`` as in ``FlowControl``. Without one,
    it is the policy that the run began with.
    """

    kind: Literal["served"] = "served"
    policy: ShortText
    since: PolicyVersion
    reason: ShortText = ""
    command_offset: Annotated[int, Field(ge=-1)] = -1


class ArmShare(Part):
    """So much of the groups, from 0 to 1, is sampled by the workers of this policy."""

    policy: ShortText
    share: Annotated[float, Field(gt=0, le=1)]


class PolicySplit(Control):
    """Which policies beside the served one sample, and what share of the groups; the last one holds.

    The rest is the served policy's; without arms, all of it. ``workers``: the arm of each worker that is dealt to one;
    all others follow the served policy. ``command_offset`` as in ``FlowControl``.
    """

    kind: Literal["split"] = "split"
    arms: Annotated[tuple[ArmShare, ...], Field(max_length=64)] = ()
    workers: dict[ShortText, ShortText] = Field(default_factory=dict)
    reason: ShortText = ""
    command_offset: Annotated[int, Field(ge=-1)] = -1

    @property
    def shares(self) -> dict[str, float]:
        """By policy, in the order of the order."""
        return {arm.policy: arm.share for arm in self.arms}


class RunIdentity(Message):
    """Which run the topics of a name belong to, and which directory holds it; the trainer's side writes it, unnumbered.

    ``run_id``: a UUID. ``adoptions``: how often another directory has taken the run over; whoever knows a smaller
    number holds it no longer. ``lineages_before``: all lineages up to this one were on the topics when it was last
    taken over, and its trainers claim higher ones. ``orphans_through``: what the weights of these lineages sampled is
    skipped, since the run went on without them. ``holder``: host and directory, for people. ``wire``: the newest wire
    version of a trainer that has held the run. ``lineage``: the newest that was given out here, 0 for none, and
    ``claim_id`` names its claim, which its checkpoints hold too: a number alone may be claimed in two places.
    """

    SCHEMA: ClassVar[str] = "run-identity"

    run_id: ShortText
    adoptions: Annotated[int, Field(ge=0)] = 0
    lineages_before: Annotated[int, Field(ge=0)] = 0
    orphans_through: Annotated[int, Field(ge=0)] = 0
    holder: ShortText = ""
    wire: Annotated[int, Field(ge=1)] = 1
    since: float
    lineage: Annotated[int, Field(ge=0)] = 0
    claim_id: ShortText = ""

    def is_held_like(self, other: "RunIdentity") -> bool:
        """Whether both are of the same run in the same hands."""
        mine, theirs = ((one.run_id, one.adoptions, one.holder, one.since) for one in (self, other))
        return mine == theirs

    def succeeds(self, other: "RunIdentity") -> bool:
        """Whether this is the next one to hold the same run."""
        return (self.run_id, self.adoptions) == (other.run_id, other.adoptions + 1)


IDENTITY_KEY = "identity"
"""Compaction key of the identity on the control topic: the last one holds."""
SEEN_KEY = f"{IDENTITY_KEY}/seen"
"""Key of a tombstone that says nothing: who reads up to it has read all that came before, whichever node answered."""


def refuse_stranger(run: str, expected: str | None, found: RunIdentity) -> None:
    """Make sure that a process joins neither a run that it does not understand nor another one of the same name.

    ``expected``: the run that its directory is of; None: the directory says nothing, as on another machine.

    Raises:
        WireVersionError: the run's trainer is of a wire version too far from ours.
        IdentityError: the topics are those of another run.
    """
    refuse_far_version(f"the trainer of run {run}", found.wire)
    if expected is not None and expected != found.run_id:
        raise IdentityError(
            f"expected the topics of run {run} to belong to {expected}, as the run's directory says, got those of "
            f"{found.run_id} (held by {found.holder or 'an unknown directory'}): start this process in the directory "
            "of that run, or give it the other run's name with --run.name"
        )


ControlMessage = Annotated[
    WeightsReady
    | ArmWeights
    | FlowControl
    | DrainWorker
    | WorkerClaimed
    | FleetTarget
    | RunFinished
    | InstanceState
    | Served
    | PolicySplit,
    Field(discriminator="kind"),
]
control_adapter: TypeAdapter[ControlMessage] = TypeAdapter(ControlMessage)


def control_key(message: Control) -> str:
    """Compaction key: the last weights, the last flow order, one order and one claim per worker, one end of run."""
    match message:
        case WeightsReady():
            return "weights/policy"
        case ArmWeights():
            return f"weights/arm/{message.policy}"
        case PolicySplit():
            return "split"
        case DrainWorker():
            return f"drain/{message.worker_id}"
        case WorkerClaimed():
            return f"worker/{message.worker_id}"
        case InstanceState():
            return f"instance/{message.policy}"
        case Served():
            return "served"
        case FleetTarget():
            return "fleet"
        case RunFinished():
            return "finished"
        case _:
            return "flow"


OperatorAction = Literal[
    "pause",
    "resume",
    "drain",
    "drain_worker",
    "attach",
    "detach",
    "pause_instance",
    "resume_instance",
    "promote",
    "split",
]


class OperatorCommand(Message):
    """Operator → coordinator: what a person asks for. The coordinator turns it into control messages.

    ``policy``: the instance that it is about, and ``algorithm`` what an attached one trains with. ``shares``: of a
    split, by policy; none: all is the served policy's again.
    """

    SCHEMA: ClassVar[str] = "operator-command"

    action: OperatorAction
    worker_id: ShortText | None = None
    policy: ShortText | None = None
    algorithm: ShortText | None = None
    shares: Annotated[tuple[ArmShare, ...], Field(max_length=64)] = ()
    reason: ShortText = ""
    sent_at: float
