"""Checks the broker and a run's topics: reachable, as the catalogue says, with sizes that fit. Changes nothing."""

from collections.abc import Iterator

from deploy.broker.server_properties import HOST
from deploy.bus.client.record_batches import LARGEST_UNCOMPRESSED
from deploy.bus.cluster.facts import ClusterFacts, ask_cluster
from deploy.bus.settings import KafkaSettings
from deploy.bus.topic_admin import Change, diff_topics
from deploy.surveys.attachment import Attachment, runs_of
from deploy.surveys.checkup.findings import Finding, fail, ok, warn
from schemas.errors import BusError
from schemas.wire.topics import CATALOGUE, TRAJECTORIES, Topic

OLDEST_RELEASE = (3, 7)
MIB = 1 << 20
HARMFUL = ("max.message.bytes", "cleanup.policy", "min.insync.replicas")
"""Settings of a topic without which a run loses records or cannot write them."""
LOCAL = (HOST, "localhost", "::1")


async def check_cluster(attachment: Attachment) -> list[Finding]:
    """All about the broker; the first finding says whether there is one."""
    try:
        facts = await ask_cluster(attachment.kafka, lambda name: name.startswith(f"{attachment.run}."))
    except BusError as error:
        return [fail("broker", str(error), "see what the broker logs, or start one with `streamrl kafka up`")]
    findings = [*_broker(facts, attachment.kafka)]
    run = attachment.run
    if not run:
        return [*findings, ok("topics", "no run was named, so no topics were looked at")]
    if not runs_of(facts.topics):
        return [
            *findings,
            ok("topics", f"run {run} has none yet; `streamrl run` or `streamrl topics apply` creates them"),
        ]
    return [*findings, *await _topics(attachment, facts), *_sizes(attachment, facts)]


def _broker(facts: ClusterFacts, kafka: KafkaSettings) -> Iterator[Finding]:
    addresses = ", ".join(facts.brokers.values())
    detail = f"{len(facts.brokers)} at {addresses}, release {facts.release or 'unknown'}"
    if facts.release and tuple(map(int, facts.release.split("."))) < OLDEST_RELEASE:
        yield fail("broker", detail, f"use Apache Kafka {'.'.join(map(str, OLDEST_RELEASE))} or later")
    else:
        yield ok("broker", detail)
    if kafka.security_protocol == "PLAINTEXT" and any(_host(each) not in LOCAL for each in facts.brokers.values()):
        mend = "set kafka.security_protocol to SASL_SSL or SSL, unless the network is trusted"
        yield warn("security", "the connection leaves this machine, neither encrypted nor authenticated", mend)
    if facts.configs.get("auto.create.topics.enable") == "true":
        mend = "set auto.create.topics.enable=false on the brokers"
        yield warn("broker", "it creates topics that are merely asked for, with settings of its own", mend)


def _host(address: str) -> str:
    return address.rpartition(":")[0]


async def _topics(attachment: Attachment, facts: ClusterFacts) -> list[Finding]:
    run, settings = attachment.run, attachment.settings
    trajectories = facts.topics[TRAJECTORIES.full_name(run)]
    partitions = trajectories.partitions if settings is None else settings.loop.trajectory_partitions
    changes = await diff_topics(attachment.address, run, partitions, settings=attachment.kafka)
    mend = f"streamrl topics apply --run {run} --bootstrap-servers {attachment.address} --partitions {partitions}"
    findings = [_differing(change, mend) for change in changes]
    for name, topic in facts.topics.items():
        if topic.leaderless:
            detail = f"{name}: {topic.leaderless} of {topic.partitions} partitions have no leader"
            findings.append(fail("topics", detail, "start the brokers that hold them"))
    alone = [name for name, topic in facts.topics.items() if topic.replicas < min(2, len(facts.brokers))]
    if alone:
        detail = f"{len(alone)} topics have one copy each, on {len(facts.brokers)} brokers"
        findings.append(
            warn("topics", detail, "reassign them with kafka-reassign-partitions, or set kafka.replication_factor")
        )
    return findings or [ok("topics", f"{len(CATALOGUE)} of run {run}, all as the catalogue says")]


def _differing(change: Change, mend: str) -> Finding:
    detail = str(change)
    if change.kind == "conflict":
        return fail("topics", detail, "use another run.name, or the settings that the run was begun with")
    if change.kind in ("create", "add partitions") or change.detail.startswith(HARMFUL):
        return fail("topics", detail, mend)
    return warn("topics", detail, mend)


def _sizes(attachment: Attachment, facts: ClusterFacts) -> Iterator[Finding]:
    """Message ≤ topic ≤ what the broker takes in one request and what readers make of it; batches ≤ topic."""
    kafka, problems = attachment.kafka, []
    request = facts.number("socket.request.max.bytes")
    for topic in CATALOGUE:
        known = facts.topics.get(attachment.name_of(topic))
        if known is not None:
            limit = int(known.configs.get("max.message.bytes") or 0)
            problems += [*_size_problems(topic, limit, request, kafka)]
    yield from problems
    if not problems:
        largest = max(message.MAX_BYTES for topic in CATALOGUE if (message := topic.message) is not None)
        alone = ", larger ones than kafka.max_partition_fetch_bytes one at a time" * (
            kafka.max_partition_fetch_bytes < largest
        )
        yield ok("sizes", f"messages of up to {_mib(largest)} fit writers, topics, broker and readers{alone}")


def _size_problems(topic: Topic, limit: int, request: int | None, kafka: KafkaSettings) -> Iterator[Finding]:
    largest = 0 if topic.message is None else topic.message.MAX_BYTES
    name = topic.name
    if largest > limit:
        detail = f"{name}: a message may have {_mib(largest)}, the topic takes {_mib(limit)}"
        yield fail("sizes", detail, "`streamrl topics apply` sets max.message.bytes")
    if kafka.max_batch_bytes > limit:
        detail = f"{name}: kafka.max_batch_bytes is {_mib(kafka.max_batch_bytes)}, the topic takes {_mib(limit)}"
        yield fail("sizes", detail, "lower kafka.max_batch_bytes, or apply the topics")
    if largest > kafka.max_in_flight_bytes:
        detail = f"{name}: a message may have {_mib(largest)}, a publisher holds {_mib(kafka.max_in_flight_bytes)}"
        yield fail("sizes", detail, "raise kafka.max_in_flight_bytes")
    if request is not None and limit > request:
        detail = f"{name}: the topic takes {_mib(limit)}, a request to the broker {_mib(request)}"
        yield fail("sizes", detail, "raise socket.request.max.bytes on the brokers")
    if limit > LARGEST_UNCOMPRESSED:
        detail = f"{name}: the topic takes {_mib(limit)}, readers refuse batches above {_mib(LARGEST_UNCOMPRESSED)}"
        yield warn("sizes", detail, "lower max.message.bytes of the topic; `streamrl topics apply` does")


def _mib(size: int) -> str:
    return f"{size / MIB:.1f} MiB"
