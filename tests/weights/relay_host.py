"""Relays on the loopback interface and a bus in memory, each a host of its own."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from streamrl.bus.embedded.node import free_ports
from streamrl.bus.memory import MemoryBus
from streamrl.schemas.control import AnnouncedWeights, ArmShare, ArmWeights, PolicySplit, RunIdentity, WeightsReady
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.reports import RelayBeat
from streamrl.schemas.topics import CONTROL, HEARTBEATS
from streamrl.schemas.weight_deltas import write_delta
from streamrl.schemas.weights import MANIFEST, WeightDelta, WeightManifest, describe_file
from streamrl.weights.relay.chain import RelayMember
from streamrl.weights.relay.copies import RelayCopies
from streamrl.weights.relay.limits import RelayTimes
from streamrl.weights.relay.server import Relay
from streamrl.weights.relay.tier import RelayTier
from streamrl.weights.settings import RelaySettings
from streamrl.weights.store import WeightStore
from tests.coordinator.running_coordinator import new_bus, publish
from tests.fakes.series import OrderedSeries
from tests.progress import patience

QUICK = RelayTimes(heartbeat_interval_s=0.05, upstream_timeout_s=1.0)


@dataclass
class Host:
    """One relay, served on an address of its own, so that what it sends is not of this host."""

    relay: Relay
    tier: RelayTier
    sent: int = 0
    _runner: web.AppRunner | None = None
    _tier: "asyncio.Task[None] | None" = None
    _stop: asyncio.Event = field(default_factory=asyncio.Event)

    async def start(self) -> None:
        # Not ``Relay.run``, which ends in good order: a killed relay does not.
        self._runner = web.AppRunner(self.relay.application(), shutdown_timeout=0.01)
        await self._runner.setup()
        await web.TCPSite(self._runner, self.relay.settings.host, self.relay.settings.port).start()
        self._tier = asyncio.create_task(self.tier.run(self._stop))

    async def kill(self) -> None:
        if self._runner is None or self._tier is None:
            return
        self._tier.cancel()
        await self._runner.cleanup()
        with contextlib.suppress(asyncio.CancelledError):
            await self._tier
        self._runner = self._tier = None

    def copies_of(self, arm: str = "") -> RelayCopies | None:
        assert self.relay.copies is not None
        return self.relay.copies.series.get(arm) if arm else self.relay.copies

    def have(self, version: PolicyVersion, arm: str = "") -> int:
        copies = self.copies_of(arm)
        copy = None if copies is None else copies.versions.get(version)
        return 0 if copy is None else sum(arriving.have for arriving in copy.files.values())

    async def until_it_has(self, version: PolicyVersion, size: int) -> None:
        async with patience(10):
            while self.have(version) < size:
                await asyncio.sleep(0)

    def is_whole(self, version: PolicyVersion, arm: str = "") -> bool:
        copies = self.copies_of(arm)
        return copies is not None and version in copies.whole()

    @property
    def received(self) -> int:
        followers = [self.tier.own, *self.tier.followers.values()]
        return sum(one.transfer.received_bytes for one in followers if one is not None)


@dataclass
class Network:
    """A store and hosts ``h1``, ``h2`` … on one bus."""

    bus: MemoryBus
    root: Path
    store: Host
    hosts: list[Host]
    sequence: int = 0

    def write(self, version: PolicyVersion, content: bytes, base: PolicyVersion | None = None) -> WeightsReady:
        """Put a version into the store, with a delta to ``base``; its announcement."""
        return WeightsReady(**self._written(self.root / "store", version, content, base))

    def write_of_arm(
        self, arm: str, version: PolicyVersion, content: bytes, base: PolicyVersion | None = None
    ) -> ArmWeights:
        """The same of an arm, where the store's relay finds its weights."""
        return ArmWeights(policy=arm, **self._written(self.root / "instances" / arm, version, content, base))

    async def identify(self, run_id: str) -> None:
        """Let the topics be that run's."""
        await publish(self.bus, CONTROL, RunIdentity(run_id=run_id, since=0.0))

    async def split(self, **shares: float) -> None:
        """Let these be the arms."""
        self.sequence += 1
        arms = tuple(ArmShare(policy=arm, share=share) for arm, share in shares.items())
        await publish(self.bus, CONTROL, PolicySplit(sequence=self.sequence, sent_at=0.0, arms=arms))

    def _written(
        self, store: Path, version: PolicyVersion, content: bytes, base: PolicyVersion | None
    ) -> dict[str, Any]:
        directory = store / str(version)
        directory.mkdir(parents=True)
        (directory / "model.safetensors").write_bytes(content)
        (directory / "config.json").write_text("{}")
        delta = None
        if base is not None:
            before = store / str(base)
            whole = directory / "model.safetensors"
            assert write_delta(before / whole.name, whole, 2, directory / "model.delta", len(content))
            manifest = (before / MANIFEST).read_bytes()
            delta = WeightDelta(
                file=describe_file(directory / "model.delta"),
                target=whole.name,
                base=base,
                base_manifest_sha256=_sha256(manifest),
            )
        files = tuple(describe_file(directory / name) for name in ("model.safetensors", "config.json"))
        raw = WeightManifest(version=version, step=1, files=files, created_at=0.0, delta=delta).model_dump_json()
        (directory / MANIFEST).write_text(raw)
        self.sequence += 1
        return {
            "sequence": self.sequence,
            "sent_at": 0.0,
            "version": version,
            "step": version.number,
            "manifest_sha256": _sha256(raw.encode()),
            "relays": (self.store.tier.me.address,),
        }

    async def announce(self, ready: AnnouncedWeights) -> None:
        await publish(self.bus, CONTROL, ready)

    async def whole(self, version: PolicyVersion, but: tuple[Host, ...] = (), arm: str = "") -> None:
        """Wait until all hosts but these have it."""
        async with patience(20):
            while not all(host.is_whole(version, arm) for host in self.hosts if host not in but):
                await asyncio.sleep(0.01)

    @property
    def received(self) -> int:
        return sum(host.received for host in self.hosts)

    async def settled(self) -> None:
        """Wait until everybody has heard everybody."""
        async with patience(10):
            while not all(len(host.tier.members.living(host.tier.clock())) > len(self.hosts) for host in self.hosts):
                await asyncio.sleep(0.01)


