"""The buses that must keep the same promises: in memory, and on a broker."""

from typing import NamedTuple

import pytest

from streamrl.bus.kafka.bus import KafkaBus
from streamrl.bus.kafka.settings import KafkaSettings
from streamrl.bus.memory import MemoryBus
from streamrl.bus.port import Bus
from tests.contract.topics import new_topic

BUSES = ("memory", pytest.param("kafka", marks=pytest.mark.processes))
"""Parameters of a fixture that asks for ``bus_with_topic``."""


class BusWithTopic(NamedTuple):
    """``servers``: of the broker, if there is one."""

    bus: Bus
    topic: str
    servers: str | None


async def bus_with_topic(request: pytest.FixtureRequest, purpose: str, partitions: int) -> BusWithTopic:
    """The bus that the fixture's parameter names, with a topic of its own."""
    if request.param == "memory":
        memory = MemoryBus()
        memory.create_topic(purpose, partitions)
        return BusWithTopic(memory, purpose, None)
    servers: str = request.getfixturevalue("bootstrap_servers")
    topic = await new_topic(servers, purpose, partitions)
    return BusWithTopic(KafkaBus(KafkaSettings(bootstrap_servers=servers)), topic, servers)
