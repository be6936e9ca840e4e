"""A history of listed records that is revealed bit by bit, a follower of it, and the whole audit it must agree with."""

from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from streamrl.bus.history import Extent
from streamrl.bus.port import Record, TopicPartition
from streamrl.consumers.training.checkpoints.manifest import CheckpointManifest
from streamrl.inspection.audit.audit import handlers_of
from streamrl.inspection.audit.checks import check_balance
from streamrl.inspection.audit.follower import AuditFollower
from streamrl.inspection.audit.index import AuditIndex
from streamrl.inspection.audit.report import AuditReport
from streamrl.inspection.audit.state import AuditStateFile, open_state
from streamrl.schemas.topics import TRAJECTORIES

Result = TypeVar("Result")


def done(work: Coroutine[Any, Any, Result]) -> Result:
    """The result of a coroutine that waits for nothing."""
    try:
        work.send(None)
    except StopIteration as ended:
        return ended.value  # type: ignore[no-any-return]
    raise AssertionError("it waits for something")


@dataclass
class RevealedHistory:
    """A ``History`` of the first ``visible`` of some records; those below ``first`` are deleted."""

    records: Sequence[Record]
    partitions: Iterable[TopicPartition]
    visible: int = 0
    first: dict[TopicPartition, int] = field(default_factory=dict)

    async def extents(self, *topics: str) -> dict[TopicPartition, Extent]:
        found = {tp: 0 for topic in topics for tp in self.partitions if tp.topic == topic}
        for record in self.records[: self.visible]:
            if (tp := TopicPartition(record.topic, record.partition)) in found:
                found[tp] = record.offset + 1
        return {tp: Extent(min(self.first.get(tp, 0), end), end) for tp, end in found.items()}

    async def within(self, ranges: Mapping[TopicPartition, Extent]) -> AsyncIterator[Record]:
        for record in self.records[: self.visible]:
            tp = TopicPartition(record.topic, record.partition)
            if tp in ranges and max(ranges[tp].first, self.first.get(tp, 0)) <= record.offset < ranges[tp].end:
                yield record

    async def fetch(self, topic: str, positions: Iterable[tuple[int, int]]) -> dict[tuple[int, int], Record]:
        wanted = set(positions)
        held = (each for each in self.records[: self.visible] if each.topic == topic)
        return {(each.partition, each.offset): each for each in held if (each.partition, each.offset) in wanted}

    async def close(self) -> None:
        pass


@dataclass
class FollowedHistory:
    """A follower with its state in a file, as it is started again and again."""

    run: str
    history: RevealedHistory
    path: Path
    segment: int
    manifests: Sequence[CheckpointManifest] = ()
    follower: AuditFollower = field(init=False)
    file: AuditStateFile | None = field(default=None, init=False)
    said: str = field(default="", init=False)

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        self.file, known, self.said = open_state(self.path, self.run)
        self.follower = AuditFollower(self.history, lambda: self.manifests, known, self.segment)  # type: ignore[arg-type]

    def restart(self, *, saving: bool = True) -> None:
        assert self.file is not None
        if saving:
            self.file.save(self.follower.known)
        self.file.close()
        self.start()

    def close(self) -> None:
        assert self.file is not None
        self.file.close()

    def advance(self) -> AuditReport:
        return replace(done(self.follower.advance()), seconds=0.0)

    def whole(self) -> AuditReport:
        """The audit of all that was ever written."""
        index = AuditIndex()
        ends: dict[int, int] = {tp.partition: 0 for tp in self.history.partitions if tp.topic == self._trajectories}
        handlers = handlers_of(self.run, index)
        for record in self.history.records[: self.history.visible]:
            handlers[record.topic](record)
            if record.topic == self._trajectories:
                ends[record.partition] = record.offset + 1
        index.trajectories.set_extents({partition: Extent(0, end) for partition, end in ends.items()})
        return check_balance(self.run, index, [each for each in self.manifests if each.run == self.run])

    def delete_what_was_read(self, share: float) -> None:
        """Retention takes a share of each partition up to where the follower stands."""
        for tp, position in self.follower.known.positions.items():
            self.history.first[tp] = max(self.history.first.get(tp, 0), int(position * share))

    @property
    def _trajectories(self) -> str:
        return TRAJECTORIES.full_name(self.run)
