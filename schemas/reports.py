"""What processes say about themselves: heartbeats, trainer steps, and why trajectories were not trained."""

from enum import StrEnum
from typing import Annotated, ClassVar, NamedTuple

from pydantic import Field

from streamrl.schemas.identifiers import PolicyVersion, named_version
from streamrl.schemas.messages import Message
from streamrl.schemas.trajectories import Part, ShortText
from streamrl.schemas.weights import Sha256


class WorkerState(StrEnum):
    """Life of a worker: it starts, works, finishes what it holds, and is gone."""

    STARTING = "starting"
    READY = "ready"
    PAUSED = "paused"
    DRAINING = "draining"
    STOPPED = "stopped"


class ReleasedOrder(Part):
    """What a worker let go of an order because the dispatcher took it back.

    ``samples``: index, and tokens on record, of each sample that is not whole; nobody samples it now. Samples of the
    order that are missing here are whole, and on the trajectories topic or on their way there.
    """

    group_id: ShortText
    attempt: Annotated[int, Field(ge=0)]
    samples: tuple[tuple[Annotated[int, Field(ge=0)], Annotated[int, Field(ge=0)]], ...]


class Heartbeat(Message):
    """Worker → dispatcher and coordinator: alive, what it holds, and how fast it is. Rates are per second.

    ``orders``: by group id, for each order that the worker has taken and not delivered whole, the seconds since its
    last progress: a token of it, a finished sample, or, while a sample of it waits for its first token, a token of any
    other. None: this heartbeat does not say. ``kv_tokens``: tokens of context that the engine's key-value cache holds,
    of all running completions together; None: its slots are the only bound. ``run_id``: of the run that it works
    for, as the control topic says; None before it has read that. ``partials_from``: the offset, in the worker's
    partition of partial-trajectories, from which on everything is that it keeps there of what is unfinished; None: it
    keeps nothing there. ``released``: orders that were taken back and are not settled (``ReleaseOrder.settled``); None:
    it cannot let go of any. ``awaits``: the version that it has fetched and takes once it runs nothing, so it wants no
    new orders. ``wire``: the wire version that it speaks.
    ``capacity``, ``running`` and ``waiting`` are of orders; ``request_address``: where gateways bring requests, which
    have slots of their own; None: nowhere. ``policy``: the arm of a split whose weights it has, and whose ``version``
    is meant; empty: the served policy's. ``declined``: evaluation orders of the last seconds that it does not carry
    out, since its weights are an arm's or are about to be; by group, which attempt.
    """

    SCHEMA: ClassVar[str] = "heartbeat"

    worker_id: ShortText
    incarnation: ShortText
    state: WorkerState
    engine: ShortText
    version: PolicyVersion
    capacity: Annotated[int, Field(ge=0)]
    running: Annotated[int, Field(ge=0)]
    waiting: Annotated[int, Field(ge=0)]
    generated_tokens: Annotated[int, Field(ge=0)]
    finished_trajectories: Annotated[int, Field(ge=0)]
    tokens_per_s: Annotated[float, Field(ge=0)]
    orders: dict[ShortText, Annotated[float, Field(ge=0)]] | None = None
    kv_tokens: Annotated[int, Field(ge=1)] | None = None
    run_id: ShortText | None = None
    partials_from: Annotated[int, Field(ge=0)] | None = None
    released: tuple[ReleasedOrder, ...] | None = None
    awaits: PolicyVersion | None = None
    request_address: ShortText | None = None
    policy: ShortText = ""
    declined: dict[ShortText, Annotated[int, Field(ge=0)]] = Field(default_factory=dict)
    wire: Annotated[int, Field(ge=1)] = 1
    sequence: Annotated[int, Field(ge=0)]
    sent_at: float

    @property
    def weights(self) -> str:
        """What it samples with, as people read it: ``2-40``, or ``rloo/1-7`` of an arm."""
        return named_version(self.policy or None, self.version)


class TrainerBeat(Message):
    """Trainer → a standby that would take over: this process leads, and is alive.

    Sent once a second, whether steps are taken or not. ``version``: of the weights in memory.
    """

    SCHEMA: ClassVar[str] = "trainer-beat"

    algorithm: ShortText
    incarnation: ShortText
    version: PolicyVersion
    sequence: Annotated[int, Field(ge=0)]
    policy: ShortText | None = None
    sent_at: float


