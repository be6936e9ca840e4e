"""A real broker behind a fault proxy: clients reach it only through the proxy, the broker's own traffic goes round."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from bus.embedded.cluster import Cluster, start_cluster
from bus.embedded.node import free_ports, is_free
from tests.faults.proxy import HOST, FaultProxy


@dataclass(frozen=True)
class FaultyCluster:
    """The nodes, counted from 0, and the proxy before each."""

    cluster: Cluster
    proxies: tuple[FaultProxy, ...]

    @property
    def proxy(self) -> FaultProxy:
        """The proxy before the first node."""
        return self.proxies[0]

    @property
    def bootstrap_servers(self) -> str:
        """Through the proxies."""
        return ",".join(proxy.address for proxy in self.proxies)

    @property
    def direct(self) -> str:
        """The first node's own address. It answers metadata with the proxies' ports, so this is no way round them."""
        return self.cluster.specs[0].address


@dataclass(frozen=True)
class ProxiedNode:
    """One node whose clients must come through ``proxy_port``, where nothing listens until ``proxied`` is entered."""

    cluster: Cluster
    proxy_port: int

    @classmethod
    def start(cls, folder: Path, *, heap_mb: int = 256) -> Self:
        node_port, proxy_port = free_ports(2)
        cluster = start_cluster(folder, port=node_port, heap_mb=heap_mb, advertised_ports=[proxy_port])
        return cls(cluster, proxy_port)

    def revive(self) -> None:
        """Start the node again if a test left it dead."""
        (process,) = self.cluster.processes
        if not process.alive():
            self.cluster.restart_node(0)

    @asynccontextmanager
    async def proxied(self) -> AsyncIterator[FaultyCluster]:
        """A fresh proxy before the node; it ends with the context, the node does not."""
        async with FaultProxy(HOST, self.cluster.specs[0].port, port=self.proxy_port) as proxy:
            yield FaultyCluster(self.cluster, (proxy,))


@asynccontextmanager
async def faulty_cluster(folder: Path, *, nodes: int = 1, heap_mb: int = 256) -> AsyncIterator[FaultyCluster]:
    """A started cluster behind proxies; both end with the context."""
    while not all(map(is_free, range((first := free_ports(1)[0]), first + nodes))):
        pass
    async with AsyncExitStack() as stack:
        proxies = [await stack.enter_async_context(FaultProxy(HOST, first + index)) for index in range(nodes)]
        cluster = await asyncio.to_thread(
            start_cluster,
            folder,
            nodes=nodes,
            port=first,
            heap_mb=heap_mb,
            advertised_ports=[proxy.port for proxy in proxies],
        )
        try:
            yield FaultyCluster(cluster, tuple(proxies))
        finally:
            await asyncio.to_thread(cluster.stop)
