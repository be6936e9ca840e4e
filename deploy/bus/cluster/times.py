"""Offsets by time: where a reader begins that wants the records since a moment."""

import asyncio
from collections.abc import Iterable

from aiokafka import TopicPartition as KafkaPartition

from deploy.bus.client.stopping import discard
from deploy.bus.cluster.facts import CLIENT_ID
from deploy.bus.connection import our_errors
from deploy.bus.consumers import Reader
from deploy.bus.settings import KafkaSettings
from schemas.ports.bus import TopicPartition


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
    consumer = await Reader(settings, CLIENT_ID, None).assigned(TopicPartition(*name) for name in names)
    try:
        with our_errors(f"reading offsets as {CLIENT_ID}"):
            async with asyncio.timeout(settings.request_timeout_ms / 1000):
                found = await consumer.offsets_for_times(dict.fromkeys(names, max(0, int(moment * 1000))))
                ends = await consumer.end_offsets(names)
    finally:
        await discard(consumer)
    return {TopicPartition(*name): ends[name] if found.get(name) is None else found[name].offset for name in names}
