"""The topic catalogue as data: the messages, writers, readers and retention of each topic."""

from dataclasses import dataclass
from typing import Literal

from streamrl.schemas.control import OperatorCommand, RunIdentity, WeightsReady
from streamrl.schemas.evaluation import EvaluationOrder, EvaluationReport
from streamrl.schemas.identifiers import PARTIAL_PARTITIONS, WORK_ORDER_PARTITIONS, parse_scope
from streamrl.schemas.messages import Message
from streamrl.schemas.reports import (
    CarriedOver,
    Heartbeat,
    InstanceBeat,
    RefusedStep,
    RelayBeat,
    SkipRecord,
    StepReport,
    TrainerBeat,
)
from streamrl.schemas.trajectories import (
    PartialTrajectory,
    ReleaseOrder,
    TokenChunk,
    Trajectory,
    UngradedTrajectory,
    WorkOrder,
)

DAY_MS = 86_400_000
HOUR_MS = 3_600_000
FRAMING_BYTES = 64 << 10
"""Room for a record's key, headers and the broker's own fields."""


@dataclass(frozen=True, kw_only=True)
class Topic:
    """One entry of the catalogue. ``partitions`` 0 means buckets × shards, from the settings.

    ``message`` None: records are raw bytes from another topic, unchanged, with the reason in the headers. ``also``:
    further kinds of message on the topic. ``tombstones_ms``: milliseconds that a tombstone stays for readers that were
    away. ``per_instance``: an attached trainer instance has its own topic; otherwise it shares the run's.
    """

    name: str
    message: type[Message] | None
    key: str
    retention_ms: int
    writers: tuple[str, ...]
    readers: tuple[str, ...]
    partitions: int = 1
    cleanup_policy: Literal["delete", "compact", "compact,delete"] = "delete"
    also: tuple[type[Message], ...] = ()
    tombstones_ms: int = DAY_MS
    per_instance: bool = False

    @property
    def max_message_bytes(self) -> int:
        """Bytes of the largest record."""
        if self.message is None:
            # The largest record of any topic, unchanged, and the headers that give the reason.
            return Trajectory.MAX_BYTES + 2 * FRAMING_BYTES
        return self.message.MAX_BYTES + FRAMING_BYTES

    def full_name(self, scope: str) -> str:
        """Name on the broker: a prefix, a dot and the topic's name.

        The prefix is ``scope`` if the topic is ``per_instance``, otherwise the name of the scope's run.
        """
        return f"{scope if self.per_instance else parse_scope(scope)[0]}.{self.name}"

    def partition_count(self, trajectory_partitions: int) -> int:
        """Number of partitions, given buckets × shards."""
        return self.partitions or trajectory_partitions

    def configs(self, *, replication_factor: int) -> dict[str, str]:
        """Kafka topic settings, as text."""
        configs = {
            "cleanup.policy": self.cleanup_policy,
            "max.message.bytes": str(self.max_message_bytes),
            # Two of three replicas acknowledge. One replica may be down without a pause, and the loss of one replica
            # loses no acknowledged record.
            "min.insync.replicas": str(max(1, replication_factor - 1)),
            # Timestamps by the broker's clock, which also deletes and rolls segments. By the writer's clock, the broker
            # would refuse a worker whose clock is an hour fast (``message.timestamp.after.max.ms``). It would at once
            # delete records of a worker whose clock is a week slow.
            "message.timestamp.type": "LogAppendTime",
        }
        if "compact" in self.cleanup_policy:
            # Segments close within ten minutes and are then compacted at once, so that a new process reads little more
            # than the last message of each key.
            configs |= {
                "min.cleanable.dirty.ratio": "0.01",
                "max.compaction.lag.ms": "600000",
                "segment.ms": "600000",
                "delete.retention.ms": str(self.tombstones_ms),
            }
        if "delete" in self.cleanup_policy:
            configs["retention.ms"] = str(self.retention_ms)
        return configs


