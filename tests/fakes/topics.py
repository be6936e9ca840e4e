"""The topics of a run on a bus in memory: made, written to and read by a test."""

from typing import TypeVar

from streamrl.bus.memory import MemoryBus, MemoryPublisher
from streamrl.bus.port import Outgoing, Position, Record
from streamrl.schemas.control import Control, control_key
from streamrl.schemas.messages import Message
from streamrl.schemas.topics import CATALOGUE, CONTROL, Topic

B = TypeVar("B", bound=MemoryBus)
M = TypeVar("M", bound=Message)


def create_topics(bus: B, run: str, partitions: int = 8) -> B:
    """The bus, with all topics of the run; ``partitions``: how many its trajectories have."""
    for topic in CATALOGUE:
        bus.create_topic(topic.full_name(run), topic.partition_count(partitions))
    return bus


async def send(
    bus: MemoryBus, run: str, topic: Topic, message: Message, key: str | None = None, partition: int | None = None
) -> Position:
    """Publish a message to a topic of the run; faults of the bus do not hit it."""
    return await MemoryPublisher(bus, "test").publish(
        Outgoing.of(topic.full_name(run), message, key=key, partition=partition)
    )


async def send_control(bus: MemoryBus, run: str, message: Control) -> Position:
    """Publish what the coordinator would say."""
    return await send(bus, run, CONTROL, message, control_key(message))


def records_of(bus: MemoryBus, run: str, topic: Topic) -> list[Record]:
    """All records of a topic of the run, partition by partition."""
    return [record for partition in bus.log(topic.full_name(run)).partitions for record in partition]


def messages_of(bus: MemoryBus, run: str, topic: Topic, kind: type[M]) -> list[M]:
    """All messages of one kind on a topic of the run, partition by partition."""
    messages = (record.message() for record in records_of(bus, run, topic) if record.value is not None)
    return [message for message in messages if isinstance(message, kind)]
