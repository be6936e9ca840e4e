"""A made-up run: trajectories, and a trainer that steps, skips, checkpoints and crashes, and the balance it must leave.

Follows the contract, not the code: what the real trainer writes is checked against it elsewhere.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgpack

from streamrl.bus.history import Extent
from streamrl.bus.port import Outgoing, Record
from streamrl.consumers.ingest.ledger import KnownRecord
from streamrl.consumers.ingest.rejections import SkipTally
from streamrl.consumers.training.checkpoints import manifest as stored
from streamrl.consumers.training.checkpoints.manifest import CheckpointManifest
from streamrl.inspection.audit.checks import check_balance
from streamrl.inspection.audit.index import AuditIndex
from streamrl.inspection.audit.report import AuditReport
from streamrl.schemas.codec import CONTINUATIONS_HEADER, encode, headers_of
from streamrl.schemas.identifiers import PolicyVersion, group_id_of
from streamrl.schemas.messages import Message
from streamrl.schemas.reports import CarriedOver, RecordRef, SkipReason, SkipRecord, StepReport
from streamrl.schemas.topics import SKIPS, STEPS, TRAJECTORIES, WORK_ORDERS, Topic
from streamrl.schemas.trajectories import Trajectory, WorkOrder
from tests.fakes.messages import step_report

RUN = "made-up"
ALGORITHM = "grpo"
Position = tuple[int, int]


def frame(name: str) -> bytes:
    """As much of a trajectory as an audit looks at."""
    header: bytes = msgpack.packb({"trajectory_id": name, "group_id": group_id_of(name)})
    return len(header).to_bytes(4, "little") + header


@dataclass
class SimulatedLineage:
    """One lineage of the trainer: what it has finished, and the parent's part of the chain."""

    lineage: int
    step: int
    parent: PolicyVersion | None
    done: dict[int, set[int]]
    tally: SkipTally
    trained: set[Position]
    skipped: dict[Position, str]
    carried: set[Position] = field(default_factory=set)


@dataclass
class Saved:
    """A checkpoint with what a restart takes from it; ``after``: how many records were written before it."""

    manifest: CheckpointManifest
    current: SimulatedLineage
    report: StepReport | None
    after: int = 0


