"""A real broker behind fault proxies: clients reach it only through one, its own traffic goes round, or through others.

Which node a connection between nodes is of, a proxy cannot see: the operating system is asked whose port it is.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import psutil

from streamrl.bus.embedded.cluster import Cluster, plan, start_cluster
from streamrl.bus.embedded.node import free_ports, is_free
from streamrl.bus.embedded.runtime import prepare
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


@dataclass(frozen=True)
class PartitionableCluster:
    """Nodes of which every connection goes through a proxy: ``clients`` and ``peers`` before each, counted from 0."""

    cluster: Cluster
    clients: tuple[FaultProxy, ...]
    peers: tuple[tuple[FaultProxy, FaultProxy], ...]

    @property
    def bootstrap_servers(self) -> str:
        """Through the proxies."""
        return ",".join(proxy.address for proxy in self.clients)

    def cut_off(self, node: int) -> None:
        """From all other nodes, in both directions; clients reach it still."""
        for index, proxies in enumerate(self.peers):
            others = frozenset(range(len(self.peers))) - {node} if index == node else frozenset({node})
            for proxy in proxies:
                proxy.cut_off = others

    def heal(self) -> None:
        """All are together again."""
        for proxy in (*self.clients, *(proxy for pair in self.peers for proxy in pair)):
            proxy.heal()

    def owner_of(self, port: int) -> int | None:
        """The node that has opened a connection from this port."""
        for index, process in enumerate(self.cluster.processes):
            with suppress(psutil.Error):
                if any(each.laddr.port == port for each in psutil.Process(process.pid).net_connections("tcp")):
                    return index
        return None


@asynccontextmanager
async def partitionable_cluster(
    folder: Path, *, nodes: int = 3, heap_mb: int = 256
) -> AsyncIterator[PartitionableCluster]:
    """A started cluster whose nodes can be cut off from each other; all ends with the context."""
    runtime = await asyncio.to_thread(prepare, lambda line: None)
    found: list[PartitionableCluster] = []

    def who(port: int) -> int | None:
        return found[0].owner_of(port) if found else None

    async with AsyncExitStack() as stack:
        planned = plan(folder.absolute(), nodes, None, advertised_ports=[1] * nodes)
        specs, clients, peers = [], [], []
        for spec in planned:
            assert spec.internal_port is not None
            ports = (spec.port, spec.internal_port, spec.controller_port)
            client, internal, controller = [
                await stack.enter_async_context(FaultProxy(HOST, port, who=who)) for port in ports
            ]
            clients.append(client)
            peers.append((internal, controller))
            specs.append(
                replace(
                    spec,
                    advertised_port=client.port,
                    told_internal_port=internal.port,
                    told_controller_port=controller.port,
                )
            )
        cluster = Cluster(tuple(specs), runtime, heap_mb, detached=False)
        found.append(PartitionableCluster(cluster, tuple(clients), tuple(peers)))
        await asyncio.to_thread(cluster.start)
        try:
            yield found[0]
        finally:
            await asyncio.to_thread(cluster.stop)


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
