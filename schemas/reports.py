"""Reports of processes: heartbeats, the trainer's steps, and the reasons why trajectories were not trained."""

from enum import StrEnum
from typing import Annotated, ClassVar, NamedTuple

from pydantic import Field

from streamrl.schemas.identifiers import PolicyVersion, named_version
from streamrl.schemas.messages import Message
from streamrl.schemas.trajectories import Part, ShortText
from streamrl.schemas.weights import Sha256


class WorkerState(StrEnum):
    """States of a worker: it starts, works or is paused, finishes its completions, and has stopped."""

    STARTING = "starting"
    READY = "ready"
    PAUSED = "paused"
    DRAINING = "draining"
    STOPPED = "stopped"


class ReleasedOrder(Part):
    """The unfinished samples of an order that the dispatcher took back from a worker.

    ``samples`` lists index and recorded tokens of each unfinished sample; the worker no longer samples it. The order's
    other samples are complete and on the trajectories topic, or will be soon.
    """

    group_id: ShortText
    attempt: Annotated[int, Field(ge=0)]
    samples: tuple[tuple[Annotated[int, Field(ge=0)], Annotated[int, Field(ge=0)]], ...]


Bytes = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]


class GpuUsage(Part):
    """The use of a GPU; None: not known. ``busy``: share of the time in which it computes.

    ``gpu_id``: its UUID, under which every process knows it.
    """

    gpu_id: ShortText
    name: ShortText
    busy: Share | None = None
    used_bytes: Bytes | None = None
    total_bytes: Bytes | None = None


class ResourceUsage(Part):
    """What a process with its children, and its machine ``host``, use: means over the last seconds.

    ``cores_used``: processor cores that the process and its children use; ``memory_bytes``: of their memory, shared
    pages counted for each. ``machine_busy``: share of all cores' time. ``gpus``: those that the process sees; empty:
    none, None: not known.
    """

    host: ShortText
    cores_used: Annotated[float, Field(ge=0)]
    memory_bytes: Bytes
    machine_cores: Annotated[int, Field(ge=1)]
    machine_busy: Share
    machine_used_bytes: Bytes
    machine_bytes: Bytes
    gpus: tuple[GpuUsage, ...] | None = None


class Heartbeat(Message):
    """Worker → dispatcher and coordinator: the worker is alive; its state, its orders and its speed.

    Rates are per second. ``orders`` gives, by group id, the seconds since the last progress of each order that the
    worker has taken and not fully delivered. Progress is a token of the order or a finished sample; while one of its
    samples waits for its first token, a token of any other order counts too. None: this heartbeat does not report
    orders. ``capacity``, ``running`` and ``waiting`` count completions of orders. ``kv_tokens`` is the number of
    context tokens that the engine's key-value cache holds for all running completions together; None: only the slots
    limit it.

    ``run_id`` is the run that the worker works for, as the control topic says; None until the worker has read it.
    ``partials_from`` is an offset in the worker's partition of partial-trajectories: all its records of unfinished
    trajectories are at this offset or later. None: it keeps no such records. ``released`` lists orders that were taken
    back and are not settled (``ReleaseOrder.settled``); None: the worker cannot release orders. ``awaits`` is a version
    that the worker has fetched and adopts once no completion is running; until then it wants no new orders.
    ``request_address`` is the address for requests of gateways, which have their own slots; None: it takes no requests.
    ``policy`` is the arm of a split whose weights the worker has and whose ``version`` it reports; empty for the served
    policy. ``declined`` gives, by group, the attempt of recent evaluation orders that the worker does not carry out,
    because its weights are an arm's or will be soon. ``wire`` is the wire version that the worker speaks. ``usage``
    says what the worker's process and machine use; None: not measured.
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
    usage: ResourceUsage | None = None
    sequence: Annotated[int, Field(ge=0)]
    sent_at: float

    @property
    def weights(self) -> str:
        """The version that the worker samples with, for people: ``2-40``, or ``rloo/1-7`` for an arm."""
        return named_version(self.policy or None, self.version)


class TrainerBeat(Message):
    """Trainer → standby trainers: this process leads and is alive.

    It is sent once a second, also when no steps are taken. ``version`` is that of the weights in memory.
    """

    SCHEMA: ClassVar[str] = "trainer-beat"

    algorithm: ShortText
    incarnation: ShortText
    version: PolicyVersion
    sequence: Annotated[int, Field(ge=0)]
    policy: ShortText | None = None
    sent_at: float


class InstanceBeat(Message):
    """`streamrl attach` → other such commands for the same name: this command keeps the instance's trainer alive.

    It is sent once a second, also while no trainer is running. ``holder`` is host and process, for people. ``leaving``
    marks the last beat.
    """

    SCHEMA: ClassVar[str] = "instance-beat"

    policy: ShortText
    incarnation: ShortText
    holder: ShortText = ""
    leaving: bool = False
    sequence: Annotated[int, Field(ge=0)]
    sent_at: float


class RelayBeat(Message):
    """Relay → coordinator and the other relays: the relay is alive; its place, and the versions that it holds whole.

    ``address`` is its HTTP server's address for other processes. ``host`` is its machine; workers ask their own
    machine's relay first. ``site`` is the network around the machine. ``has_store``: the relay serves the trainer's own
    store; other relays hold copies. ``held`` lists versions of the run's own series, ``held_of_arms`` those of other
    series by name. ``leaving`` marks the last beat. ``wire`` is the wire version that the relay speaks.
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


