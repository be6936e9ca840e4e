"""A made-up run on a bus in memory, whose truth the maker knows: where each name stands, and what became of it."""

from dataclasses import dataclass, field

from streamrl.bus.history import BusHistory
from streamrl.bus.memory import MemoryBus
from streamrl.bus.port import Outgoing, Record
from streamrl.inspection.replay.history import PENDING, GroupHistory, HistoryReader, TrajectoryHistory
from streamrl.observability.record_index.following import IndexFollower
from streamrl.observability.record_index.store import RecordIndex
from streamrl.schemas.codec import encode, headers_of
from streamrl.schemas.topics import DEAD_LETTERS, TRAJECTORIES
from tests.consumers.factories import trajectory
from tests.fakes.topics import create_topics
from tests.inspection.audit.written_topics import ALGORITHM, RUN, Position, WrittenTopics

TOPIC = TRAJECTORIES.full_name(RUN)


@dataclass
class WrittenRun(WrittenTopics):
    """A world whose trajectories decode, on a bus."""

    partitions: int = 2
    bus: MemoryBus = field(default_factory=MemoryBus)
    told: int = 0

    def __post_init__(self) -> None:
        create_topics(self.bus, RUN, self.partitions)
        super().__post_init__()

    def produce(self, name: str | None, partition: int) -> Position:
        self.log[partition].append(name)
        if name is None:
            out = Outgoing(TOPIC, b"\xff\xff", None, partition, ())
        else:
            group, _, index = name.rpartition("/")
            message = trajectory(group, int(index), of=8)
            out = Outgoing(TOPIC, encode(message), group, partition, headers_of(message))
        self.written.append((TRAJECTORIES, out))
        return partition, len(self.log[partition]) - 1

    def refuse(self, position: Position) -> None:
        """A dead letter of this record."""
        headers = {"dlq-topic": TOPIC, "dlq-partition": str(position[0]), "dlq-offset": str(position[1])}
        marks = tuple((name, text.encode()) for name, text in headers.items())
        self.written.append((DEAD_LETTERS, Outgoing(DEAD_LETTERS.full_name(RUN), b"\xff", None, 0, marks)))

    def publish(self) -> None:
        """Put onto the bus what was written since the last time."""
        for _, out in self.written[self.told :]:
            log = self.bus.log(out.topic).partitions[out.partition or 0]
            record = Record(out.topic, out.partition or 0, len(log), out.key, out.value, out.headers, float(self.told))
            log.append(record)
            self.told += 1

    def truth(self) -> dict[str, dict[Position, str]]:
        """Every name's records, with what became of each."""
        found: dict[str, dict[Position, str]] = {}
        for partition, names in self.log.items():
            for offset, name in enumerate(names):
                if name is not None:
                    found.setdefault(name, {})[partition, offset] = self._fate((partition, offset))
        return found

    def _fate(self, position: Position) -> str:
        if position in self.current.carried:
            return "finished on another cluster"
        # A row of the surviving chain is the trainer's last word on a record.
        if position in self.current.skipped:
            return f"skipped: {self.current.skipped[position]}"
        return "trained" if position in self.current.trained else PENDING

    def follower(self, index: RecordIndex) -> IndexFollower:
        return IndexFollower(BusHistory(self.bus), RUN, index)


async def found_by(follower: IndexFollower, name: str) -> TrajectoryHistory | GroupHistory:
    """What the index leads to."""
    return await HistoryReader(follower, ALGORITHM).look_up(name)


def fates_of(history: TrajectoryHistory) -> dict[Position, str]:
    return {(seen.partition, seen.offset): seen.fate.partition(" in step")[0] for seen in history.records}
