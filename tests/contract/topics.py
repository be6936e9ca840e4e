"""Topics for tests that need no catalogue."""

import asyncio

from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import TopicAlreadyExistsError

from tests.broker_fixture import unique_numbers
from tests.progress import patience

_numbers = unique_numbers()


async def create_topic(bootstrap_servers: str, name: str, partitions: int) -> None:
    """A topic that takes records of 16 MiB; returns when its partitions have leaders."""
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap_servers)
    await admin.start()
    try:
        wanted = NewTopic(name, partitions, 1, topic_configs={"max.message.bytes": str(17 << 20)})
        async with patience(60):
            # A node that was stopped and goes on is fenced for a moment, and takes no topics then.
            while await _refusal(admin, wanted):
                await asyncio.sleep(0.1)
            while not await _has_leaders(admin, name, partitions):
                await asyncio.sleep(0.02)
    finally:
        await admin.close()


async def new_topic(bootstrap_servers: str, purpose: str, partitions: int = 1) -> str:
    """The name of a topic that no other test has."""
    name = f"{purpose}-{next(_numbers)}"
    await create_topic(bootstrap_servers, name, partitions)
    return name


async def set_configs(bootstrap_servers: str, topic: str, configs: dict[str, str]) -> None:
    """Change settings of a topic."""
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap_servers)
    await admin.start()
    await admin.alter_configs([ConfigResource(ConfigResourceType.TOPIC, topic, configs=configs)])
    await admin.close()


async def _refusal(admin: AIOKafkaAdminClient, topic: NewTopic) -> int:
    """Kafka's error code; 0 if the topic is there."""
    answer = await admin.create_topics([topic])
    (code,) = (code for _, code, *_ in answer.topic_errors)
    return 0 if code == TopicAlreadyExistsError.errno else int(code)


async def _has_leaders(admin: AIOKafkaAdminClient, name: str, partitions: int) -> bool:
    (topic,) = await admin.describe_topics([name])
    return len(topic["partitions"]) == partitions and all(each["leader"] >= 0 for each in topic["partitions"])
