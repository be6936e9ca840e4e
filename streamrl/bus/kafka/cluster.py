"""What a cluster says of itself: brokers, topics, settings, committed offsets, offsets by time. Changes nothing.

For diagnostics and displays: joins no group, commits nothing, and creates no topic by asking for it.
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
from streamrl.bus.kafka.connection import client_options, discard, our_errors, started
from streamrl.bus.kafka.publisher import append, new_builder
from streamrl.bus.kafka.records import SafeRecords
from streamrl.bus.kafka.settings import KafkaSettings
from streamrl.bus.kafka.subscription import ConsumerFactory
from streamrl.bus.port import Outgoing, TopicPartition

CLIENT_ID = "streamrl-look"
LIST_EVERY_S = 30.0
"""Between two looks for groups that are new; those that are known are asked each time."""
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
    """One topic: partitions, the fewest copies that one of them has, how many have no leader, and its settings."""

    partitions: int
    replicas: int
    leaderless: int
    configs: dict[str, str | None] = field(default_factory=dict)


@dataclass(frozen=True)
class ClusterFacts:
    """``brokers``: addresses by node id; ``configs``: settings of one of them; ``release``: None if it is not told."""

    brokers: dict[int, str]
    configs: dict[str, str | None]
    release: str | None
    topics: dict[str, TopicFacts]

    def number(self, name: str) -> int | None:
        """A broker setting that is a number; none if it is not set or not shown to us."""
        text = self.configs.get(name)
        return int(text) if text is not None and text.lstrip("-").isdigit() else None


async def ask_cluster(settings: KafkaSettings, wanted: Callable[[str], bool]) -> ClusterFacts:
    """What the cluster says of itself, and of the topics whose names are wanted.

    Raises:
        BrokerUnreachable: no broker answers.
        BusError: the broker refuses.
    """
    async with admin_of(settings) as admin:
        brokers = {
            each["node_id"]: f"{each['host']}:{each['port']}" for each in (await admin.describe_cluster())["brokers"]
        }
        # Any of them would do; the lowest is the same one at every look.
        node_id = min(brokers)
        try:
            features = await supported_features(client_of(admin), node_id)
            release = release_at(features.get("metadata.version", 0))
        except (KafkaError, ValueError):
            release = None  # only a nicety: a broker that does not tell is still described
        own = await _configs(admin, ConfigResource(ConfigResourceType.BROKER, str(node_id)))
        return ClusterFacts(brokers, own, release, await _topics(admin, wanted))


async def _topics(admin: AIOKafkaAdminClient, wanted: Callable[[str], bool]) -> dict[str, TopicFacts]:
    # Asking for all topics, because asking for one by name may create it.
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
    """The newest release that we know to have this level of ``metadata.version``, such as ``4.1``.

    None: the broker is older than 3.3, or not Apache Kafka, and does not tell.
    """
    known = [name for first, name in _RELEASES if first <= level]
    return known[-1] if known else None


@asynccontextmanager
async def admin_of(settings: KafkaSettings) -> AsyncIterator[AIOKafkaAdminClient]:
    """A connected admin client; what is asked of it must be answered within the request time-out.

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
    """What is asked of an admin client in this block must be answered within the request time-out.

    Raises:
        BusError: the broker refuses or does not answer.
    """
    with our_errors(f"asking the brokers at {settings.bootstrap_servers}"):
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
        with our_errors(f"reading offsets as {CLIENT_ID}"):
            async with asyncio.timeout(settings.request_timeout_ms / 1000):
                # In milliseconds; negative ones are refused, as they have meanings of their own for Kafka.
                found = await consumer.offsets_for_times(dict.fromkeys(names, max(0, int(moment * 1000))))
                # The ends last, so that none lies before an offset found by time.
                ends = await consumer.end_offsets(names)
    finally:
        await discard(consumer)
    return {TopicPartition(*name): ends[name] if found.get(name) is None else found[name].offset for name in names}


class GroupOffsets:
    """Asked now and then, over one connection: to open one costs the broker more than what is asked."""

    def __init__(self, settings: KafkaSettings, topics: Collection[str]) -> None:
        self._settings = settings
        self._topics = frozenset(topics)
        self._admin: AIOKafkaAdminClient | None = None
        self._groups: list[str] = []
        self._listed_at = 0.0

    async def ask(self) -> dict[str, Offsets]:
        """For each consumer group that committed offsets of these topics: the next offset it wants, by partition.

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
            await self.close()  # the next one to be asked may be another broker
            raise

    async def close(self) -> None:
        """Release; bounded in time; idempotent, and the next question connects anew."""
        admin, self._admin = self._admin, None
        self._groups = []
        if admin is not None:
            await discard(admin)

    async def _asked(self, admin: AIOKafkaAdminClient) -> dict[str, Offsets]:
        now = time.monotonic()
        if listing := not self._groups or now - self._listed_at >= LIST_EVERY_S:
            # All groups of the cluster are asked when it lists them, and between two lists
            # only those with offsets of ours.
            self._groups = sorted(group for group, *_ in await admin.list_consumer_groups())
        asked = {group: await self._offsets(admin, group) for group in self._groups}
        found = {group: offsets for group, offsets in asked.items() if offsets}
        if listing:
            # Only once all have answered: after an error the next question lists anew.
            self._groups, self._listed_at = list(found), now
        return found

    async def _offsets(self, admin: AIOKafkaAdminClient, group: str) -> Offsets:
        """Looks for the group's coordinator each time: aiokafka takes the refusal of a former one for no offsets."""
        return {
            TopicPartition(tp.topic, tp.partition): kept.offset
            for tp, kept in (await admin.list_consumer_group_offsets(group)).items()
            # -1: nothing committed for this partition
            if tp.topic in self._topics and kept.offset >= 0
        }


async def committed_offsets(settings: KafkaSettings, topics: Collection[str]) -> dict[str, Offsets]:
    """Ask once; see ``GroupOffsets.ask``."""
    asked = GroupOffsets(settings, topics)
    try:
        return await asked.ask()
    finally:
        await asked.close()


async def offsets_of_group(settings: KafkaSettings, topic: str, group: str) -> Offsets:
    """The next offset that one group wants, by partition of a topic; none of those of which it committed nothing.

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


# 16 KiB that repeat, so that every codec has something to do.
_SAMPLE = Outgoing("t", bytes(range(256)) * 64, "key", headers=(("name", b"content"),))


def codec_problem(compression_type: str) -> str | None:
    """Whether this machine can compress and decompress so: why not, or None.

    A batch is written and read back as publishers and readers do it.
    """
    try:
        builder = new_builder(1 << 20, compression_type)
        append(builder, _SAMPLE)
        batch = SafeRecords(encoded(builder)).next_batch()
    except (AssertionError, RuntimeError, ImportError) as error:
        return f"{type(error).__name__}: {error}"
    records = [] if batch is None else list(batch)
    if [(each.key, each.value, tuple(each.headers)) for each in records] != [(b"key", _SAMPLE.value, _SAMPLE.headers)]:
        return "what was read back differs from what was written"
    return None