class InstanceBeat(Message):
    """`streamrl attach` → another one of the same name: this command keeps the instance's trainer alive.

    Sent once a second, also while there is no trainer. ``holder``: host and process, for people. ``leaving``: this is
    its last beat.
    """

    SCHEMA: ClassVar[str] = "instance-beat"

    policy: ShortText
    incarnation: ShortText
    holder: ShortText = ""
    leaving: bool = False
    sequence: Annotated[int, Field(ge=0)]
    sent_at: float


class RelayBeat(Message):
    """Relay → coordinator and the other relays: alive, where it is, and which weights it holds whole.

    ``address``: of its HTTP server, as others reach it; ``host``: the machine, by whose relay its workers ask first;
    ``site``: the network around it. ``has_store``: it serves the trainer's own store; the others hold copies.
    ``held``: versions of the run's own series, ``held_of_arms``: of others, by name. ``leaving``: this is its
    last beat. ``wire``: the wire version that it speaks.
    """

    SCHEMA: ClassVar[str] = "relay-beat"

    relay_id: ShortText
    incarnation: ShortText
    address: ShortText
    host: ShortText
    site: ShortText = ""
    has_store: bool = False
    held: tuple[PolicyVersion, ...] = ()
    held_of_arms: dict[ShortText, tuple[PolicyVersion, ...]] = Field(default_factory=dict)
    leaving: bool = False
    wire: Annotated[int, Field(ge=1)] = 1
    sequence: Annotated[int, Field(ge=0)]
    sent_at: float


class RecordRef(NamedTuple):
    """Where a trajectory stands on the trajectories topic."""

    trajectory_id: str
    partition: int
    offset: int


class StepReport(Message):
    """Trainer → coordinator and dispatcher: one optimizer step, what it consumed and the weights that came of it.

    ``micro_batches`` lists the records of each micro-batch in the order in which they entered the gradient;
    ``group_ids`` the groups they came from, in the order in which they were taken; ``left_out`` the samples of these
    groups that count for its advantages and not for the gradient. ``metrics`` uses TRL's and prime-rl's key names.
    ``manifest_sha256`` None: the weights of this step were not exported, and nobody can fetch them.

    The first report of a lineage has no groups; its ``parent`` is the version of the checkpoint that it went on from
    (None: it began with the initial model) and ``parent_skips`` the number of the parent's skip rows that the
    checkpoint contains. So the steps that survive can be told from those that a crash undid, from the topic alone.
    ``undoes``: an operator chose that checkpoint, and so undid what lineages up to this one did after it; 0: none did.
    ``carried_parts``: so many ``CarriedOver`` of the lineage stand before this report; what older lineages say of
    records is about another cluster then.
    ``digests``: xxh3-128, in hex, of each float32 tensor after the step, by its name on disk. ``prompt_cursor``: all
    prompts trained or skipped so far lie below this position of the prompt source. ``run_id``: in a lineage's first
    report, the run that it belongs to. ``policy``: of an attached instance, its name; so it is in all that it writes.
    ``served_as``: of a policy that was promoted, the version under which workers know the exported weights.
    """

    SCHEMA: ClassVar[str] = "step-report"
    MAX_BYTES: ClassVar[int] = 8 << 20

    algorithm: ShortText
    step: Annotated[int, Field(ge=0)]
    version: PolicyVersion
    manifest_sha256: Sha256 | None
    group_ids: tuple[str, ...]
    micro_batches: tuple[tuple[RecordRef, ...], ...]
    left_out: tuple[RecordRef, ...] = ()
    metrics: dict[str, float]
    digests: dict[str, str] = Field(default_factory=dict)
    parent: PolicyVersion | None = None
    parent_skips: Annotated[int, Field(ge=0)] = 0
    undoes: Annotated[int, Field(ge=0)] = 0
    carried_parts: Annotated[int, Field(ge=0)] = 0
    prompt_cursor: Annotated[int, Field(ge=0)] = 0
    finished: bool = False
    run_id: ShortText | None = None
    policy: ShortText | None = None
    served_as: PolicyVersion | None = None
    sent_at: float

    @property
    def account(self) -> str:
        """Under what its records are accounted for: the instance's name, or the algorithm of the run's own trainer."""
        return self.policy or self.algorithm

    @property
    def trained_refs(self) -> list[RecordRef]:
        """The records whose gradient the step contains, in the order in which they entered it."""
        return [ref for batch in self.micro_batches for ref in batch]


