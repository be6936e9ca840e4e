"""``python -m benchmarks.relay``: how soon every host has new weights, down the chain of relays and otherwise.

A store and 16 relays, each a process in a network namespace of its own, on one bridge; what a namespace may send and
receive a second is bounded (tc tbf). The relays are the product's, on a bus in memory each, which this process joins:
what one publishes it hands to the others, as a broker would. Weights travel between the namespaces alone.

- direct: one relay fetches from the store, and nobody else does: what one transfer takes;
- chain: all of them, as in a run;
- star: each knows the store alone, and all fetch there;
- killed: the chain, and the relay in its middle is killed once it has half; until the last of the others has it.

Beside the broadcasts a trainer takes steps: its device is elsewhere, so a step is ``step_s`` of waiting, as short as
hides export and broadcast. What a step takes beyond that is its stall: the copy of the weights, and whatever else the
broadcast costs it; the blocking one waits until the last relay has them. Sixteen relays on a machine of two cores move
a tenth of what they could with a machine each; so ``fewer_hosts`` are measured at a higher speed, too.
``bytes_over_ideal``: all that left the namespaces during a chain, headers and acknowledgements too, over one copy a
relay. Needs root: namespaces, a bridge and traffic control of the kernel; without them nothing is measured.
"""

import argparse
import asyncio
import base64
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.conditions import conditions
from streamrl.bus.memory import MemoryBus
from streamrl.bus.port import Outgoing
from streamrl.schemas.codec import decode, encode, headers_of
from streamrl.schemas.control import WeightsReady
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.messages import Message
from streamrl.schemas.reports import RelayBeat
from streamrl.schemas.topics import CATALOGUE, CONTROL, HEARTBEATS
from streamrl.weights.relay.chain import RelayMember
from streamrl.weights.relay.copies import RelayCopies
from streamrl.weights.relay.limits import TIMES
from streamrl.weights.relay.server import Relay
from streamrl.weights.relay.tier import RelayTier
from streamrl.weights.settings import RelaySettings
from streamrl.weights.store import WeightStore

if TYPE_CHECKING:
    import torch

    from streamrl.weights.export import WeightExporter

RESULTS = Path(__file__).parent / "results" / "relay.json"
PORT = 8800
NETWORK = "10.213.0"
PREFIX = "srl-relay"
SWITCH = f"{PREFIX}-switch"
RUN = "bench"
REPORT_S = 0.02
"""How often a relay's process tells what it has: a transfer takes a thousand times as long."""
LISTENING_S = 4.0
"""After the last was heard: a relay listens to the others for two beats before it fetches."""
HIDES = 1.3
"""Times a direct transfer: a step of the trainer's that is so long hides a broadcast."""
TOO_LONG = 4.0
"""Times what a star would take: then something is broken."""


