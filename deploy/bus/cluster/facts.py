"""Asks a cluster for its brokers, their settings and those of topics. Creates and changes nothing."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import KafkaError, for_code

from deploy.bus.client.stopping import discard
from deploy.bus.cluster.release import release_of
from deploy.bus.connection import client_options, our_errors, started
from deploy.bus.settings import KafkaSettings

CLIENT_ID = "streamrl-look"


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
        node_id = min(brokers)
        try:
            release = await release_of(admin._client, node_id)  # noqa: SLF001
        except (KafkaError, ValueError):
            release = None
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
