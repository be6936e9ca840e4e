"""A broker behind a fault proxy: the broker serves many tests, the proxy and the topic are each test's own."""

from collections.abc import AsyncIterator, Iterator

import pytest

from tests.contract.topics import new_topic
from tests.faults.cluster import FaultyCluster, ProxiedNode


@pytest.fixture(scope="package")
def proxied_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProxiedNode]:
    """One node that tells clients to come through a port at which each test opens its proxy."""
    node = ProxiedNode.start(tmp_path_factory.mktemp("faulty"))
    yield node
    node.cluster.stop()


@pytest.fixture
async def faulty(proxied_node: ProxiedNode) -> AsyncIterator[FaultyCluster]:
    """The node behind a proxy that has no fault yet. Whatever the test did to the node, the next one finds it up."""
    proxied_node.revive()
    async with proxied_node.proxied() as cluster:
        yield cluster


@pytest.fixture
async def topic(faulty: FaultyCluster) -> str:
    """Two partitions."""
    return await new_topic(faulty.bootstrap_servers, "faults", 2)
