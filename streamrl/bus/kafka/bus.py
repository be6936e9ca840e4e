"""The bus on a Kafka broker: opens publishers, subscriptions and memberships. Knows neither messages nor topics.

A member of a consumer group uses aiokafka's group protocol and reads no records: a subscription does that. Invariants:
- a_share_is_kept_until_the_next_assignment: work continues through a rebalance that leaves the partition here;
- a_consumer_group_member_fetches_no_records: every partition is paused as soon as it is assigned.
"""

import asyncio
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka import TopicPartition as KafkaPartition
from aiokafka.abc import ConsumerRebalanceListener

from streamrl.bus.kafka.aiokafka_internals import updates_metadata
from streamrl.bus.kafka.cluster import offsets_of_group
from streamrl.bus.kafka.connection import (
    BrokerAvailability,
    client_options,
    converting_errors,
    discard,
    partition_counts,
    started,
)
from streamrl.bus.kafka.limits import LIMITS, ClientLimits
from streamrl.bus.kafka.publisher import KafkaPublisher
from streamrl.bus.kafka.settings import KafkaSettings
from streamrl.bus.kafka.subscription import ConsumerFactory, KafkaSubscription, open_subscription
from streamrl.bus.kafka.transactional import KafkaTransactionalPublisher, open_transactional
from streamrl.bus.port import Start, TopicPartition
from streamrl.schemas.errors import BusError, TopicMissing

SINGLE_FETCH_WAIT_MS = 5
SINGLE_FETCH_BYTES = 1 << 17
"""Most bytes of a fetch from one partition; a larger batch is fetched nevertheless."""
SESSION_TIMEOUT_MS = 10_000
"""Milliseconds after which the group reassigns a killed member's partitions; the broker's minimum is 6,000."""
HEARTBEAT_INTERVAL_MS = 1_000
"""Milliseconds between heartbeats; also the delay until a member learns of a rebalance."""


class KafkaGroupMember:
    """``bus.port.GroupMember``. ``join_group`` opens it."""

    def __init__(self, consumer: AIOKafkaConsumer, shares: "_Shares", settings: KafkaSettings, group_id: str) -> None:
        self._consumer = consumer
        self._shares = shares
        self._settings = settings
        self._group_id = group_id
        self._closed = False

    async def partitions(self) -> frozenset[TopicPartition]:
        """The member's present share; see the port.

        Raises:
            BusError: the member has left the group, its client broke, or the broker refuses.
        """
        if self._closed:
            raise BusError(f"a member that left the group {self._group_id} has no share; join again")
        if not updates_metadata(self._consumer):
            # It could not find a new coordinator of the group, and would keep a share that others have by now.
            raise BusError(f"a member of the group {self._group_id} finds no brokers: its client broke; join again")
        with converting_errors(f"asking for a share of {self._group_id}"):
            # A consumer that never asks for records counts as stuck and leaves its group (max_poll_interval_ms).
            await self._consumer.getmany(timeout_ms=0)
        return self._shares.assigned

    async def commit(self, offsets: Mapping[TopicPartition, int]) -> None:
        """Commit the group's progress; see the port.

        Raises:
            BusError: the broker refuses, or a partition belongs to another member.
        """
        with converting_errors(f"committing offsets of {self._group_id}"):
            try:
                async with asyncio.timeout(self._settings.request_timeout_ms / 1000):
                    await self._consumer.commit({KafkaPartition(*tp): offset for tp, offset in offsets.items()})
            # aiokafka refuses a partition that is not assigned to it now, without asking the broker.
            except ValueError as error:
                raise BusError(f"expected offsets of {self._group_id}'s own partitions, got: {error}") from error

    async def close(self) -> None:
        """Leave the group; bounded in time; idempotent."""
        if not self._closed:
            self._closed = True
            await discard(self._consumer)


class _Shares(ConsumerRebalanceListener):  # type: ignore[misc]
    """The share that the group assigned to this member last."""

    def __init__(self) -> None:
        self.assigned: frozenset[TopicPartition] = frozenset()
        self.consumer: AIOKafkaConsumer | None = None

    def on_partitions_revoked(self, revoked: Collection[KafkaPartition]) -> None:
        """Do nothing yet: the next share may contain them again."""

    def on_partitions_assigned(self, assigned: Collection[KafkaPartition]) -> None:
        """Take the new share, and pause its partitions."""
        self.assigned = frozenset(TopicPartition(*tp) for tp in assigned)
        if self.consumer is not None:
            self.consumer.pause(*assigned)


async def join_group(
    settings: KafkaSettings, topic: str, *, group_id: str, client_id: str, limits: ClientLimits
) -> KafkaGroupMember:
    """Join a group. The member gets its share after the group's rebalance.

    Raises:
        BusUnavailable: no broker answers.
    """
    consumer = AIOKafkaConsumer(
        **client_options(settings, client_id),
        group_id=group_id,
        enable_auto_commit=False,
        # Where reading would start; this consumer never reads.
        auto_offset_reset="latest",
        session_timeout_ms=SESSION_TIMEOUT_MS,
        heartbeat_interval_ms=HEARTBEAT_INTERVAL_MS,
    )
    await started(consumer, settings, limits)
    shares = _Shares()
    shares.consumer = consumer
    consumer.subscribe([topic], listener=shares)
    return KafkaGroupMember(consumer, shares, settings, group_id)


