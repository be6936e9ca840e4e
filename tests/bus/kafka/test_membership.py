"""What a member of a consumer group makes of what the group tells it; the group itself is in ``tests/contract``."""

import asyncio
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer
from aiokafka import TopicPartition as KafkaPartition

from streamrl.bus.kafka.aiokafka_internals import updates_metadata
from streamrl.bus.kafka.bus import KafkaGroupMember, _Shares
from streamrl.bus.kafka.settings import KafkaSettings
from streamrl.bus.port import TopicPartition
from streamrl.schemas.errors import BusError

FIRST, SECOND = KafkaPartition("t", 0), KafkaPartition("t", 1)


class Paused:
    """The consumer of a member."""

    def __init__(self) -> None:
        self.partitions: list[KafkaPartition] = []

    def pause(self, *partitions: KafkaPartition) -> None:
        self.partitions += partitions


def test_a_share_is_kept_until_the_next_assignment() -> None:
    shares = _Shares()
    shares.on_partitions_assigned([FIRST, SECOND])
    shares.on_partitions_revoked([FIRST, SECOND])
    assert shares.assigned == {TopicPartition("t", 0), TopicPartition("t", 1)}
    shares.on_partitions_assigned([SECOND])
    assert shares.assigned == {TopicPartition("t", 1)}


def test_a_consumer_group_member_fetches_no_records() -> None:
    shares, consumer = _Shares(), Paused()
    told: Any = consumer
    shares.consumer = told
    shares.on_partitions_assigned([FIRST])
    shares.on_partitions_assigned([FIRST, SECOND])
    assert consumer.partitions == [FIRST, FIRST, SECOND]


async def test_a_member_whose_client_broke_asks_for_no_share() -> None:
    consumer = AIOKafkaConsumer()
    consumer._client._sync_task = updating = asyncio.create_task(asyncio.sleep(60))
    member = KafkaGroupMember(consumer, _Shares(), KafkaSettings(), "graders")
    assert updates_metadata(consumer)
    updating.cancel()
    await asyncio.wait({updating})
    with pytest.raises(BusError, match="join again"):
        await member.partitions()
    consumer._closed = True  # or it would complain that nobody stopped it