def main(arguments: list[str] | None = None) -> dict[str, Any] | None:
    """Measure as the arguments say; none where the machine does not allow it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.relay", description=__doc__)
    parser.add_argument("--hosts", type=int, default=16, help="relays beside the store's")
    parser.add_argument("--mib", type=int, default=256, help="of weights")
    parser.add_argument("--mbit", type=int, default=200, help="a second, that each namespace may send and receive")
    parser.add_argument("--fewer-hosts", type=int, default=4, help="that are measured at --fewer-hosts-mbit")
    parser.add_argument("--fewer-hosts-mbit", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3, help="of direct and chain, and of killed")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    if min(options.hosts, options.fewer_hosts) < 2:
        parser.error("expected 2 hosts at least (one is killed while others go on), in --hosts and in --fewer-hosts")
    if (reason := why_not()) is not None:
        print(f"skipped: {reason}")
        return None
    began = time.monotonic()
    # In memory, where relays best have them: a disk would be measured else.
    memory = Path("/dev") / "shm"
    few = argparse.Namespace(**vars(options) | {"hosts": options.fewer_hosts, "mbit": options.fewer_hosts_mbit})
    found = []
    for each in (options, few):
        with tempfile.TemporaryDirectory(prefix="streamrl-relay-", dir=memory if memory.is_dir() else None) as scratch:
            found.append(asyncio.run(measure(each, Path(scratch))))
    result = found[0] | {"fewer_hosts": found[1]}
    command = f"make bench-relay ARGS='--hosts {options.hosts} --mib {options.mib} --mbit {options.mbit}'"
    result["conditions"] = conditions(began, 0, ["aiohttp"], command)
    options.results.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))
    return result


def why_not() -> str | None:
    """Why nothing can be measured here, or none."""
    if os.geteuid():
        return "expected root, which may make network namespaces, got another user"
    name = f"{PREFIX}-try"
    try:
        _ip("netns", "add", name)
    except (OSError, subprocess.CalledProcessError) as error:
        return f"expected `ip netns add` to work, got {error}"
    try:
        _tc(name, "lo", 100)
    except (OSError, subprocess.CalledProcessError) as error:
        return f"expected `tc qdisc add … tbf` to work, got {error}"
    finally:
        _ip("netns", "del", name)
    return None


@contextmanager
def namespaces(count: int, mbit: int) -> Iterator[None]:
    """Namespaces 0 to ``count`` - 1 on one bridge, each bounded in both directions.

    The bridge is in a namespace too: there the machine's own firewall has no say in what passes a bridge.
    """
    try:
        _ip("netns", "add", SWITCH)
        _ip("-n", SWITCH, "link", "add", "bridge", "type", "bridge")
        _ip("-n", SWITCH, "link", "set", "bridge", "up")
        for number in range(count):
            name, port = f"{PREFIX}-{number}", f"port{number}"
            _ip("netns", "add", name)
            _ip("-n", SWITCH, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("-n", SWITCH, "link", "set", port, "master", "bridge", "up")
            _ip("-n", name, "addr", "add", f"{NETWORK}.{number + 1}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _ip("-n", name, "link", "set", device, "up")
            _tc(name, "eth0", mbit)  # what it sends
            _tc(SWITCH, port, mbit)  # what it receives
        yield
    finally:
        for name in (*(f"{PREFIX}-{number}" for number in range(count)), SWITCH):
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("netns", "del", name)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def _tc(namespace: str, device: str, mbit: int) -> None:
    within = ["ip", "netns", "exec", namespace]
    bound = ["root", "tbf", "rate", f"{mbit}mbit", "burst", "128kb", "latency", "100ms"]
    subprocess.run([*within, "tc", "qdisc", "add", "dev", device, *bound], check=True, capture_output=True)


def sent_bytes(count: int) -> int:
    """All that left the namespaces so far."""
    command = ["ip", "-json", "-stats", "-n", SWITCH, "link", "show"]
    shown = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    received = {port["ifname"]: port["stats64"]["rx"]["bytes"] for port in shown}
    return sum(int(received[f"port{number}"]) for number in range(count))


@dataclass
class RelayProcess:
    """One relay in its namespace; 0 is the store's. ``have`` and ``held_at``: what it told last, by version."""

    number: int
    scratch: Path
    on_beat: Callable[["RelayProcess", str], None]
    have: dict[str, int] = field(default_factory=dict)
    held_at: dict[str, float] = field(default_factory=dict)
    process: "asyncio.subprocess.Process | None" = None
    _reading: "asyncio.Task[None] | None" = None

    async def start(self) -> None:
        """Begin to serve, and to read what it says."""
        code = "from benchmarks.relay import serve; import sys; serve(int(sys.argv[1]), sys.argv[2])"
        self.process = await asyncio.create_subprocess_exec(
            *("ip", "netns", "exec", f"{PREFIX}-{self.number}", sys.executable, "-c", code),
            *(str(self.number), str(self.scratch)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        assert self.process is not None
        assert self.process.stdout is not None
        while line := await self.process.stdout.readline():
            said = json.loads(line)
            if "beat" in said:
                self.on_beat(self, said["beat"])
            self.have |= said.get("have", {})
            self.held_at |= said.get("held_at", {})

    def tell(self, message: str) -> None:
        """Put an encoded message on its bus."""
        if self.process is not None and self.process.returncode is None:
            assert self.process.stdin is not None
            self.process.stdin.write(message.encode() + b"\n")

    async def kill(self) -> None:
        """At once, and wait until it is gone."""
        if self.process is not None and self._reading is not None:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
            await self.process.wait()
            await self._reading


@dataclass
class Bench:
    """The bus between the relays, the trainer, and the clock."""

    options: argparse.Namespace
    scratch: Path
    relays: list[RelayProcess] = field(default_factory=list)
    is_star: bool = False
    heard: dict[int, set[int]] = field(default_factory=dict)

    def pass_on(self, sender: RelayProcess, beat: str) -> None:
        """What one publishes the others read; in a star only what the store's does."""
        if self.is_star and sender.number:
            return
        for relay in self.relays:
            if relay is not sender:
                relay.tell(beat)
        self.heard.setdefault(sender.number, set())

    async def started(self) -> None:
        """Wait until everybody was heard, and everybody fetches."""
        async with asyncio.timeout(120):
            await _until(lambda: len(self.heard) == len(self.relays))
        await asyncio.sleep(LISTENING_S)

    def announce(self, ready: WeightsReady, to: list[RelayProcess]) -> float:
        """When it was announced."""
        began, text = time.monotonic(), _text(ready)
        for relay in to:
            relay.tell(text)
        return began

    async def broadcast(self, ready: WeightsReady, to: list[RelayProcess]) -> float:
        """Seconds until the last of these had it."""
        began = self.announce(ready, to)
        return await self.last(ready.version, to) - began

    async def last(self, version: PolicyVersion, of: list[RelayProcess]) -> float:
        """When the last of these had a version whole."""
        ideal_s = self.options.mib * 8.388608 / self.options.mbit
        name = str(version)
        async with asyncio.timeout(TOO_LONG * (len(self.relays) * ideal_s + 30)):
            await _until(lambda: all(name in relay.held_at for relay in of))
        return max(relay.held_at[name] for relay in of)


async def measure(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """All rows."""
    import torch

    from streamrl.weights.export import WeightExporter

    generator = torch.Generator().manual_seed(0)
    tensors = {"weights": torch.randint(0, 255, (options.mib << 20,), dtype=torch.uint8, generator=generator)}
    trainer = EmulatedTrainer(tensors, {"weights": tensors["weights"].clone()}, WeightExporter(scratch / "store", 2))
    seconds: dict[str, list[float]] = {"direct": [], "chain": [], "killed": [], "star": []}
    ratios: list[float] = []
    steps_s: list[float] = []
    stalls: list[float] = []
    with namespaces(options.hosts + 1, options.mbit):
        async with _running(options, scratch) as bench:
            hosts = bench.relays[1:]
            for _ in range(options.rounds):
                exporting = time.monotonic()
                ready = await trainer.hand_over()
                exported_s = time.monotonic() - exporting
                seconds["direct"].append(await bench.broadcast(ready, [hosts[0]]))
                _say("direct", seconds)
                steps_s.append(exported_s + HIDES * seconds["direct"][-1])
                sent = sent_bytes(options.hosts + 1)
                stall_s, took_s = await trainer.step(bench, steps_s[-1])
                ratios.append((sent_bytes(options.hosts + 1) - sent) / (options.hosts * (options.mib << 20)))
                stalls.append(stall_s / (stall_s + steps_s[-1]))
                seconds["chain"].append(took_s)
                _say("chain", seconds)
                await _killed(bench, await trainer.hand_over(), seconds["killed"])
                _say("killed", seconds)
            blocked_s, _ = await trainer.step(bench, steps_s[-1], is_blocking=True)
            bench.is_star = True
            await asyncio.sleep(TIMES.upstream_timeout_s + 2)
            seconds["star"].append(await bench.broadcast(await trainer.hand_over(), hosts))
            _say("star", seconds)
    direct = statistics.median(seconds["direct"])
    over = {name: round(statistics.median(found) / direct, 3) for name, found in seconds.items()}
    return {
        "hosts": options.hosts,
        "mib": options.mib,
        "mbit": options.mbit,
        "last_over_direct": over["chain"],
        "star_over_direct": over["star"],
        "one_killed_over_direct": over["killed"],
        "bytes_over_ideal": round(statistics.median(ratios), 4),
        "step_s": round(statistics.median(steps_s), 2),
        "stall_share": round(statistics.median(stalls), 5),
        "blocking_stall_share": round(blocked_s / (blocked_s + steps_s[-1]), 3),
        "seconds": {name: [round(each, 2) for each in found] for name, found in seconds.items()},
    }


@dataclass
class EmulatedTrainer:
    """Hands its weights over as the trainer does: a copy, over the memory of the copy before, since fresh pages cost as
    much as the copy itself; the export is of the copy, while the next step runs.
    """

    weights: dict[str, "torch.Tensor"]
    copy: dict[str, "torch.Tensor"]
    store: "WeightExporter"
    steps: int = 0

    async def hand_over(self) -> WeightsReady:
        """The next version, in the store."""
        self.weights["weights"][:1024] += 1
        self.copy["weights"].copy_(self.weights["weights"])
        return await self._exported()

    async def _exported(self) -> WeightsReady:
        self.steps += 1
        version = PolicyVersion(1, self.steps)
        export = self.store.export
        sha256 = await asyncio.to_thread(export, self.copy, {"config.json": "{}"}, version, self.steps, 0.0)
        return WeightsReady(
            sequence=self.steps, sent_at=0.0, version=version, step=self.steps, manifest_sha256=sha256, relays=()
        )

    async def step(self, bench: "Bench", step_s: float, *, is_blocking: bool = False) -> tuple[float, float]:
        """A step with the broadcast of the weights before it: seconds that it waited, and that the broadcast took."""
        self.weights["weights"][:1024] += 1
        began = time.monotonic()
        self.copy["weights"].copy_(self.weights["weights"])
        broadcast = asyncio.create_task(self._broadcast(bench))
        if is_blocking:
            await broadcast
        await asyncio.sleep(step_s)
        return time.monotonic() - began - step_s, await broadcast

    async def _broadcast(self, bench: "Bench") -> float:
        return await bench.broadcast(await self._exported(), bench.relays[1:])


async def _killed(bench: Bench, ready: WeightsReady, seconds: list[float]) -> None:
    hosts = bench.relays[1:]
    victim, others = hosts[len(hosts) // 2], [host for host in hosts if host is not hosts[len(hosts) // 2]]
    began = bench.announce(ready, hosts)
    half = bench.options.mib << 19
    await _until(lambda: victim.have.get(str(ready.version), 0) >= half)
    await victim.kill()
    seconds.append(await bench.last(ready.version, others) - began)
    bench.heard.pop(victim.number, None)
    await victim.start()
    await bench.started()


async def _until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110 - what is awaited is told by other processes, at that pace
        await asyncio.sleep(REPORT_S)


def _say(name: str, seconds: dict[str, list[float]]) -> None:
    print(f"{name}: {seconds[name][-1]:.2f} s", flush=True)


@asynccontextmanager
async def _running(options: argparse.Namespace, scratch: Path) -> AsyncIterator[Bench]:
    bench = Bench(options, scratch)
    bench.relays = [RelayProcess(number, scratch, bench.pass_on) for number in range(options.hosts + 1)]
    try:
        for relay in bench.relays:
            await relay.start()
        await bench.started()
        yield bench
    finally:
        for relay in bench.relays:
            await relay.kill()


def _text(message: Message) -> str:
    """A message as one line: its schema and its bytes."""
    headers = {name: value.decode() for name, value in headers_of(message)}
    return json.dumps({"headers": headers, "value": base64.b64encode(encode(message)).decode()})


def _message(text: str) -> Message:
    said = json.loads(text)
    headers = tuple((name, value.encode()) for name, value in said["headers"].items())
    return decode(base64.b64decode(said["value"]), headers)


def serve(number: int, scratch: str) -> None:
    """A relay's process: messages of the bus in, and out what it publishes and what it has."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # logs print, too
    asyncio.run(_serve(number, Path(scratch), lambda said: print(json.dumps(said), file=answers, flush=True)))


async def _serve(number: int, scratch: Path, say: Callable[[dict[str, Any]], None]) -> None:
    bus = MemoryBus()
    for topic in CATALOGUE:
        bus.create_topic(topic.full_name(RUN), topic.partition_count(1))
    settings = RelaySettings(host=f"{NETWORK}.{number + 1}", port=PORT)
    store = WeightStore(scratch / "store")
    copies = RelayCopies(scratch / f"host-{number}", 1, 0.0) if number else None
    me = RelayMember(f"h{number:03}", f"http://{settings.host}:{PORT}", f"h{number:03}", has_store=not number)
    tier = RelayTier(bus, RUN, me, store, copies)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(_hear(bus))
        tasks.create_task(_tell(bus, me.relay_id, copies, say))
        tasks.create_task(Relay(store, settings, copies=copies, loops=tier).run(asyncio.Event()))


async def _hear(bus: MemoryBus) -> None:
    publisher = await bus.publisher("bench")
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        message = _message(line.decode())
        topic = HEARTBEATS if isinstance(message, RelayBeat) else CONTROL
        await publisher.publish(Outgoing.of(topic.full_name(RUN), message, key="bench"))
    os._exit(0)  # the benchmark is gone


async def _tell(
    bus: MemoryBus, relay_id: str, copies: RelayCopies | None, say: Callable[[dict[str, Any]], None]
) -> None:
    log, told, held = bus.log(HEARTBEATS.full_name(RUN)).partitions[0], 0, set[str]()
    while True:
        for record in log[told:]:
            message = record.message()
            if isinstance(message, RelayBeat) and message.relay_id == relay_id:
                say({"beat": _text(message)})
        told = len(log)
        if copies is not None:
            arriving = {
                str(version): sum(file.have for file in copy.files.values())
                for version, copy in copies.versions.items()
                if not copy.is_whole
            }
            new = {str(version) for version in copies.whole()} - held
            held |= new
            if arriving or new:
                say({"have": arriving, "held_at": {version: time.monotonic() for version in new}})
        await asyncio.sleep(REPORT_S)


if __name__ == "__main__":
    if main() is None:
        sys.exit(0)
