"""The checks of `streamrl doctor`: the clocks, the broker and its topics, and this machine. They change nothing.

A check yields findings. Each names the thing checked, the result and, if necessary, what to do.
"""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from streamrl.bus.embedded.jars import KAFKA_VERSION, locked_jars, missing_jars
from streamrl.bus.embedded.node import HOST
from streamrl.bus.embedded.runtime import OLDEST_MAJOR, cache_root, find_java
from streamrl.bus.history import BusHistory
from streamrl.bus.kafka.cluster import CODECS, ClusterFacts, ask_cluster, codec_problem
from streamrl.bus.kafka.limits import LIMITS
from streamrl.bus.kafka.records import LARGEST_UNCOMPRESSED
from streamrl.bus.kafka.settings import KafkaSettings
from streamrl.bus.kafka.topic_admin import TopicChange, diff_topics
from streamrl.bus.port import Record, message_of
from streamrl.inspection.diagnostics.connect import CLIENT_ID, RunConnection, runs_of
from streamrl.inspection.diagnostics.tail import newest_records
from streamrl.schemas.errors import BrokerError, BusError, SettingsError
from streamrl.schemas.extras import how_to_install
from streamrl.schemas.reports import Heartbeat
from streamrl.schemas.topics import CATALOGUE, HEARTBEATS, TRAJECTORIES, Topic
from streamrl.settings.placement import Machine, for_machine
from streamrl.settings.placement import place as placed
from streamrl.settings.tree import Settings

Level = Literal["ok", "warn", "fail"]
SOMETHING_FAILS = 2
"""Exit code if a check fails."""
LISTEN_S = 3.0
"""Seconds to wait for a heartbeat. Workers send one every second, so in a running run one arrives in this time."""
LOOK_EVERY_S = 0.5
TOLERATED_S = 2.0
"""Seconds that clocks may differ: leases and the lag in seconds need no better accuracy."""
OLDEST_RELEASE = (3, 7)
HARMFUL = ("max.message.bytes", "cleanup.policy", "min.insync.replicas")
"""Topic settings: with a wrong value of one of them, a run loses records or cannot write them."""
LOCAL = (HOST, "localhost", "::1")
MIB, GIB = 1 << 20, 1 << 30
LEAST_BYTES, LOW_BYTES = GIB, 10 * GIB
"""Free bytes on a disk: below the first a run cannot work; below the second it is likely to fill the disk soon."""
IMPORT_S = 180.0
"""Time-out for importing an engine's libraries from a cold disk."""
ENGINE_LIBRARIES = {"transformers": ("torch", "transformers"), "vllm": ("torch", "vllm"), "emulated": ()}
_PROBE = """
import importlib, json, sys
found = {"versions": {}, "gpus": []}
for name in sys.argv[1:]:
    found["versions"][name] = getattr(importlib.import_module(name), "__version__", "?")
if "torch" in sys.modules:
    cuda = sys.modules["torch"].cuda
    found["gpus"] = [[cuda.get_device_name(n), *cuda.mem_get_info(n)] for n in range(cuda.device_count())]
print(json.dumps(found))
"""


@dataclass(frozen=True)
class Finding:
    """The result of a check. ``remedy``: what to do; empty only if nothing needs to be done."""

    level: Level
    check: str
    detail: str
    remedy: str = ""

    @property
    def line(self) -> str:
        """The finding in one line, and the remedy in a second one."""
        remedy = f"\n{'':16}→ {self.remedy}" if self.remedy else ""
        return f"{self.level:<5}{self.check:<11}{self.detail}{remedy}"


def ok(check: str, detail: str) -> Finding:
    """A finding that needs no action."""
    return Finding("ok", check, detail)


def warn(check: str, detail: str, remedy: str) -> Finding:
    """A finding about something that works, but not as it should."""
    return Finding("warn", check, detail, remedy)


def fail(check: str, detail: str, remedy: str) -> Finding:
    """A finding about something that prevents a run from working."""
    return Finding("fail", check, detail, remedy)


def exit_code(findings: Iterable[Finding]) -> int:
    """The exit code: 0, or 2 if a check failed."""
    return SOMETHING_FAILS if any(each.level == "fail" for each in findings) else 0


def as_rows(findings: Iterable[Finding]) -> list[dict[str, str]]:
    """The findings as JSON-safe rows."""
    return [asdict(each) for each in findings]


def verdict(findings: Iterable[Finding]) -> Iterator[str]:
    """The last line, which counts the findings by level."""
    levels = [each.level for each in findings]
    yield f"{levels.count('ok')} ok, {levels.count('warn')} warnings, {levels.count('fail')} failed"