WORK_ORDERS = Topic(
    name="work-orders",
    message=WorkOrder,
    also=(ReleaseOrder,),
    # The key is only for people. The dispatcher chooses the partition, which is the worker's.
    key="group id",
    partitions=WORK_ORDER_PARTITIONS,
    retention_ms=DAY_MS,
    writers=("dispatcher",),
    readers=("worker", "report"),
)
TOKENS = Topic(
    name="tokens",
    message=TokenChunk,
    key="trajectory id",
    partitions=4,
    retention_ms=HOUR_MS,
    writers=("worker",),
    readers=("export",),
)
PARTIAL_TRAJECTORIES = Topic(
    name="partial-trajectories",
    message=PartialTrajectory,
    key="trajectory id, writer and first token",
    partitions=PARTIAL_PARTITIONS,
    # Records of unfinished trajectories stay. A finished trajectory's records get tombstones and are compacted away.
    cleanup_policy="compact,delete",
    # As long as the trajectories that they become. Records that got no tombstone expire with the trajectories.
    retention_ms=7 * DAY_MS,
    # Short: a reader that misses a tombstone only finds tokens of a finished trajectory, which no order asks for.
    tombstones_ms=60_000,
    writers=("worker",),
    readers=("worker", "export"),
)
UNGRADED = Topic(
    name="ungraded",
    message=UngradedTrajectory,
    key="group id",
    partitions=0,
    retention_ms=7 * DAY_MS,
    writers=("worker",),
    readers=("grader", "dispatcher"),
)
TRAJECTORIES = Topic(
    name="trajectories",
    message=Trajectory,
    key="group id",
    partitions=0,
    retention_ms=7 * DAY_MS,
    writers=("worker", "grader", "dispatcher"),
    readers=("trainer", "dispatcher", "report"),
)
DEAD_LETTERS = Topic(
    name="dead-letters",
    message=None,
    key="key of the refused record",
    retention_ms=30 * DAY_MS,
    writers=("trainer", "grader"),
    readers=("dlq",),
    per_instance=True,
)
SKIPS = Topic(
    name="skips",
    message=SkipRecord,
    key="trajectory id",
    retention_ms=30 * DAY_MS,
    writers=("trainer",),
    readers=("dispatcher", "audit", "report"),
    per_instance=True,
)
STEPS = Topic(
    name="steps",
    message=StepReport,
    also=(RefusedStep, CarriedOver),
    key="algorithm",
    retention_ms=30 * DAY_MS,
    writers=("trainer",),
    readers=("coordinator", "dispatcher", "audit", "report"),
    per_instance=True,
)
CONTROL = Topic(
    name="control",
    message=WeightsReady,
    also=(RunIdentity,),
    key="subject of the message",
    cleanup_policy="compact",
    retention_ms=-1,  # no limit: the last message of each key has to stay
    writers=("coordinator", "trainer"),
    readers=("worker", "dispatcher", "trainer", "relay"),
    per_instance=True,
)
COMMANDS = Topic(
    name="commands",
    message=OperatorCommand,
    key="action",
    retention_ms=DAY_MS,
    writers=("operator",),
    readers=("coordinator",),
)
HEARTBEATS = Topic(
    name="heartbeats",
    message=Heartbeat,
    also=(TrainerBeat, InstanceBeat, RelayBeat),
    key="worker id, algorithm, name of an instance, or relay id",
    retention_ms=HOUR_MS,
    writers=("worker", "trainer", "attach", "relay"),
    readers=("coordinator", "dispatcher", "trainer", "attach", "relay", "top", "report"),
    per_instance=True,
)

EVALUATION_ORDERS = Topic(
    name="evaluation-orders",
    message=EvaluationOrder,
    key="group id",
    # One partition: orders are few, so every worker reads all of them. An order names its worker.
    retention_ms=DAY_MS,
    writers=("evaluator",),
    readers=("worker",),
)
EVALUATION_SAMPLES = Topic(
    name="evaluation-samples",
    message=Trajectory,
    key="group id",
    retention_ms=7 * DAY_MS,
    writers=("worker",),
    readers=("evaluator", "export"),
)
EVALUATIONS = Topic(
    name="evaluations",
    message=EvaluationReport,
    key="version",
    cleanup_policy="compact",
    retention_ms=-1,  # no limit: a version that has a report is never evaluated again
    writers=("evaluator",),
    readers=("evaluator", "coordinator", "top", "report"),
)

CATALOGUE: tuple[Topic, ...] = (
    WORK_ORDERS,
    TOKENS,
    PARTIAL_TRAJECTORIES,
    UNGRADED,
    TRAJECTORIES,
    DEAD_LETTERS,
    SKIPS,
    STEPS,
    CONTROL,
    COMMANDS,
    HEARTBEATS,
    EVALUATION_ORDERS,
    EVALUATION_SAMPLES,
    EVALUATIONS,
)
INSTANCE_TOPICS = tuple(topic for topic in CATALOGUE if topic.per_instance)