@asynccontextmanager
async def network(root: Path, hosts: int, *, store_pace: int = 0, sites: str = "") -> AsyncIterator[Network]:
    """``sites``: a letter for the store and for each host; none: all are of one."""
    bus, everyone = new_bus(), []
    for number in range(hosts + 1):
        (port,) = free_ports(1)
        settings = RelaySettings(
            host=f"127.0.0.{number + 2}",
            port=port,
            max_bytes_per_s=0 if number else store_pace,
        )
        store = WeightStore(root / "store")
        copies = RelayCopies(root / f"h{number}", 2, 0.0) if number else None
        me = RelayMember(
            f"h{number}",
            f"http://{settings.host}:{port}",
            f"h{number}",
            sites[number] if sites else "",
            has_store=number == 0,
        )
        tier = RelayTier(bus, "r", me, store, copies, 1.0, OrderedSeries(), QUICK)
        host = Host(
            Relay(
                store,
                settings,
                copies=copies,
                loops=tier,
                times=QUICK,
                store_of_series=None if number else lambda arm: WeightStore(root / "instances" / arm),
            ),
            tier,
        )

        def count(_status: int, size: int, host: Host = host) -> None:
            host.sent += size

        host.relay.on_response = count
        await host.start()
        everyone.append(host)
    made = Network(bus, root, everyone[0], everyone[1:])
    try:
        await made.settled()
        yield made
    finally:
        for host in everyone:
            await host.kill()


def beats(bus: MemoryBus) -> list[RelayBeat]:
    messages = [record.message() for record in bus.log(HEARTBEATS.full_name("r")).partitions[0]]
    return [message for message in messages if isinstance(message, RelayBeat)]


def random_weights(size: int) -> bytes:
    return os.urandom(size)


def _sha256(content: bytes) -> str:
    from hashlib import sha256

    return sha256(content).hexdigest()