class CarriedOver(Message):
    """Trainer → steps topic: records on the trajectories topic that were finished before, on another cluster.

    Sent before the first report of a ``lineage`` that goes on with a topic of other offsets: the trajectories that its
    checkpoint knows as trained or skipped, where they stand now. ``part`` numbers the messages of a lineage from 0.
    ``absent``: finished records, at most, that were not found on this topic. ``skips_hash`` and ``skips_by_reason``: of
    the checkpoint's skip rows, from which those of the lineage are counted on.
    """

    SCHEMA: ClassVar[str] = "carried-over"
    MAX_BYTES: ClassVar[int] = 8 << 20

    algorithm: ShortText
    lineage: Annotated[int, Field(ge=1)]
    part: Annotated[int, Field(ge=0)]
    records: tuple[RecordRef, ...]
    absent: Annotated[int, Field(ge=0)]
    skips_hash: str = ""
    skips_by_reason: dict[str, int] = Field(default_factory=dict)
    policy: ShortText | None = None
    sent_at: float

    @property
    def account(self) -> str:
        """See ``StepReport``."""
        return self.policy or self.algorithm


class RefusedStep(Message):
    """Trainer → steps topic: a gradient that was not applied, why, and the records it came from.

    ``version``: the weights it was computed with, and which stay; the fields it shares with ``StepReport`` mean the
    same. A skip row of each record says ``filtered``.
    """

    SCHEMA: ClassVar[str] = "refused-step"
    MAX_BYTES: ClassVar[int] = 8 << 20

    algorithm: ShortText
    step: Annotated[int, Field(ge=1)]
    version: PolicyVersion
    problem: Annotated[str, Field(max_length=4096)]
    group_ids: tuple[str, ...]
    micro_batches: tuple[tuple[RecordRef, ...], ...]
    left_out: tuple[RecordRef, ...] = ()
    metrics: dict[str, float]
    policy: ShortText | None = None
    sent_at: float

    @property
    def account(self) -> str:
        """See ``StepReport``."""
        return self.policy or self.algorithm


class SkipReason(StrEnum):
    """Why an accepted trajectory has no gradient in the model.

    ``OTHER`` is never written: it stands for the word of a newer writer, whose row counts all the same.
    """

    REFUSED = "refused"
    OUT_OF_MEMORY = "out_of_memory"
    STALE = "stale"
    DUPLICATE = "duplicate"
    POISON = "poison"
    GROUP_INCOMPLETE = "group_incomplete"
    ZERO_ADVANTAGE = "zero_advantage"
    FILTERED = "filtered"
    ORPHAN_LINEAGE = "orphan_lineage"
    RETENTION_EXPIRED = "retention_expired"
    BEFORE_ATTACH = "before_attach"
    OTHER = "other"

    @classmethod
    def _missing_(cls, value: object) -> "SkipReason | None":
        return cls.OTHER if isinstance(value, str) else None


class SkipRecord(Message):
    """Trainer → skips topic: this record was not trained, and why. ``None`` ids: the bytes did not decode.

    ``sequence`` numbers the rows of a ``lineage`` from 1; a row sent again keeps its number. A row with
    ``retention_expired`` or ``before_attach`` stands for all records from ``offset`` up to, not including,
    ``end_offset``.
    """

    SCHEMA: ClassVar[str] = "skip"

    algorithm: ShortText
    reason: SkipReason
    detail: Annotated[str, Field(max_length=4096)] = ""
    trajectory_id: ShortText | None
    group_id: ShortText | None
    partition: Annotated[int, Field(ge=0)]
    offset: Annotated[int, Field(ge=0)]
    end_offset: Annotated[int, Field(ge=1)] | None = None
    step: Annotated[int, Field(ge=0)]
    lineage: Annotated[int, Field(ge=0)] = 0
    sequence: Annotated[int, Field(ge=0)] = 0
    policy: ShortText | None = None
    sent_at: float

    @property
    def end(self) -> int:
        """The offset after the last record that it stands for."""
        return self.offset + 1 if self.end_offset is None else self.end_offset

    @property
    def account(self) -> str:
        """See ``StepReport``."""
        return self.policy or self.algorithm
