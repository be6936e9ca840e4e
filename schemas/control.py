"""Coordinator → all processes, on the compacted control topic: a tagged union. The last message of a key is valid."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field, TypeAdapter

from streamrl.schemas.errors import IdentityError
from streamrl.schemas.identifiers import SERVED_POLICY, PolicyVersion
from streamrl.schemas.messages import Message, check_wire_version
from streamrl.schemas.trajectories import Part, ShortText
from streamrl.schemas.weights import Sha256


class Control(Message):
    """Fields of every control message. The single writer numbers its messages by ``sequence``."""

    SCHEMA: ClassVar[str] = "control"
    sequence: Annotated[int, Field(ge=0)]
    sent_at: float


class Promotion(Part):
    """The promoted policy whose weights are announced, if it is not the policy that the run started with.

    ``since`` is the newest version announced before the promotion. ``lineage`` is the first lineage of the promoted
    policy announced after it. All its later lineages are higher than the earlier served ones, so they keep their
    number. ``shift`` is added to the policy's own step numbers, so that the numbers of served versions continue without
    a jump. Ages are counted in these numbers.
    """

    policy: ShortText
    since: PolicyVersion
    lineage: Annotated[int, Field(ge=1)]
    shift: int

    def version_of(self, own: PolicyVersion) -> PolicyVersion:
        """The served version for one of the policy's own versions; those from before the promotion get lineage 0.

        The latter may have numbers below 0, if the policy took more steps than the policies that were served before it.
        """
        return PolicyVersion(own.lineage if own.lineage >= self.lineage else 0, own.number + self.shift)


class AnnouncedWeights(Control):
    """These weights can be fetched from any of the relays.

    ``relay_hosts`` names the machines of the first relays, in the order of ``relays``; the others may be anywhere. The
    weights are announced again when the set of relays changes. ``step`` is counted by the policy whose weights they
    are.
    """

    version: PolicyVersion
    step: Annotated[int, Field(ge=0)]
    manifest_sha256: Sha256
    relays: tuple[ShortText, ...]
    relay_hosts: tuple[ShortText, ...] = ()

    @property
    def series(self) -> str:
        """Name of the series that the version belongs to; empty for the run's own."""
        return ""


class WeightsReady(AnnouncedWeights):
    """Weights of the served policy."""

    kind: Literal["weights_ready"] = "weights_ready"
    promotion: Promotion | None = None

    @property
    def trained_by(self) -> str:
        """The policy whose trainer exported the weights and assigned their lineage."""
        return SERVED_POLICY if self.promotion is None else self.promotion.policy


class ArmWeights(AnnouncedWeights):
    """Weights of a policy that is an arm of a split, for the workers assigned to it. Versions are that policy's own."""

    kind: Literal["arm_weights"] = "arm_weights"
    policy: ShortText

    @property
    def series(self) -> str:
        """See ``AnnouncedWeights``."""
        return self.policy


class FlowControl(Control):
    """Workers and dispatcher work (``run``), start nothing new (``pause``), or finish and leave (``drain``).

    ``command_offset`` is the offset of the operator's command that caused this message, -1 for none. Commands at later
    offsets are not carried out yet.
    """

    kind: Literal["flow"] = "flow"
    mode: Literal["run", "pause", "drain"]
    reason: ShortText = ""
    command_offset: Annotated[int, Field(ge=-1)] = -1


class DrainWorker(Control):
    """One worker finishes its running completions and leaves. ``command_offset`` as in ``FlowControl``."""

    kind: Literal["drain_worker"] = "drain_worker"
    worker_id: ShortText
    reason: ShortText = ""
    command_offset: Annotated[int, Field(ge=-1)] = -1


class WorkerClaimed(Control):
    """This incarnation owns the worker id from now on. Every other incarnation with this id exits."""

    kind: Literal["worker_claimed"] = "worker_claimed"
    worker_id: ShortText
    incarnation: ShortText


class FleetTarget(Control):
    """The wanted number of generation workers. The process that runs workers starts or drains some to match.

    The last message is valid.
    """

    kind: Literal["fleet_target"] = "fleet_target"
    workers: Annotated[int, Field(ge=0, le=4096)]
    reason: ShortText = ""


class RunFinished(Control):
    """The trainer has taken its last step; every process may exit."""

    kind: Literal["run_finished"] = "run_finished"
    step: Annotated[int, Field(ge=0)]
    reason: ShortText = ""


class InstanceState(Control):
    """State of a trainer instance attached next to the served one. The last message is valid.

    Modes: ``run``: the instance trains; ``pause``: it takes no trajectories and stays in its consumer group;
    ``detached``: it exits, and its topics and files stay. ``command_offset`` as in ``FlowControl``.
    """

    kind: Literal["instance"] = "instance"
    policy: ShortText
    algorithm: ShortText = ""
    mode: Literal["run", "pause", "detached"]
    reason: ShortText = ""
    command_offset: Annotated[int, Field(ge=-1)] = -1


