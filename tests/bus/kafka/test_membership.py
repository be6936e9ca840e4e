"""What a member of a consumer group makes of what the group tells it; the group itself is in ``tests/contract``."""

from typing import Any

from aiokafka import TopicPartition as KafkaPartition

from bus.kafka.membership import _Shares
from bus.port import TopicPartition

FIRST, SECOND = KafkaPartition("t", 0), KafkaPartition("t", 1)


class Paused:
    """The consumer of a member."""

    def __init__(self) -> None:
        self.partitions: list[KafkaPartition] = []

    def pause(self, *partitions: KafkaPartition) -> None:
        self.partitions += partitions


def test_a_share_is_kept_until_the_next_is_known() -> None:
    shares = _Shares()
    shares.on_partitions_assigned([FIRST, SECOND])
    shares.on_partitions_revoked([FIRST, SECOND])
    assert shares.assigned == {TopicPartition("t", 0), TopicPartition("t", 1)}
    shares.on_partitions_assigned([SECOND])
    assert shares.assigned == {TopicPartition("t", 1)}


def test_nothing_is_fetched_here() -> None:
    shares, consumer = _Shares(), Paused()
    told: Any = consumer
    shares.consumer = told
    shares.on_partitions_assigned([FIRST])
    shares.on_partitions_assigned([FIRST, SECOND])
    assert consumer.partitions == [FIRST, FIRST, SECOND]
