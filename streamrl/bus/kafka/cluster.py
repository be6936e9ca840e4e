"""Reads facts of a cluster: brokers, topics, settings, committed offsets, offsets by time. Changes nothing.

It is for diagnostics and displays. It joins no group, commits nothing, and creates no topic by asking for it.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiokafka import TopicPartition as KafkaPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import KafkaError, for_code

from streamrl.bus.kafka.aiokafka_internals import client_of, encoded, supported_features
from streamrl.bus.kafka.connection import client_options, converting_errors, discard, started
from streamrl.bus.kafka.publisher import append, new_builder
from streamrl.bus.kafka.records import SafeRecords
from streamrl.bus.kafka.settings import KafkaSettings
from streamrl.bus.kafka.subscription import ConsumerFactory
from streamrl.bus.port import Outgoing, TopicPartition

CLIENT_ID = "streamrl-look"
LIST_EVERY_S = 30.0
"""Seconds between two lists of all groups, which find new ones. Known groups are asked each time."""
CODECS = ("none", "gzip", "snappy", "lz4", "zstd")

# The first level of the feature ``metadata.version`` in each release, from Kafka's MetadataVersion.java.
_RELEASES = (
    (1, "3.3"),
    (8, "3.4"),
    (9, "3.5"),
    (12, "3.6"),
    (15, "3.7"),
    (20, "3.8"),
    (21, "3.9"),
    (22, "4.0"),
    (26, "4.1"),
    (28, "4.2"),
    (30, "4.3"),
)

Offsets = dict[TopicPartition, int]


@dataclass(frozen=True)
class TopicFacts:
    """One topic: number of partitions, fewest replicas of a partition, partitions without a leader, and settings."""

    partitions: int
    replicas: int
    leaderless: int
    configs: dict[str, str | None] = field(default_factory=dict)


@dataclass(frozen=True)
class ClusterFacts:
    """``brokers``: addresses by node id; ``configs``: settings of one broker; ``release``: None if it is unknown."""

    brokers: dict[int, str]
    configs: dict[str, str | None]
    release: str | None
    topics: dict[str, TopicFacts]

    def number(self, name: str) -> int | None:
        """A broker setting as a number; None if it is not set, no number, or not shown to this user."""
        text = self.configs.get(name)
        return int(text) if text is not None and text.lstrip("-").isdigit() else None


async def ask_cluster(settings: KafkaSettings, wanted: Callable[[str], bool]) -> ClusterFacts:
    """Facts of the cluster and of the topics whose names are ``wanted``.

    Raises:
        BrokerUnreachable: no broker answers.
        BusError: the broker refuses.
    """
    async with admin_of(settings) as admin:
        brokers = {
            each["node_id"]: f"{each['host']}:{each['port']}" for each in (await admin.describe_cluster())["brokers"]
        }
        # Any broker would do. The lowest id is the same one at every call.
        node_id = min(brokers)
        try:
            features = await supported_features(client_of(admin), node_id)
            release = release_at(features.get("metadata.version", 0))
        except (KafkaError, ValueError):
            release = None  # optional: the other facts are still returned
        own = await _configs(admin, ConfigResource(ConfigResourceType.BROKER, str(node_id)))
        return ClusterFacts(brokers, own, release, await _topics(admin, wanted))


async def _topics(admin: AIOKafkaAdminClient, wanted: Callable[[str], bool]) -> dict[str, TopicFacts]:
    # Asks for all topics, because asking for one by name may create it.
    found = {each["topic"]: each["partitions"] for each in await admin.describe_topics() if wanted(each["topic"])}
    return {
        name: TopicFacts(
            partitions=len(partitions),
            replicas=min((len(each["replicas"]) for each in partitions), default=0),
            leaderless=sum(each["leader"] < 0 for each in partitions),
            configs=await _configs(admin, ConfigResource(ConfigResourceType.TOPIC, name)),
        )
        for name, partitions in sorted(found.items())
    }


async def _configs(admin: AIOKafkaAdminClient, resource: ConfigResource) -> dict[str, str | None]:
    entries = [entry for response in await admin.describe_configs([resource]) for entry in response.resources]
    for code, message, _kind, name, configs, *_ in entries:
        if code:
            raise for_code(code)(f"reading the settings of {name}: {message}")
        return {key: value for key, value, *_ in configs}
    return {}


def release_at(level: int) -> str | None:
    """The newest known release with this level of ``metadata.version``, for example ``4.1``.

    None if the level is unknown: the broker is older than 3.3 or not Apache Kafka.
    """
    known = [name for first, name in _RELEASES if first <= level]
    return known[-1] if known else None


@asynccontextmanager
async def admin_of(settings: KafkaSettings) -> AsyncIterator[AIOKafkaAdminClient]:
    """A connected admin client for one block. The block's requests together must end within the request time-out.

    Raises:
        BrokerUnreachable: no broker answers.
        BusError: the broker refuses.
    """
    admin = await open_admin(settings)
    try:
        async with answered(settings):
            yield admin
    finally:
        await discard(admin)


async def open_admin(settings: KafkaSettings) -> AIOKafkaAdminClient:
    """A connected admin client; the caller discards it.

    Raises:
        BrokerUnreachable: no broker answers.
    """
    return await started(AIOKafkaAdminClient(**client_options(settings, CLIENT_ID)), settings)


@asynccontextmanager
async def answered(settings: KafkaSettings) -> AsyncIterator[None]:
    """Limits the requests in a block to the request time-out together, and converts the library's errors.

    Raises:
        BusError: the broker refuses or does not answer.
    """
    with converting_errors(f"asking the brokers at {settings.bootstrap_servers}"):
        async with asyncio.timeout(settings.request_timeout_ms / 1000):
            yield


async def offsets_since(
    settings: KafkaSettings, partitions: Iterable[TopicPartition], moment: float
) -> dict[TopicPartition, int]:
    """The first offset at or after a moment (seconds since the epoch), by partition; the end if there is none.

    Raises:
        BrokerUnreachable: no broker answers.
        BusError: the broker refuses.
    """
    names = [KafkaPartition(*tp) for tp in partitions]
    if not names:
        return {}
    consumer = await ConsumerFactory(settings, CLIENT_ID, None).open_consumer(TopicPartition(*name) for name in names)
    try:
        with converting_errors(f"reading offsets as {CLIENT_ID}"):
            async with asyncio.timeout(settings.request_timeout_ms / 1000):
                # In milliseconds. Negative ones would be refused, as they have special meanings for Kafka.
                found = await consumer.offsets_for_times(dict.fromkeys(names, max(0, int(moment * 1000))))
                # The ends are read last, so that no end is before an offset found by time.
                ends = await consumer.end_offsets(names)
    finally:
        await discard(consumer)
    return {TopicPartition(*name): ends[name] if found.get(name) is None else found[name].offset for name in names}


class GroupOffsets:
    """Reads committed offsets repeatedly over one connection: opening one costs the broker more than the questions."""

    def __init__(self, settings: KafkaSettings, topics: Collection[str]) -> None:
        self._settings = settings
        self._topics = frozenset(topics)
        self._admin: AIOKafkaAdminClient | None = None
        self._groups: list[str] = []
        self._listed_at = 0.0

    async def ask(self) -> dict[str, Offsets]:
        """The next offset that each consumer group wants, by group and partition; only for groups with commits.

        Raises:
            BrokerUnreachable: no broker answers.
            BusError: the broker refuses.
        """
        if self._admin is None:
            self._admin = await open_admin(self._settings)
        try:
            async with answered(self._settings):
                return await self._asked(self._admin)
        except BaseException:
            await self.close()  # the next call may connect to another broker
            raise

    async def close(self) -> None:
        """Release the connection; bounded in time; idempotent. The next call opens a new one."""
        admin, self._admin = self._admin, None
        self._groups = []
        if admin is not None:
            await discard(admin)

    async def _asked(self, admin: AIOKafkaAdminClient) -> dict[str, Offsets]:
        now = time.monotonic()
        if listing := not self._groups or now - self._listed_at >= LIST_EVERY_S:
            # After a list, all groups of the cluster are asked. Between two lists, only groups with offsets in the
            # topics are asked.
            self._groups = sorted(group for group, *_ in await admin.list_consumer_groups())
        asked = {group: await self._offsets(admin, group) for group in self._groups}
        found = {group: offsets for group, offsets in asked.items() if offsets}
        if listing:
            # Only after all groups have answered: after an error, the next call lists the groups again.
            self._groups, self._listed_at = list(found), now
        return found

    async def _offsets(self, admin: AIOKafkaAdminClient, group: str) -> Offsets:
        """A group's offsets in the topics.

        Each call finds the group's coordinator again: aiokafka would report a former coordinator's refusal as no
        offsets.
        """
        return {
            TopicPartition(tp.topic, tp.partition): kept.offset
            for tp, kept in (await admin.list_consumer_group_offsets(group)).items()
            # -1: nothing committed for this partition
            if tp.topic in self._topics and kept.offset >= 0
        }


async def committed_offsets(settings: KafkaSettings, topics: Collection[str]) -> dict[str, Offsets]:
    """The same as ``GroupOffsets.ask``, over a connection for this call only."""
    asked = GroupOffsets(settings, topics)
    try:
        return await asked.ask()
    finally:
        await asked.close()


async def offsets_of_group(settings: KafkaSettings, topic: str, group: str) -> Offsets:
    """The next offset that one group wants in a topic, by partition. Partitions without a commit are left out.

    Raises:
        BrokerUnreachable: no broker answers.
        BusError: the broker refuses.
    """
    async with admin_of(settings) as admin, answered(settings):
        return {
            TopicPartition(tp.topic, tp.partition): kept.offset
            for tp, kept in (await admin.list_consumer_group_offsets(group)).items()
            if tp.topic == topic and kept.offset >= 0
        }


# 16 KiB of repeating bytes, so that every codec can compress them.
_SAMPLE = Outgoing("t", bytes(range(256)) * 64, "key", headers=(("name", b"content"),))


def codec_problem(compression_type: str) -> str | None:
    """The reason why this machine cannot compress and decompress with a codec; None if it can.

    A batch is written and read back in the same way as in publishers and readers.
    """
    try:
        builder = new_builder(1 << 20, compression_type)
        append(builder, _SAMPLE)
        batch = SafeRecords(encoded(builder)).next_batch()
    except (AssertionError, RuntimeError, ImportError) as error:
        return f"{type(error).__name__}: {error}"
    records = [] if batch is None else list(batch)
    if [(each.key, each.value, tuple(each.headers)) for each in records] != [(b"key", _SAMPLE.value, _SAMPLE.headers)]:
        return "the records read back differ from the records written"
    return None
