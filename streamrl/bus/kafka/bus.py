"""The bus on a Kafka broker: opens publishers and subscriptions. Knows neither messages nor our topics."""

from collections.abc import Iterable
from typing import Any

from aiokafka import AIOKafkaProducer

from streamrl.bus.kafka.cluster import offsets_of_group
from streamrl.bus.kafka.connection import BrokerAvailability, client_options, partition_counts, started
from streamrl.bus.kafka.membership import KafkaGroupMember, join_group
from streamrl.bus.kafka.publisher import KafkaPublisher
from streamrl.bus.kafka.settings import KafkaSettings
from streamrl.bus.kafka.subscription import ConsumerFactory, KafkaSubscription, open_subscription
from streamrl.bus.kafka.transactional import KafkaTransactionalPublisher, open_transactional
from streamrl.bus.port import Start, TopicPartition
from streamrl.schemas.errors import BusError, TopicMissing

SINGLE_FETCH_WAIT_MS = 5
SINGLE_FETCH_BYTES = 1 << 17
"""Of a partition; a batch that is larger is fetched all the same."""


class KafkaBus:
    """``bus.port.Bus`` on the broker that the settings name; holds no connection itself.

    ``advice``: what a user can do when the broker does not answer. ``prefetch``: subscriptions ask for more while the
    last records are dealt with.
    """

    def __init__(self, settings: KafkaSettings, advice: str = "", *, prefetch: bool = True) -> None:
        self._settings = settings
        self._prefetch = prefetch
        self.availability = BrokerAvailability(settings.bootstrap_servers or "", advice)

    def without_prefetch(self) -> "KafkaBus":
        """The same broker, for displays: a subscription that is paused between two reads asks nothing meanwhile."""
        bus = KafkaBus(self._settings, prefetch=False)
        bus.availability = self.availability
        return bus

    def for_single_records(self) -> "KafkaBus":
        """The same broker, for who asks for a record here and there: little is fetched beyond what was asked for."""
        # Behind the record that was asked for there may be none, and the next question would wait for that answer.
        update = {"max_partition_fetch_bytes": SINGLE_FETCH_BYTES, "fetch_max_wait_ms": SINGLE_FETCH_WAIT_MS}
        small = self._settings.model_copy(update=update)
        bus = KafkaBus(small, prefetch=False)
        bus.availability = self.availability
        return bus

    async def publisher(self, client_id: str) -> KafkaPublisher:
        """A started publisher, idempotent and in order per partition.

        Raises:
            BusUnavailable: no broker answers.
        """

        async def connect() -> AIOKafkaProducer:
            return await started(self._producer(client_id), self._settings)

        return KafkaPublisher(await connect(), connect, self._settings, client_id)

    async def transactional(self, transactional_id: str) -> KafkaTransactionalPublisher:
        """A started transactional publisher; every older holder of the id is fenced.

        Raises:
            BusUnavailable: no broker answers.
        """

        def make() -> AIOKafkaProducer:
            return self._producer(
                transactional_id,
                transactional_id=transactional_id,
                transaction_timeout_ms=self._settings.transaction_timeout_ms,
            )

        return await open_transactional(make, self._settings, transactional_id)

    def _producer(self, client_id: str, **also: Any) -> AIOKafkaProducer:
        settings = self._settings
        return AIOKafkaProducer(
            **also,
            **client_options(settings, client_id),
            # A batch sent again after a lost answer is stored once, and in order; it needs acks="all".
            enable_idempotence=True,
            acks="all",
            compression_type=None if settings.compression_type == "none" else settings.compression_type,
            max_batch_size=settings.max_batch_bytes,
            # Our own queues linger; what reaches aiokafka is a whole batch.
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
            DataLossRefused: a named start offset is not on the broker (any more).
        """
        wanted, topics = None if partitions is None else frozenset(partitions), list(topics)
        # Asked over a connection of its own, so that a missing topic is told before a consumer is made.
        counts = await partition_counts(self._settings, client_id, topics)
        assigned = [tp for topic in topics for tp in _partitions_of(topic, counts, wanted)]
        if not assigned:
            raise BusError(f"expected partitions to read, got none of {sorted(wanted or ())}")
        factory = ConsumerFactory(self._settings, client_id, group_id, self.availability, self._prefetch)
        return await open_subscription(factory, assigned, start, whole=wanted is None)

    async def join(self, topic: str, *, group_id: str, client_id: str) -> KafkaGroupMember:
        """A member of a consumer group; see the port.

        Raises:
            BusUnavailable: no broker answers.
            TopicMissing: there is no such topic.
        """
        _partitions_of(topic, await partition_counts(self._settings, client_id, [topic]), None)
        return await join_group(self._settings, topic, group_id=group_id, client_id=client_id)

    async def group_offsets(self, topic: str, *, group_id: str) -> dict[TopicPartition, int]:
        """How far a group has come; see the port.

        Raises:
            BusUnavailable: no broker answers.
        """
        return dict(await offsets_of_group(self._settings, topic, group_id))


def _partitions_of(topic: str, counts: dict[str, int], wanted: frozenset[int] | None) -> list[TopicPartition]:
    if topic not in counts:
        raise TopicMissing(f"expected an existing topic, got {topic!r}; create it with `streamrl topics apply`")
    return [TopicPartition(topic, number) for number in range(counts[topic]) if wanted is None or number in wanted]