class Served(Control):
    """The policy that is served from now on. Workers follow the weights that its trainer exports from now on.

    ``since`` is the newest version announced until now. ``command_offset`` as in ``FlowControl``. Without a message of
    this kind, the policy that the run started with is served.
    """

    kind: Literal["served"] = "served"
    policy: ShortText
    since: PolicyVersion
    reason: ShortText = ""
    command_offset: Annotated[int, Field(ge=-1)] = -1


class ArmShare(Part):
    """The share of the groups, from 0 to 1, that the workers of a policy sample."""

    policy: ShortText
    share: Annotated[float, Field(gt=0, le=1)]


class PolicySplit(Control):
    """The policies that sample next to the served one, and their shares of the groups. The last message is valid.

    The served policy samples the rest; without arms, all groups. ``workers`` gives the arm of each worker that is
    assigned to one; all other workers follow the served policy. ``command_offset`` as in ``FlowControl``.
    """

    kind: Literal["split"] = "split"
    arms: Annotated[tuple[ArmShare, ...], Field(max_length=64)] = ()
    workers: dict[ShortText, ShortText] = Field(default_factory=dict)
    reason: ShortText = ""
    command_offset: Annotated[int, Field(ge=-1)] = -1

    @property
    def shares(self) -> dict[str, float]:
        """Shares by policy, in the order in which the command lists them."""
        return {arm.policy: arm.share for arm in self.arms}


class RunIdentity(Message):
    """The run that the topics of a name belong to, and the directory that owns it.

    The trainer's side writes this message without a sequence number. ``run_id`` is a UUID. ``adoptions`` counts how
    often another directory has taken the run over; a directory that knows a smaller number no longer owns the run.
    ``lineages_before`` is the highest lineage on the topics at the last take-over; later trainers claim higher ones.
    Trajectories sampled by weights of lineages up to ``orphans_through`` are skipped, because the run continued without
    those weights. ``holder`` is host and directory, for people. ``wire`` is the newest wire version of a trainer that
    has owned the run. ``lineage`` is the newest lineage that was assigned, 0 for none. ``claim_id`` names its claim,
    which its checkpoints hold too, because two places may claim the same number. ``task`` has fingerprints of all that
    says what a trajectory means, such as prompts and reward code, by name; empty: not known. Trajectories sampled by
    weights of lineages up to ``changed_through`` were sampled before the task last changed.
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
    task: dict[ShortText, ShortText] = Field(default_factory=dict)
    changed_through: Annotated[int, Field(ge=0)] = 0

    @property
    def is_changed(self) -> bool:
        """Whether every trajectory so far was sampled before the task changed: no trainer has started since."""
        return self.changed_through >= max(1, self.lineage)

    def with_task(self, task: Mapping[str, str], lineage: int) -> "RunIdentity":
        """The identity of a start with this task; ``lineage``: the newest on the topics.

        If the fingerprint of a part that was known before differs, the task has changed. Parts that are not known now
        keep their fingerprints.
        """
        changed = any(self.task.get(name, found) != found for name, found in task.items())
        through = lineage if changed else self.changed_through
        return self.replace(task=self.task | dict(task), changed_through=through)

    def has_same_owner_as(self, other: "RunIdentity") -> bool:
        """Whether both name the same run with the same owner."""
        mine, theirs = ((one.run_id, one.adoptions, one.holder, one.since) for one in (self, other))
        return mine == theirs

    def succeeds(self, other: "RunIdentity") -> bool:
        """Whether this is the next owner of the same run."""
        return (self.run_id, self.adoptions) == (other.run_id, other.adoptions + 1)


IDENTITY_KEY = "identity"
"""Compaction key of the identity on the control topic. The last record is valid."""
MARKER_KEY = f"{IDENTITY_KEY}/seen"
"""Key of an empty marker record (a tombstone). A reader that reaches it has read everything written before it.

This holds for every broker node that answers.
"""


def check_run_identity(run: str, expected: str | None, found: RunIdentity) -> None:
    """Refuse a run that this process cannot understand, and another run of the same name.

    ``expected``: the run id in the process's directory; None if the directory holds none, as on another machine.

    Raises:
        WireVersionError: the trainer's wire version is too far from this process's.
        IdentityError: the topics belong to another run.
    """
    check_wire_version(f"the trainer of run {run}", found.wire)
    if expected is not None and expected != found.run_id:
        raise IdentityError(
            f"expected the topics of run {run} to belong to {expected}, as the run's directory says, got topics of "
            f"{found.run_id} (owned by {found.holder or 'an unknown directory'}): start this process in the directory "
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
    """Compaction key. Compaction keeps the last message of each key: for example one claim per worker."""
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
    """Operator → coordinator: a person's command. The coordinator turns it into control messages.

    ``policy`` is the instance that the command is about. ``algorithm`` is the one that an attached instance trains
    with. ``shares`` are those of a split, by policy; without shares, the served policy samples all groups again.
    """

    SCHEMA: ClassVar[str] = "operator-command"

    action: OperatorAction
    worker_id: ShortText | None = None
    policy: ShortText | None = None
    algorithm: ShortText | None = None
    shares: Annotated[tuple[ArmShare, ...], Field(max_length=64)] = ()
    reason: ShortText = ""
    sent_at: float