async def check_clocks(connection: RunConnection) -> Finding:
    """Compare the clocks: broker and worker should have stamped a new heartbeat with the current time."""
    try:
        fresh, skew_s, newest = await _skew(connection)
        by_broker = await _stamped_by_broker(connection)
    except BusError as error:
        return warn("clocks", f"not measured: {error}", "see the broker's finding")
    # An old heartbeat shows nothing about the clocks, unless its time is in the future.
    if skew_s is None or newest is None or (not fresh and skew_s <= TOLERATED_S):
        return ok("clocks", "not measured: no worker sends heartbeats, and only a new record shows the broker's time")
    # If the catalogue was not applied to the topic, records may keep the writer's stamp.
    skews = {f"{'the broker' if by_broker else 'a worker'} stamps records": skew_s}
    if by_broker and isinstance(beat := message_of(newest), Heartbeat):
        # The worker's skew, without the broker's. It includes the heartbeat's delivery time.
        skews[f"{beat.worker_id} writes"] = skew_s + beat.sent_at - newest.timestamp
    detail = " and ".join(
        f"{writer} {abs(each):.1f} s {'ahead of' if each > 0 else 'behind'} this machine's clock"
        for writer, each in skews.items()
    )
    if max(map(abs, skews.values())) <= TOLERATED_S:
        return ok("clocks", detail)
    return warn(
        "clocks",
        detail,
        "synchronise the clocks with NTP; displays depend on them, and retention depends on the broker's clock",
    )


async def _skew(connection: RunConnection) -> tuple[bool, float | None, Record | None]:
    """Whether a heartbeat arrived while we waited; the time stamp of the newest one minus our time; its record."""
    # Reading the newest record several times costs less than a subscription.
    before, deadline = await _newest(connection), time.monotonic() + LISTEN_S
    newest = before
    while before is not None and time.monotonic() < deadline:
        await asyncio.sleep(LOOK_EVERY_S)
        newest = await _newest(connection)
        if newest is not None and newest.offset != before.offset:
            return True, newest.timestamp - time.time(), newest
    return False, None if newest is None else newest.timestamp - time.time(), newest


async def _newest(connection: RunConnection) -> Record | None:
    history, topic = BusHistory(connection.bus, CLIENT_ID), connection.name_of(HEARTBEATS)
    found = await newest_records(history, topic, await history.extents(topic), 1)
    return found[0] if found else None


async def _stamped_by_broker(connection: RunConnection) -> bool:
    name = connection.name_of(HEARTBEATS)
    facts = await ask_cluster(connection.kafka, lambda topic: topic == name)
    return facts.topics[name].configs.get("message.timestamp.type") == "LogAppendTime" if facts.topics else False


async def check_cluster(connection: RunConnection) -> list[Finding]:
    """Findings about the broker and its topics. The first one says whether a broker answers."""
    try:
        facts = await ask_cluster(connection.kafka, lambda name: name.startswith(f"{connection.run}."))
    except BusError as error:
        return [fail("broker", str(error), "look at the broker's log, or start one with `streamrl kafka up`")]
    findings = [*_broker(facts, connection.kafka)]
    run = connection.run
    if not run:
        return [*findings, ok("topics", "not checked, because no run was named")]
    if not runs_of(facts.topics):
        return [
            *findings,
            ok("topics", f"run {run} has none yet; `streamrl run` or `streamrl topics apply --run {run}` creates them"),
        ]
    return [*findings, *await _topics(connection, facts), *_sizes(connection, facts)]


def _broker(facts: ClusterFacts, kafka: KafkaSettings) -> Iterator[Finding]:
    addresses = ", ".join(facts.brokers.values())
    detail = f"{len(facts.brokers)} at {addresses}, release {facts.release or 'unknown'}"
    # Older brokers lack requests that we use.
    if facts.release and tuple(map(int, facts.release.split("."))) < OLDEST_RELEASE:
        yield fail("broker", detail, f"use Apache Kafka {'.'.join(map(str, OLDEST_RELEASE))} or later")
    else:
        yield ok("broker", detail)
    # A connection within one machine cannot be tapped.
    if kafka.security_protocol == "PLAINTEXT" and any(_host(each) not in LOCAL for each in facts.brokers.values()):
        remedy = "set kafka.security_protocol to SASL_SSL or SSL, unless the network is trusted"
        detail = "the connection to another machine is neither encrypted nor authenticated"
        yield warn("security", detail, remedy)
    # With a misspelt name, the broker would create a topic with one partition and accept records there.
    if facts.configs.get("auto.create.topics.enable") == "true":
        remedy = "set auto.create.topics.enable=false on the brokers"
        yield warn("broker", "it creates unknown topics on request, with its default settings", remedy)


