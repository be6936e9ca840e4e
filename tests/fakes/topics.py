"""The topics of a run on a bus in memory."""

from typing import TypeVar

from streamrl.bus.memory import MemoryBus
from streamrl.schemas.topics import CATALOGUE

B = TypeVar("B", bound=MemoryBus)


def create_topics(bus: B, run: str, partitions: int = 8) -> B:
    """The bus, with all topics of the run; ``partitions``: how many its trajectories have."""
    for topic in CATALOGUE:
        bus.create_topic(topic.full_name(run), topic.partition_count(partitions))
    return bus
