"""Topics for tests that need no catalogue."""

import asyncio

from aiokafka.admin import AIOKafkaAdminClient, NewTopic


async def create_topic(bootstrap_servers: str, name: str, partitions: int) -> None:
    """A topic that takes records of 16 MiB; returns when its partitions have leaders."""
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap_servers)
    await admin.start()
    try:
        configs = {"max.message.bytes": str(17 << 20)}
        await admin.create_topics([NewTopic(name, partitions, 1, topic_configs=configs)])
        while not await _has_leaders(admin, name, partitions):
            await asyncio.sleep(0.02)
    finally:
        await admin.close()


async def _has_leaders(admin: AIOKafkaAdminClient, name: str, partitions: int) -> bool:
    (topic,) = await admin.describe_topics([name])
    return len(topic["partitions"]) == partitions and all(each["leader"] >= 0 for each in topic["partitions"])