def _host(address: str) -> str:
    return address.rpartition(":")[0]


async def _topics(connection: RunConnection, facts: ClusterFacts) -> list[Finding]:
    run, settings = connection.run, connection.settings
    trajectories = facts.topics[TRAJECTORIES.full_name(run)]
    # Without settings the right number is unknown, so the present one counts as right.
    partitions = trajectories.partitions if settings is None else settings.loop.trajectory_partitions
    changes = await diff_topics(connection.address, run, partitions, settings=connection.kafka)
    remedy = f"streamrl topics apply --run {run} --bootstrap-servers {connection.address} --partitions {partitions}"
    findings = [_differing(change, remedy) for change in changes]
    for name, topic in facts.topics.items():
        if topic.leaderless:
            detail = f"{name}: {topic.leaderless} of {topic.partitions} partitions have no leader"
            findings.append(fail("topics", detail, "start the brokers that hold them"))
    # A single broker cannot hold two copies, which is not a problem.
    alone = [name for name, topic in facts.topics.items() if topic.replicas < min(2, len(facts.brokers))]
    if alone:
        detail = f"{len(alone)} topics have one copy each, on {len(facts.brokers)} brokers"
        findings.append(
            warn("topics", detail, "reassign them with kafka-reassign-partitions, or set kafka.replication_factor")
        )
    return findings or [ok("topics", f"{len(CATALOGUE)} of run {run}, all as in the catalogue")]


def _differing(change: TopicChange, remedy: str) -> Finding:
    detail = str(change)
    # Partitions cannot be removed, so there is nothing to apply.
    if change.kind == "conflict":
        return fail("topics", detail, "use another run.name, or the settings that the run was started with")
    if change.kind in ("create", "add partitions") or change.detail.startswith(HARMFUL):
        return fail("topics", detail, remedy)
    return warn("topics", detail, remedy)


def _sizes(connection: RunConnection, facts: ClusterFacts) -> Iterator[Finding]:
    """Check limits: message, batch ≤ topic ≤ broker's request, reader's batch."""
    problems = []
    # If a writer's limit is above a reader's, a run fails in the middle, at its longest completion.
    request = facts.number("socket.request.max.bytes")
    for topic in CATALOGUE:
        known = facts.topics.get(connection.name_of(topic))
        if known is not None:
            limit = int(known.configs.get("max.message.bytes") or 0)
            problems += [*_size_problems(topic, limit, request, connection.run)]
    yield from problems
    if not problems:
        largest = max(message.MAX_BYTES for topic in CATALOGUE if (message := topic.message) is not None)
        yield ok("sizes", f"messages of up to {_mib(largest)} fit writers, topics, broker and readers")


def _size_problems(topic: Topic, limit: int, request: int | None, run: str) -> Iterator[Finding]:
    apply = f"`streamrl topics apply --run {run}`"
    largest = 0 if topic.message is None else topic.message.MAX_BYTES
    name = topic.name
    if largest > limit:
        detail = f"{name}: a message may have {_mib(largest)}, the topic accepts {_mib(limit)}"
        yield fail("sizes", detail, f"{apply} sets max.message.bytes")
    if LIMITS.max_batch_bytes > limit:
        detail = f"{name}: writers send {_mib(LIMITS.max_batch_bytes)} at once, the topic accepts {_mib(limit)}"
        yield fail("sizes", detail, f"{apply} sets max.message.bytes")
    if request is not None and limit > request:
        detail = f"{name}: the topic accepts {_mib(limit)}, the broker requests of {_mib(request)}"
        yield fail("sizes", detail, "raise socket.request.max.bytes on the brokers")
    if limit > LARGEST_UNCOMPRESSED:
        detail = f"{name}: the topic accepts {_mib(limit)}, readers refuse batches above {_mib(LARGEST_UNCOMPRESSED)}"
        yield warn("sizes", detail, f"lower max.message.bytes of the topic; {apply} does")


def _mib(size: int) -> str:
    return f"{size / MIB:.1f} MiB"


def check_embedded_broker(*, needed: bool) -> Iterator[Finding]:
    """Check Java and Kafka's jars. ``needed``: no broker is named, so `streamrl run` will start one."""
    problem_level = fail if needed else warn
    try:
        java = find_java()
        yield ok("java", f"{java.version} at {java.path}")
    except BrokerError as error:
        yield problem_level(
            "java", str(error), f"{how_to_install('local')}, install Java {OLDEST_MAJOR}, or name a broker"
        )
    missing = missing_jars(cache_root() / "runtime" / f"kafka-{KAFKA_VERSION}" / "jars")
    if not missing:
        yield ok("jars", f"Kafka {KAFKA_VERSION}, {len(locked_jars())} jars, all with the locked checksums")
        return
    size = sum(jar.size for jar in missing) / 1e6
    detail = f"{len(missing)} of {len(locked_jars())} jars of Kafka {KAFKA_VERSION} are not in the cache"
    yield warn("jars", detail, f"`streamrl kafka up` downloads them ({size:.0f} MB); it needs a network once")


