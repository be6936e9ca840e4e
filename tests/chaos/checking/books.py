"""Everything that a run left on its topics, decoded, in the order in which readers of committed records see it."""

import asyncio
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from streamrl.bus.kafka.bus import KafkaBus
from streamrl.bus.kafka.cluster import offsets_of_group
from streamrl.bus.kafka.limits import ClientLimits
from streamrl.bus.kafka.settings import KafkaSettings
from streamrl.bus.port import Record
from streamrl.schemas.control import Control
from streamrl.schemas.errors import WireError
from streamrl.schemas.identifiers import graders_group
from streamrl.schemas.messages import Message
from streamrl.schemas.reports import Heartbeat, RefusedStep, SkipRecord, StepReport
from streamrl.schemas.topics import CONTROL, DEAD_LETTERS, HEARTBEATS, SKIPS, STEPS, TRAJECTORIES, UNGRADED, Topic
from streamrl.schemas.trajectories import Trajectory, UngradedTrajectory
from tests.pipeline.accounts import read_all

M = TypeVar("M", bound=Message)
Place = tuple[int, int]
READ_S = 180.0


class Produced(NamedTuple):
    """A record of the trajectories topic; without ids if its bytes do not decode. ``stored_at``: broker's clock."""

    trajectory_id: str | None
    worker_id: str | None
    stored_at: float


class Reported(NamedTuple):
    """A record of the steps topic."""

    offset: int
    stored_at: float
    report: StepReport


@dataclass
class Books:
    """``produced`` by (partition, offset), and so is ``ungraded``: what workers gave to graders, who have committed
    ``graded_to`` by partition. The rest is in topic order.
    """

    produced: dict[Place, Produced] = field(default_factory=dict)
    ungraded: dict[Place, Produced] = field(default_factory=dict)
    graded_to: dict[int, int] = field(default_factory=dict)
    first_held: dict[int, int] = field(default_factory=dict)
    reports: list[Reported] = field(default_factory=list)
    refused: list[RefusedStep] = field(default_factory=list)
    skips: list[SkipRecord] = field(default_factory=list)
    controls: list[Control] = field(default_factory=list)
    heartbeats: list[Heartbeat] = field(default_factory=list)
    dead_letters: list[Record] = field(default_factory=list)


async def read_books(address: str, run: str) -> Books:
    """The topics as they stand now."""
    # A broker that has just been killed and started may be silent for longer than a run would wait.
    bus = KafkaBus(KafkaSettings(bootstrap_servers=address), limits=ClientLimits(connect_timeout_s=READ_S))
    async with asyncio.timeout(READ_S):
        books = Books(dead_letters=await read_all(bus, run, DEAD_LETTERS))
        for record in await read_all(bus, run, TRAJECTORIES):
            books.produced[record.partition, record.offset] = _produced(record)
        books.first_held = await _first_held(bus, TRAJECTORIES.full_name(run))
        for record in await read_all(bus, run, UNGRADED):
            books.ungraded[record.partition, record.offset] = _produced(record)
        if books.ungraded:
            kafka = KafkaSettings(bootstrap_servers=address)
            committed = await offsets_of_group(kafka, UNGRADED.full_name(run), graders_group(run))
            books.graded_to = {tp.partition: offset for tp, offset in committed.items()}
        for record in await read_all(bus, run, STEPS):
            message = record.message()
            if isinstance(message, StepReport):
                books.reports.append(Reported(record.offset, record.timestamp, message))
            elif isinstance(message, RefusedStep):
                books.refused.append(message)
        books.skips += await _messages(bus, run, SKIPS, SkipRecord)
        books.controls += await _messages(bus, run, CONTROL, Control)
        books.heartbeats += await _messages(bus, run, HEARTBEATS, Heartbeat)
    return books


async def _first_held(bus: KafkaBus, topic: str) -> dict[int, int]:
    subscription = await bus.subscribe([topic], client_id="books")
    try:
        return {tp.partition: offset for tp, offset in (await subscription.beginning_offsets()).items()}
    finally:
        await subscription.close()


async def _messages(bus: KafkaBus, run: str, topic: Topic, kind: type[M]) -> list[M]:
    messages = [record.message() for record in await read_all(bus, run, topic) if record.value]
    return [message for message in messages if isinstance(message, kind)]


def _produced(record: Record) -> Produced:
    try:
        message = record.message()
    except WireError:
        return Produced(None, None, record.timestamp)
    assert isinstance(message, Trajectory | UngradedTrajectory)
    return Produced(message.trajectory_id, message.worker_id, record.timestamp)
