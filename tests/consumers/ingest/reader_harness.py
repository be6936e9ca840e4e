"""A reader on a bus in memory, with a clock and a policy version that tests set."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from streamrl.bus.memory import MemoryBus
from streamrl.bus.port import Outgoing, Record
from streamrl.consumers.ingest.filters import IntakeRules
from streamrl.consumers.ingest.frontier import Frontier
from streamrl.consumers.ingest.limits import LIMITS, IntakeLimits
from streamrl.consumers.ingest.reader import ReaderSnapshot, ReadStream, TrajectoryReader
from streamrl.consumers.ingest.settings import IngestSettings
from streamrl.consumers.ingest.versions import OwnVersions
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.reports import RecordRef, SkipReason, SkipRecord
from streamrl.schemas.settings import LoopSettings
from streamrl.schemas.topics import DEAD_LETTERS, SKIPS, TRAJECTORIES
from streamrl.schemas.trajectories import Trajectory
from tests.consumers.factories import V0, trajectory
from tests.fakes.topics import create_topics, messages_of, records_of
from tests.progress import patience, within

RUN = "r"
LOOP = LoopSettings(groups_per_step=2, num_generations=2, max_staleness=2, bucket_boundaries=(64,))


@dataclass
class ReaderHarness:
    """A reader's bus and surroundings; ``after`` starts a reader where another one would have been checkpointed."""

    bus: MemoryBus = field(default_factory=MemoryBus)
    now: float = 1000.0
    version: PolicyVersion = V0

    def __post_init__(self) -> None:
        create_topics(self.bus, RUN, LOOP.trajectory_partitions)

    def reader(
        self,
        after: ReaderSnapshot | None = None,
        weights: dict[str, float] | None = None,
        algorithm: str = "grpo",
        limits: IntakeLimits = LIMITS,
        **settings: Any,
    ) -> TrajectoryReader:
        ingest = IngestSettings(**settings)
        return TrajectoryReader(
            ReadStream(self.bus, RUN, RUN, algorithm),
            IntakeRules(LOOP, ingest, weights or {}, limits=limits),
            OwnVersions(lambda: self.version, ingest.max_age(LOOP)),
            lambda: self.version.number,
            after,
            clock=lambda: self.now,
        )

    @asynccontextmanager
    async def running(self, reader: TrajectoryReader) -> AsyncIterator[TrajectoryReader]:
        stop = asyncio.Event()
        task = asyncio.create_task(reader.run(stop))
        try:
            yield reader
        finally:
            stop.set()
            await asyncio.wait({task})
            task.exception()

    async def publish(self, *trajectories: Trajectory, partition: int = 0) -> None:
        for found in trajectories:
            await self.send(Outgoing.of(self.topic, found, key=found.group_id, partition=partition))

    async def publish_group(self, number: int, *, partition: int = 0, **changes: Any) -> None:
        for index in range(changes.get("of", 2)):
            await self.publish(
                trajectory(f"d/{number}/0", index, **({"created_at": float(number)} | changes)), partition=partition
            )

    async def send(self, record: Outgoing) -> None:
        await (await self.bus.publisher("worker")).publish(record)

    @property
    def topic(self) -> str:
        return TRAJECTORIES.full_name(RUN)

    def skips(self) -> list[SkipRecord]:
        return messages_of(self.bus, RUN, SKIPS, SkipRecord)

    def reasons(self) -> dict[str, SkipReason]:
        """By trajectory, or by partition and offset if nothing decoded."""
        return {skip.trajectory_id or f"{skip.partition}@{skip.offset}": skip.reason for skip in self.skips()}

    def dead_letters(self) -> list[Record]:
        return records_of(self.bus, RUN, DEAD_LETTERS)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with patience(5):
            while not condition():
                await asyncio.sleep(0.005)

    async def until_read(self, reader: TrajectoryReader, count: int) -> None:
        await self.until(lambda: reader.ledger.counts().read >= count)


def refs_of(*groups: Any) -> list[RecordRef]:
    return [sample.ref for group in groups for sample in group.samples]


def checkpoint(reader: TrajectoryReader) -> ReaderSnapshot:
    """What the trainer keeps of a reader, through the JSON it is kept in."""
    kept = reader.snapshot()
    return replace(kept, frontier=Frontier.from_json(kept.frontier.to_json()))


async def next_group(reader: TrajectoryReader) -> Any:
    return await within(reader.next_group(), 5)