def check_placement(settings: Settings, machine: Machine) -> Iterator[Finding]:
    """Check where the processes of a run would compute on this machine."""
    try:
        lines = placed(for_machine(settings, machine, {}), machine).lines()
    except SettingsError as error:
        yield fail("placement", str(error), "`streamrl config explain placement` lists what can be set")
        return
    yield ok("placement", "; ".join(lines))


def check_codecs(used: str) -> Iterator[Finding]:
    """Check every codec that a record may be compressed with. ``used``: the codec that this run writes with."""
    problems = {codec: problem for codec in CODECS if (problem := codec_problem(codec)) is not None}
    if not problems:
        yield ok("codecs", f"{', '.join(CODECS)} compress and decompress; kafka.compression_type is {used}")
    for codec, problem in problems.items():
        # Only a warning for the other codecs: this run does not write them, but another program may.
        problem_level = fail if codec == used else warn
        yield problem_level(
            "codecs", f"{codec}: {problem}", "install aiokafka's codecs again: pip install --force-reinstall cramjam"
        )


def check_disk(places: dict[str, Path]) -> Iterator[Finding]:
    """Check disk space and write access. ``places``: directories by the name of their content; they may not exist."""
    for name, place in places.items():
        # The disk of a folder that does not exist yet is that of its nearest parent.
        folder = next(each for each in (place.absolute(), *place.absolute().parents) if each.exists())
        free = shutil.disk_usage(folder).free
        detail = f"{free / GIB:.1f} GiB free for {name} at {place}"
        if not os.access(folder, os.W_OK):
            yield fail(
                "disk", f"{folder} is not writable, but {name} would be there", "change its owner, or set run.directory"
            )
        elif free < LEAST_BYTES:
            yield fail("disk", detail, "free some space, or set run.directory to another disk")
        elif free < LOW_BYTES:
            yield warn(
                "disk", detail, "lower training.keep_checkpoints and training.keep_weight_versions, or free some space"
            )
        else:
            yield ok("disk", detail)


def start_engine_probe(engine: str) -> "subprocess.Popen[str]":
    """Start a process that imports the engine's libraries, which may take a while; see ``check_engine``."""
    # In a process of its own: an import that crashes ends only that process, and nothing stays loaded.
    command = [sys.executable, "-c", _PROBE, *ENGINE_LIBRARIES.get(engine, ())]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def check_engine(engine: str, probe: "subprocess.Popen[str]") -> Iterator[Finding]:
    """Check whether the engine can be imported, and which GPUs it would have."""
    try:
        output, errors = probe.communicate(timeout=IMPORT_S)
    except subprocess.TimeoutExpired:
        probe.kill()
        output, errors = "", f"not imported within {IMPORT_S:.0f} s"
        # Again after the kill, to reap the process and close its pipes.
        probe.communicate()
    lines = output.splitlines()
    if probe.returncode != 0 or not lines:
        last = (errors.strip().splitlines() or ["its import ended without an error message"])[-1]
        remedy = "run `make setup-vllm` and use .venv-vllm" if engine == "vllm" else "run `make setup` again"
        yield fail("engine", f"{engine}: {last}", f"{remedy}, or set generation.engine")
        return
    # The last line is ours. Libraries may print others during their import.
    found: dict[str, Any] = json.loads(lines[-1])
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    yield ok("engine", f"{engine}: {versions or 'needs no library'}")
    yield from _gpus(engine, found["gpus"])


def _gpus(engine: str, gpus: list[tuple[str, int, int]]) -> Iterator[Finding]:
    for name, free, total in gpus:
        yield ok("gpu", f"{name}, {free / GIB:.1f} of {total / GIB:.1f} GiB free")
    if gpus and engine == "transformers":
        yield warn("gpu", "generation.engine = transformers is slow on GPUs", "set generation.engine to vllm")
    if gpus or engine == "emulated":
        return
    if shutil.which("nvidia-smi"):
        yield warn("gpu", "there is a driver, but torch sees no GPU", "install the torch build for this CUDA version")
    elif engine == "vllm":
        yield warn("gpu", "none", "vLLM will sample on the CPU, slowly; or set generation.engine to transformers")
    else:
        yield ok("gpu", "none; generation and training run on the CPU")
