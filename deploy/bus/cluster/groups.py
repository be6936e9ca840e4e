"""Committed offsets of consumer groups, as the broker keeps them. Joins no group and commits nothing."""

from collections.abc import Collection

from deploy.bus.cluster.facts import admin_of
from deploy.bus.settings import KafkaSettings
from schemas.ports.bus import TopicPartition


async def committed_offsets(settings: KafkaSettings, topics: Collection[str]) -> dict[str, dict[TopicPartition, int]]:
    """For each consumer group that committed offsets of these topics: the next offset it wants, by partition.

    Raises:
        BrokerUnreachable: no broker answers.
        BusError: the broker refuses.
    """
    found: dict[str, dict[TopicPartition, int]] = {}
    async with admin_of(settings) as admin:
        for group_id, *_ in sorted(await admin.list_consumer_groups()):
            offsets = {
                TopicPartition(tp.topic, tp.partition): kept.offset
                for tp, kept in (await admin.list_consumer_group_offsets(group_id)).items()
                if tp.topic in topics and kept.offset >= 0
            }
            if offsets:
                found[group_id] = offsets
    return found
