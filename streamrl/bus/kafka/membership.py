"""Membership of a Kafka consumer group, by aiokafka's group protocol. Reads no record: that is a subscription's part.

Invariants:
- a_share_is_kept_until_the_next_is_known: work in hand survives a rebalance that leaves the partition here;
- nothing_is_fetched_here: every partition is paused as soon as it is assigned.
"""

import asyncio
from collections.abc import Collection, Mapping

from aiokafka import AIOKafkaConsumer
from aiokafka import TopicPartition as KafkaPartition
from aiokafka.abc import ConsumerRebalanceListener

from streamrl.bus.kafka.aiokafka_internals import updates_metadata
from streamrl.bus.kafka.connection import client_options, discard, our_errors, started
from streamrl.bus.kafka.settings import KafkaSettings
from streamrl.bus.port import TopicPartition
from streamrl.schemas.errors import BusError

SESSION_TIMEOUT_MS = 10_000
"""After which the group shares out what a member had that was killed; the broker's least is 6,000."""
HEARTBEAT_INTERVAL_MS = 1_000
"""Also how soon a member hears that the group shares out anew."""


class KafkaGroupMember:
    """``bus.port.GroupMember``. Opened by ``join_group``."""

    def __init__(self, consumer: AIOKafkaConsumer, shares: "_Shares", settings: KafkaSettings, group_id: str) -> None:
        self._consumer = consumer
        self._shares = shares
        self._settings = settings
        self._group_id = group_id
        self._closed = False

    async def partitions(self) -> frozenset[TopicPartition]:
        """Its share at present; see the port.

        Raises:
            BusError: it has left the group, its client broke, or the broker refuses.
        """
        if self._closed:
            raise BusError(f"a member of {self._group_id} that left asks for its share; join again")
        if not updates_metadata(self._consumer):
            # It would look for a new coordinator of the group in vain, and keep a share that others have by now.
            raise BusError(f"a member of {self._group_id} finds no brokers any more: its client broke; join again")
        with our_errors(f"asking for a share of {self._group_id}"):
            # A consumer that never asks for records is taken for stuck, and leaves its group (max_poll_interval_ms).
            await self._consumer.getmany(timeout_ms=0)
        return self._shares.assigned

    async def commit(self, offsets: Mapping[TopicPartition, int]) -> None:
        """Note how far the work is done; see the port.

        Raises:
            BusError: the broker does not take it, or the share is another member's.
        """
        with our_errors(f"committing offsets of {self._group_id}"):
            try:
                async with asyncio.timeout(self._settings.request_timeout_ms / 1000):
                    await self._consumer.commit({KafkaPartition(*tp): offset for tp, offset in offsets.items()})
            # aiokafka refuses what is not assigned to it just now without asking the broker.
            except ValueError as error:
                raise BusError(f"expected offsets of {self._group_id}'s own partitions, got: {error}") from error

    async def close(self) -> None:
        """Leave the group; bounded in time; idempotent."""
        if not self._closed:
            self._closed = True
            await discard(self._consumer)


class _Shares(ConsumerRebalanceListener):  # type: ignore[misc]
    """What the group has given this member last."""

    def __init__(self) -> None:
        self.assigned: frozenset[TopicPartition] = frozenset()
        self.consumer: AIOKafkaConsumer | None = None

    def on_partitions_revoked(self, revoked: Collection[KafkaPartition]) -> None:
        """Nothing yet: the next share may hold them again."""

    def on_partitions_assigned(self, assigned: Collection[KafkaPartition]) -> None:
        """The share of a new round."""
        self.assigned = frozenset(TopicPartition(*tp) for tp in assigned)
        if self.consumer is not None:
            self.consumer.pause(*assigned)


async def join_group(settings: KafkaSettings, topic: str, *, group_id: str, client_id: str) -> KafkaGroupMember:
    """Join; the share comes when the group has met.

    Raises:
        BusUnavailable: no broker answers.
    """
    consumer = AIOKafkaConsumer(
        **client_options(settings, client_id),
        group_id=group_id,
        enable_auto_commit=False,
        # Where it would read from; it never does.
        auto_offset_reset="latest",
        session_timeout_ms=SESSION_TIMEOUT_MS,
        heartbeat_interval_ms=HEARTBEAT_INTERVAL_MS,
    )
    await started(consumer, settings)
    shares = _Shares()
    shares.consumer = consumer
    consumer.subscribe([topic], listener=shares)
    return KafkaGroupMember(consumer, shares, settings, group_id)