class KafkaBus:
    """``bus.port.Bus`` on the broker that the settings name. It holds no connection itself.

    ``advice``: what a user can do if the broker does not answer. ``prefetch``: subscriptions request more records while
    the caller processes the last ones.
    """

    def __init__(
        self, settings: KafkaSettings, advice: str = "", *, prefetch: bool = True, limits: ClientLimits = LIMITS
    ) -> None:
        self._settings = settings
        self._limits = limits
        self._prefetch = prefetch
        self.availability = BrokerAvailability(settings.bootstrap_servers or "", advice)

    def without_prefetch(self) -> "KafkaBus":
        """The same broker, for displays: a subscription that is paused between two reads sends no requests then."""
        bus = KafkaBus(self._settings, prefetch=False, limits=self._limits)
        bus.availability = self.availability
        return bus

    def for_single_records(self) -> "KafkaBus":
        """The same broker, for reading single records: little is fetched beyond the wanted ones."""
        # There may be no record after the wanted one, and the next request would wait for the answer to that fetch.
        small = replace(
            self._limits, max_partition_fetch_bytes=SINGLE_FETCH_BYTES, fetch_max_wait_ms=SINGLE_FETCH_WAIT_MS
        )
        bus = KafkaBus(self._settings, prefetch=False, limits=small)
        bus.availability = self.availability
        return bus

    async def publisher(self, client_id: str) -> KafkaPublisher:
        """A started publisher, idempotent and in order per partition.

        Raises:
            BusUnavailable: no broker answers.
        """

        async def connect() -> AIOKafkaProducer:
            return await started(self._producer(client_id), self._settings, self._limits)

        return KafkaPublisher(await connect(), connect, self._settings, client_id, self._limits)

    async def transactional(self, transactional_id: str) -> KafkaTransactionalPublisher:
        """A started transactional publisher; every older holder of the id is fenced.

        Raises:
            BusUnavailable: no broker answers.
        """

        def make() -> AIOKafkaProducer:
            return self._producer(
                transactional_id,
                transactional_id=transactional_id,
                transaction_timeout_ms=round(1000 * self._limits.transaction_timeout_s),
            )

        return await open_transactional(make, self._settings, transactional_id, self._limits)

    def _producer(self, client_id: str, **also: Any) -> AIOKafkaProducer:
        settings = self._settings
        return AIOKafkaProducer(
            **also,
            **client_options(settings, client_id),
            # A batch sent again after a lost answer is stored once, and in order; it needs acks="all".
            enable_idempotence=True,
            acks="all",
            compression_type=None if settings.compression_type == "none" else settings.compression_type,
            max_batch_size=self._limits.max_batch_bytes,
            # The publisher's own queues linger, so aiokafka gets complete batches.
            linger_ms=0,
        )

    async def subscribe(
        self,
        topics: Iterable[str],
        *,
        client_id: str,
        start: Start = "earliest",
        partitions: Iterable[int] | None = None,
        group_id: str | None = None,
    ) -> KafkaSubscription:
        """A started subscription; see the port.

        Raises:
            BusUnavailable: no broker answers, or a topic does not exist.
            DataLossRefused: the broker does not hold a named start offset, or no longer holds it.
        """
        wanted, topics = None if partitions is None else frozenset(partitions), list(topics)
        # Asked over a separate connection, so that a missing topic is reported before a consumer is made.
        counts = await partition_counts(self._settings, client_id, topics, self._limits)
        assigned = [tp for topic in topics for tp in _partitions_of(topic, counts, wanted)]
        if not assigned:
            raise BusError(f"expected partitions to read, got none of {sorted(wanted or ())}")
        factory = ConsumerFactory(self._settings, client_id, group_id, self.availability, self._prefetch, self._limits)
        return await open_subscription(factory, assigned, start, whole=wanted is None)

    async def join(self, topic: str, *, group_id: str, client_id: str) -> KafkaGroupMember:
        """A member of a consumer group; see the port.

        Raises:
            BusUnavailable: no broker answers.
            TopicMissing: the topic does not exist.
        """
        _partitions_of(topic, await partition_counts(self._settings, client_id, [topic], self._limits), None)
        return await join_group(self._settings, topic, group_id=group_id, client_id=client_id, limits=self._limits)

    async def group_offsets(self, topic: str, *, group_id: str) -> dict[TopicPartition, int]:
        """A group's committed offsets in a topic; see the port.

        Raises:
            BusUnavailable: no broker answers.
        """
        return dict(await offsets_of_group(self._settings, topic, group_id))


def _partitions_of(topic: str, counts: dict[str, int], wanted: frozenset[int] | None) -> list[TopicPartition]:
    if topic not in counts:
        raise TopicMissing(
            f"expected an existing topic, got {topic!r}; create it with `streamrl topics apply --run RUN`"
        )
    return [TopicPartition(topic, number) for number in range(counts[topic]) if wanted is None or number in wanted]
