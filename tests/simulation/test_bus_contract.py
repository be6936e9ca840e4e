"""The simulated bus without faults keeps the promises that every adapter of the bus keeps."""

import itertools
from collections.abc import AsyncIterator

import pytest

from tests.contract.test_bus import *  # noqa: F403  (the suite itself, collected here with the adapter below)
from tests.contract.test_bus import PARTITIONS, Adapter
from tests.simulation.bus.sim_bus import SimBus

_topics = itertools.count()


@pytest.fixture  # type: ignore[no-redef]
async def adapter() -> AsyncIterator[Adapter]:
    bus = SimBus()
    topic = f"simulated-{next(_topics)}"
    bus.create_topic(topic, PARTITIONS)
    made = Adapter(bus, topic)
    yield made
    await made.close()
