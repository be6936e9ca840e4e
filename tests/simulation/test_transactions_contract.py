"""The simulated bus without faults keeps the promises about transactions that every adapter of the bus keeps."""

import itertools
from collections.abc import AsyncIterator, Mapping

import pytest

from streamrl.bus.port import TopicPartition
from tests.contract.test_transactions import *  # noqa: F403  (the suite itself, collected here with the adapter below)
from tests.contract.test_transactions import PARTITIONS, Adapter
from tests.simulation.bus.sim_bus import SimBus

_topics = itertools.count()


class SimAdapter(Adapter):
    """Looks up commits in the simulated broker."""

    async def committed(self, group_id: str) -> Mapping[TopicPartition, int]:
        assert isinstance(self.bus, SimBus)
        return {tp: offset for (group, tp), offset in self.bus.broker.committed.items() if group == group_id}


@pytest.fixture  # type: ignore[no-redef]
async def adapter() -> AsyncIterator[Adapter]:
    bus = SimBus()
    topic = f"simulated-{next(_topics)}"
    bus.create_topic(topic, PARTITIONS)
    made = SimAdapter(bus, topic, None)
    yield made
    await made.close()
