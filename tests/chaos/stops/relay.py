"""Relays that pour weights to readers while they are stopped: the one of the store, and one that fetches copies."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path
from random import Random

import aiohttp

from streamrl.bus.embedded.node import free_ports
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.weights import MANIFEST, WeightManifest, complete_versions
from streamrl.weights.relay.chain import RelayMember
from streamrl.weights.relay.copies import RelayCopies
from streamrl.weights.relay.limits import RelayTimes
from streamrl.weights.relay.server import Relay
from streamrl.weights.relay.tier import RelayTier
from streamrl.weights.settings import RelaySettings
from streamrl.weights.store import LEASES, WeightStore
from tests.chaos.stops.moment import Subject
from tests.weights.relay_host import Host, Network, network

READERS, BYTES, PACE = 4, 400_000, 8_000_000
NAME = "model.safetensors"
QUICK = RelayTimes(heartbeat_interval_s=0.05, upstream_timeout_s=1.0)


class Readers:
    """They ask for the newest versions again and again, and compare what comes whole."""

    def __init__(self, made: Network, address: str) -> None:
        self.made, self.address = made, address
        self.contents: dict[str, str] = {}
        self.whole, self.number, self.problems = 0, 0, list[str]()

    async def work(self) -> None:
        """New versions and readings until cancelled."""
        async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as tasks:
            tasks.create_task(self._announce())
            for _ in range(READERS):
                tasks.create_task(self._read_on(session))

    async def _announce(self) -> None:
        while True:
            await self.announce_next()
            await asyncio.sleep(0.1)

    async def announce_next(self) -> PolicyVersion:
        version = PolicyVersion(1, self.number)
        self.number += 1
        content = os.urandom(BYTES)
        self.contents[str(version)] = sha256(content).hexdigest()
        await self.made.announce(self.made.write(version, content))
        return version

    async def _read_on(self, session: aiohttp.ClientSession) -> None:
        while True:
            version = f"1-{max(0, self.number - 1)}"
            try:
                async with session.get(f"{self.address}/weights/{version}/{NAME}") as response:
                    found = await response.read()
                    if response.status == 200:
                        self.whole += 1
                        if sha256(found).hexdigest() != self.contents[version]:
                            self.problems.append(f"{version} came whole, and is another")
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.01)


@asynccontextmanager
async def of_the_store(root: Path, random: Random) -> AsyncIterator[Subject]:
    """It pours to other hosts at a pace, so that it is always in the middle of files; or to its own."""
    async with network(root, 0) as made:
        await made.store.kill()
        (port,), host = free_ports(1), random.choice(("127.0.0.1", "127.0.0.8"))
        settings = RelaySettings(host=host, port=port, max_bytes_per_s=PACE)
        store = WeightStore(root / "store", lease_s=0.2)
        me = RelayMember("h0", f"http://{host}:{port}", "h0", "", has_store=True)
        tier = RelayTier(made.bus, "r", me, store, None, 1.0, times=QUICK)
        relay = Relay(store, settings, loops=tier, times=QUICK)
        readers = Readers(made, me.address)

        async def judge() -> list[str]:
            problems = [*readers.problems, *_port_left(port, host)]
            return problems + _damaged(root / "store", readers)

        async def run(stop: asyncio.Event) -> None:
            await relay.run(stop)
            if (store.root / LEASES).exists():
                readers.problems.append("files are still kept for readers after an orderly end")

        yield Subject(run, readers.work, lambda: readers.whole > 2, judge)


@asynccontextmanager
async def of_copies(root: Path, _random: Random) -> AsyncIterator[Subject]:
    """It fetches each version from the store's relay, while readers take what has arrived."""
    async with network(root, 0, store_pace=PACE) as made:
        (port,) = free_ports(1)

        def relay() -> tuple[Relay, RelayTier]:
            settings = RelaySettings(host="127.0.0.9", port=port)
            me = RelayMember("c", f"http://127.0.0.9:{port}", "c", "", has_store=False)
            copies = RelayCopies(root / "copies", 2, 0.0)
            store = WeightStore(root / "none")
            tier = RelayTier(made.bus, "r", me, store, copies, 1.0, times=QUICK)
            return Relay(store, settings, copies=copies, loops=tier, times=QUICK), tier

        subject, _tier = relay()
        readers = Readers(made, f"http://127.0.0.9:{port}")

        async def judge() -> list[str]:
            problems = [*readers.problems, *_port_left(port, "127.0.0.9"), *_damaged(root / "copies", readers)]
            wanted = await readers.announce_next()
            again, tier = relay()
            stop = asyncio.Event()
            running = asyncio.create_task(again.run(stop))
            host = Host(again, tier)
            for _ in range(1000):
                if running.done() or host.is_whole(wanted):
                    break
                await asyncio.sleep(0.01)
            else:
                problems.append(f"who takes over its copies never has {wanted}")
            stop.set()
            await running
            return problems + _damaged(root / "copies", readers)

        yield Subject(subject.run, readers.work, lambda: readers.whole > 2, judge)


def _port_left(port: int, host: str = "127.0.0.1") -> list[str]:
    try:
        with socket.create_server((host, port)):
            return []
    except OSError as error:
        return [f"its port is not free: {error}"]


def _damaged(root: Path, readers: Readers) -> list[str]:
    """Versions that call themselves complete, and are not."""
    problems = []
    for version in complete_versions(root):
        manifest = WeightManifest.model_validate_json((root / str(version) / MANIFEST).read_bytes())
        for file in manifest.files:
            path = root / str(version) / file.name
            found = sha256(path.read_bytes()).hexdigest() if path.exists() else "nothing"
            if found != file.sha256 or (file.name == NAME and found != readers.contents[str(version)]):
                problems.append(f"{version} is complete, and {file.name} is {found[:12]}")
    return problems
