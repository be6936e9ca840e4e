"""Brokers that several runs share: one node, three nodes, or behind fault proxies. Started when first used."""

import asyncio
import shutil
import signal
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from streamrl.bus.embedded.cluster import Cluster, start_cluster
from tests.faults.cluster import PartitionableCluster, faulty_cluster, partitionable_cluster
from tests.faults.proxy import FaultProxy

Kind = Literal["one", "three", "proxied", "partitionable"]

HEAP_MB = 256
STOP_S = 20.0


@dataclass
class Broker:
    """A running cluster. Its blocking calls are made in threads, so that the run under test goes on being watched."""

    kind: Kind
    cluster: Cluster
    proxy: FaultProxy | None = None
    network: PartitionableCluster | None = None

    @property
    def address(self) -> str:
        if self.network is not None:
            return self.network.bootstrap_servers
        return self.cluster.bootstrap_servers if self.proxy is None else self.proxy.address

    def is_whole(self) -> bool:
        return all(process.alive() for process in self.cluster.processes)

    async def kill(self, node: int) -> None:
        await asyncio.to_thread(self.cluster.kill_node, node)

    async def terminate(self, node: int) -> None:
        """A clean stop, as before a planned restart."""
        process = self.cluster.processes[node]
        process.send(signal.SIGTERM)
        if not await asyncio.to_thread(process.wait_ended, STOP_S):
            await self.kill(node)

    async def start(self, node: int) -> None:
        await asyncio.to_thread(self.cluster.restart_node, node)

    def send(self, node: int, number: signal.Signals) -> None:
        self.cluster.processes[node].send(number)

    async def mend(self) -> None:
        """Bring back what a run left stopped, dead or cut off."""
        if self.proxy is not None:
            self.proxy.heal()
        if self.network is not None:
            self.network.heal()
        for node, process in enumerate(self.cluster.processes):
            process.send(signal.SIGCONT)
            if not process.alive():
                await self.start(node)


@dataclass
class Brokers:
    """At most one broker of each kind at a time; each lives in its own folder below ``root``."""

    root: Path
    _running: dict[Kind, tuple[Broker, AsyncExitStack]] = field(default_factory=dict)

    async def only(self, kind: Kind) -> Broker:
        """The broker of a kind; those of other kinds are stopped, because idle brokers cost processor time."""
        for other in [name for name in self._running if name != kind]:
            await self.drop(other)
        if kind not in self._running:
            stack = AsyncExitStack()
            self._running[kind] = (await self._start(kind, stack), stack)
        broker, _ = self._running[kind]
        await broker.mend()
        return broker

    async def _start(self, kind: Kind, stack: AsyncExitStack) -> Broker:
        folder = self.root / f"kafka-{kind}"
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        if kind == "proxied":
            faulty = await stack.enter_async_context(faulty_cluster(folder, heap_mb=HEAP_MB))
            return Broker(kind, faulty.cluster, faulty.proxy)
        if kind == "partitionable":
            network = await stack.enter_async_context(partitionable_cluster(folder, heap_mb=HEAP_MB))
            return Broker(kind, network.cluster, network=network)
        nodes = 3 if kind == "three" else 1
        cluster = await asyncio.to_thread(start_cluster, folder, nodes=nodes, heap_mb=HEAP_MB)
        stack.push_async_callback(asyncio.to_thread, cluster.stop)
        return Broker(kind, cluster)

    async def drop(self, kind: Kind) -> None:
        """Stop a broker and delete its data."""
        found = self._running.pop(kind, None)
        if found is not None:
            broker, stack = found
            for process in broker.cluster.processes:
                process.send(signal.SIGCONT)
            await stack.aclose()

    async def close(self) -> None:
        for kind in list(self._running):
            await self.drop(kind)