MAX_ADVANTAGES = 16_384
"""Most advantages in a report: with more, the header would have more values than the codec allows."""


class RecordRef(NamedTuple):
    """Place of a trajectory on the trajectories topic."""

    trajectory_id: str
    partition: int
    offset: int


class StepReport(Message):
    """Trainer → coordinator and dispatcher: one optimizer step, the records it consumed and the weights it produced.

    ``micro_batches`` lists the records of each micro-batch in the order in which they entered the gradient.
    ``advantages`` lists the advantage of each of them in the same order, as its group's rewards gave it, before
    ``algorithm.scale_rewards = "batch"`` divides all; it is empty if there are more than ``MAX_ADVANTAGES``, and in a
    report of an older writer. ``group_ids`` lists the groups of these records in the order in which they were taken.
    ``left_out`` lists samples of these groups that count for the advantages and not for the gradient. ``metrics`` uses
    the key names of TRL and prime-rl. ``manifest_sha256`` is None if the step's weights were not exported, so that
    workers cannot fetch them. ``digests`` gives xxh3-128, in hex, of each float32 tensor after the step, by its name on
    disk. All prompts trained or skipped so far are below the position ``prompt_cursor`` of the prompt source.

    The first report of a lineage has no groups. Its ``parent`` is the version of the checkpoint that the lineage
    continues from, or None if it starts with the initial model. ``parent_skips`` is the number of the parent's skip
    rows that the checkpoint contains. So the topic alone shows which steps survive and which a crash undid. ``undoes``
    is set if an operator chose the checkpoint: lineages up to this number lose their later work. 0 means that no
    operator chose. ``carried_parts`` is the number of ``CarriedOver`` messages of the lineage before this report; if it
    is not 0, the records in older lineages' reports are on another cluster. ``run_id`` in this report is the run that
    the lineage belongs to.

    ``policy`` is the name of an attached instance, which is in all records that the instance writes. For a promoted
    policy, ``served_as`` is the version under which workers know the exported weights. ``usage``: what the trainer's
    process and machine use; None: not measured.
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
    advantages: tuple[float, ...] = ()
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
    usage: ResourceUsage | None = None
    sent_at: float

    @property
    def account(self) -> str:
        """Name that an audit groups records by: the instance's name, or the algorithm of the run's own trainer."""
        return self.policy or self.algorithm

    @property
    def trained_refs(self) -> list[RecordRef]:
        """The records whose gradient the step contains, in the order in which they entered it."""
        return [ref for batch in self.micro_batches for ref in batch]

    @property
    def advantage_of(self) -> dict[tuple[int, int], float]:
        """The advantages by partition and offset of their records; empty if the report has none."""
        places = [(ref.partition, ref.offset) for ref in self.trained_refs]
        return dict(zip(places, self.advantages, strict=True)) if len(places) == len(self.advantages) else {}


class CarriedOver(Message):
    """Trainer → steps topic: records on the trajectories topic that were already finished on another cluster.

    These messages come before the first report of a ``lineage`` that continues on a topic with other offsets. They give
    the new places of the trajectories that its checkpoint holds as trained or skipped. ``part`` numbers the messages of
    a lineage from 0. At most ``absent`` finished records were not found on this topic. ``skips_hash`` and
    ``skips_by_reason`` describe the checkpoint's skip rows; the lineage's own rows are counted on from there.
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
    """Trainer → steps topic: a gradient that was not applied, the reason, and the records it came from.

    ``version`` is that of the weights that the gradient was computed with; they stay unchanged. Other fields are as in
    ``StepReport``. Each record gets a skip row with the reason ``filtered``.
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

    ``OTHER`` is never written. A reader uses it for a newer writer's unknown reason, whose row still counts.
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
    TASK_CHANGED = "task_changed"
    OTHER = "other"

    @classmethod
    def _missing_(cls, value: object) -> "SkipReason | None":
        return cls.OTHER if isinstance(value, str) else None


ENDS_GROUP = frozenset({SkipReason.ZERO_ADVANTAGE})
"""Reasons that are given to whole groups only. So one row with one of them ends the group."""


class SkipRecord(Message):
    """Trainer → skips topic: a record that was not trained, and the reason.

    The ids are None if the bytes did not decode. ``sequence`` numbers the rows of a ``lineage`` from 1; a repeated row
    keeps its number. A row with the reason ``retention_expired`` or ``before_attach`` covers all records from
    ``offset`` up to but not including ``end_offset``.
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
        """The offset after the last record that the row covers."""
        return self.offset + 1 if self.end_offset is None else self.end_offset

    @property
    def account(self) -> str:
        """See ``StepReport``."""
        return self.policy or self.algorithm