@dataclass
class WrittenTopics:
    """``written``: everything on the topics in order of writing; ``saved``: checkpoints, oldest first."""

    partitions: int = 2
    log: dict[int, list[str | None]] = field(default_factory=dict)
    written: list[tuple[Topic, Outgoing]] = field(default_factory=list)
    saved: list[Saved] = field(default_factory=list)
    lineages: int = 0
    rolled_back: int = 0
    last_report: StepReport | None = None
    current: SimulatedLineage = field(init=False)
    on_write: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.log = {number: [] for number in range(self.partitions)}
        self.restart(None)

    def write(self, topic: Topic, message: Message) -> None:
        self.written.append((topic, Outgoing(topic.full_name(RUN), encode(message), None, 0, headers_of(message))))

    def produce(self, name: str | None, partition: int) -> Position:
        """A record; None: bytes that are no trajectory. Some were continued once, or twice, by their names."""
        self.log[partition].append(name)
        value = b"\xff\xff" if name is None else frame(name)
        headers = headers_of(Trajectory)
        if name is not None and (times := sum(name.encode()) % 3):
            headers += ((CONTINUATIONS_HEADER, str(times).encode()),)
        record = Outgoing(TRAJECTORIES.full_name(RUN), value, name, partition, headers)
        self.written.append((TRAJECTORIES, record))
        return partition, len(self.log[partition]) - 1

    def order(self, group_id: str, sample: int) -> None:
        """A work order for one sample: as much of it as an audit looks at."""
        header = msgpack.packb({"group_id": group_id, "sample_indices": [sample]})
        value = len(header).to_bytes(4, "little") + header
        record = Outgoing(WORK_ORDERS.full_name(RUN), value, group_id, 0, headers_of(WorkOrder))
        self.written.append((WORK_ORDERS, record))

    def ref(self, position: Position) -> RecordRef:
        return RecordRef(self.log[position[0]][position[1]] or "", *position)

    def pending(self) -> list[Position]:
        done = self.current.done
        return [(p, o) for p, names in self.log.items() for o in range(len(names)) if o not in done[p]]

    def step(self, positions: Iterable[Position]) -> None:
        """Train the records in one optimizer step."""
        current, refs = self.current, [self.ref(position) for position in positions]
        current.step += 1
        for ref in refs:
            current.done[ref.partition].add(ref.offset)
            current.trained.add((ref.partition, ref.offset))
        middle = len(refs) // 2
        self.last_report = self._report(tuple(refs[:middle]), tuple(refs[middle:]))

    def announce(self) -> None:
        assert self.last_report is not None
        self.write(STEPS, self.last_report)

    def _report(self, *batches: tuple[RecordRef, ...]) -> StepReport:
        current = self.current
        return step_report(
            current.lineage,
            current.step,
            algorithm=ALGORITHM,
            group_ids=("g",) if batches else (),
            micro_batches=batches,
            parent=None if batches else current.parent,
            parent_skips=0 if batches else self._parent_skips,
            undoes=0 if batches else self._undoes,
            carried_parts=0 if batches else self._carried_parts,
            sent_at=1.0,
        )

    def skip(self, position: Position, reason: SkipReason, end: int | None = None) -> None:
        current, ref = self.current, self.ref(position) if end is None else RecordRef("", *position)
        row = SkipRecord(
            algorithm=ALGORITHM,
            reason=reason,
            trajectory_id=ref.trajectory_id or None,
            group_id=None,
            partition=ref.partition,
            offset=ref.offset,
            end_offset=end,
            step=current.step,
            lineage=current.tally.lineage,
            sequence=current.tally.next_sequence,
            sent_at=1.0,
        )
        for offset in range(ref.offset, end or ref.offset + 1):
            if (ref.partition, offset) not in current.trained | current.carried:
                current.skipped.setdefault((ref.partition, offset), reason.value)
            current.done[ref.partition].add(offset)
        current.tally.add(row)
        self.write(SKIPS, row)

    def checkpoint(self) -> None:
        current, frontier = self.current, {}
        for partition, done in current.done.items():
            low = next(offset for offset in range(len(self.log[partition]) + 1) if offset not in done)
            frontier[str(partition)] = {"low": low, "done": sorted(o for o in done if o > low)}
        tally = stored.SkipSummary(
            count=current.tally.count, hash=current.tally.hash, by_reason=dict(current.tally.reasons)
        )
        manifest = CheckpointManifest(
            run=RUN,
            algorithm=ALGORITHM,
            lineage=current.lineage,
            parent=current.parent,
            step=current.step,
            policy_version=PolicyVersion(current.lineage, current.step),
            frontier=frontier,
            anchors=self._anchors(),
            skips=tally,
            config_hash="",
            created_at=1.0,
        )
        self.saved.append(Saved(manifest, self._copy(current), self.last_report, len(self.written)))

    def _anchors(self) -> dict[str, KnownRecord]:
        found = {}
        for partition, done in self.current.done.items():
            named = [offset for offset in sorted(done) if self.log[partition][offset] is not None]
            if named:
                name = self.log[partition][named[0]] or ""
                found[str(partition)] = KnownRecord(offset=named[0], trajectory_id=name)
        return found

    def roll_back(self, saved: Saved, *, elsewhere: bool = False) -> None:
        """An operator has the next trainer go on from a checkpoint."""
        self.lineages += 1  # claimed, so that no older trainer may write
        self.rolled_back = self.lineages
        self.restart(saved, elsewhere=elsewhere)

    def restart(self, saved: Saved | None, *, elsewhere: bool = False) -> None:
        """A crash, and the next trainer goes on from a checkpoint (None: from the initial model).

        ``elsewhere``: with another cluster, on which all records happen to stand where they stood.
        """
        self.lineages += 1
        self._carried_parts = 0
        # As long as the choice holds, each start tells of it.
        self._undoes = self.rolled_back if saved is not None and saved.manifest.lineage <= self.rolled_back else 0
        if saved is None:
            done: dict[int, set[int]] = {number: set() for number in range(self.partitions)}
            self.current = SimulatedLineage(self.lineages, 0, None, done, SkipTally(self.lineages), set(), {})
            self._parent_skips = 0
        else:
            if saved.report is not None:
                self.write(STEPS, saved.report)
            self._parent_skips = saved.manifest.skips.count
            self.current = self._copy(saved.current)
            before = self.current.tally
            self.current.tally = SkipTally(self.lineages, 0, before.hash, Counter(before.reasons))
            self.current.lineage, self.current.parent = self.lineages, saved.manifest.policy_version
            if elsewhere:
                self._carry_over(saved)
        self.last_report = None
        self.write(STEPS, self._report())

    def _carry_over(self, saved: Saved) -> None:
        """Of finished records only the names are known, and the first of each name counts; in two parts."""
        current, found = self.current, dict[str, Position]()
        before = current.trained | current.skipped.keys() | current.carried
        finished = {name for p, o in before if (name := self.log[p][o]) is not None}
        for partition, names in self.log.items():
            for offset, name in enumerate(names):
                if name in finished and name is not None:
                    found.setdefault(name, (partition, offset))
        current.trained, current.skipped, current.carried = set(), {}, set(found.values())
        current.done = {number: {o for p, o in current.carried if p == number} for number in range(self.partitions)}
        refs = [self.ref(position) for position in sorted(current.carried)]
        parts = refs[: len(refs) // 2], refs[len(refs) // 2 :]
        for part, records in enumerate(parts):
            message = CarriedOver(
                algorithm=ALGORITHM,
                lineage=current.lineage,
                part=part,
                records=tuple(records),
                absent=len(before) - len(found),
                skips_hash=saved.manifest.skips.hash,
                skips_by_reason=saved.manifest.skips.by_reason,
                sent_at=1.0,
            )
            self.write(STEPS, message)
        self._carried_parts = len(parts)

    @staticmethod
    def _copy(current: SimulatedLineage) -> SimulatedLineage:
        tally = SkipTally(
            current.tally.lineage, current.tally.count, current.tally.hash, Counter(current.tally.reasons)
        )
        done = {partition: set(offsets) for partition, offsets in current.done.items()}
        return SimulatedLineage(
            current.lineage,
            current.step,
            current.parent,
            done,
            tally,
            set(current.trained),
            dict(current.skipped),
            set(current.carried),
        )

    def records(self, topic: Topic) -> list[Record]:
        counts: Counter[int] = Counter()
        found = []
        for written, out in self.written:
            if written is topic:
                partition = out.partition or 0
                name = out.topic
                found.append(Record(name, partition, counts[partition], out.key, out.value, out.headers, 0.0))
                counts[partition] += 1
        return found

    def index(self, first: int = 0) -> AuditIndex:
        """What an audit reads; ``first``: retention has deleted the trajectories below."""
        index = AuditIndex()
        index.trajectories.set_extents({p: Extent(min(first, len(names)), len(names)) for p, names in self.log.items()})
        for record in self.records(STEPS):
            index.add_step(record)
        for record in self.records(SKIPS):
            index.add_skip(record)
        for record in self.records(WORK_ORDERS):
            index.orders.add_record(record)
        for record in self.records(TRAJECTORIES):
            if record.offset >= first:
                index.trajectories.add_record(record)
        return index

    def manifests(self) -> list[CheckpointManifest]:
        return [saved.manifest for saved in self.saved]

    def audit(self, first: int = 0) -> AuditReport:
        return check_balance(RUN, self.index(first), self.manifests())
