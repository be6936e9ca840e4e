"""Reads assigned partitions of a Kafka broker. It decodes nothing, so that no record's content can stop the reading.

Invariants:
- this module sets positions before the first read; a committed offset never does;
- a read that is cancelled loses no record;
- a consumer that stops reading while there are records to read is replaced by a new one; if that does not help, reading
  ends with an error.

A role holds a ``KafkaSubscription``. ``ConsumerFactory`` makes the aiokafka consumer in it, ``ConsumerWatchdog``
decides when to replace the consumer, and ``StallDetector`` is the rule for that.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import structlog
from aiokafka import AIOKafkaConsumer
from aiokafka import TopicPartition as KafkaPartition
from aiokafka.errors import CorruptRecordException, OffsetOutOfRangeError
from aiokafka.structs import ConsumerRecord

from streamrl.bus.kafka.aiokafka_internals import client_of, let_fetcher_request, replace_record_reader
from streamrl.bus.kafka.connection import (
    BrokerAvailability,
    client_options,
    converting_errors,
    discard,
    partitions_seen_by,
    started,
)
from streamrl.bus.kafka.limits import LIMITS, ClientLimits
from streamrl.bus.kafka.records import SafeRecords
from streamrl.bus.kafka.settings import KafkaSettings
from streamrl.bus.port import Record, Start, TopicPartition
from streamrl.schemas.errors import BusError, BusUnavailable, DataLossRefused

Positions = Mapping[TopicPartition, int]
AskOffsets = Callable[[list[KafkaPartition]], Awaitable[dict[KafkaPartition, int]]]

# Even if nothing happened, aiokafka's fetcher wakes at this interval and asks the broker for records. The default of
# 200 ms suits a role that reads without a pause. A reader that pauses its partitions between two reads
# (``prefetch=False``) would only load the broker with such requests.
FETCHER_WAKES_MS = 200
FETCHER_WAKES_WITHOUT_PREFETCH_MS = 10_000

# Consecutive questions of a consumer without an answer, while the broker answers other clients. aiokafka's metadata
# task can die unnoticed. A call that waits for it then never returns, while records still arrive. Two, because a
# restarting broker may lose one answer.
MAX_UNANSWERED_QUESTIONS = 2

log = structlog.get_logger()


class KafkaSubscription:
    """``bus.port.Subscription``. ``open_subscription`` opens it; ``whole``: it reads all partitions of its topics."""

    def __init__(
        self, factory: "ConsumerFactory", consumer: AIOKafkaConsumer, positions: Positions, *, whole: bool
    ) -> None:
        self._factory = factory
        self._assigned = frozenset(positions)
        self._paused: set[TopicPartition] = set()
        self._watchdog = ConsumerWatchdog(factory, self._assigned, whole=whole)
        self._closed = False
        self._read_with(consumer, positions)

    def _read_with(self, consumer: AIOKafkaConsumer, positions: Positions) -> None:
        self._next = dict(positions)  # the offset of the next record to deliver, by partition
        self._seek_to_next(consumer)  # before it resumes, because a new consumer would read from offset 0
        consumer.resume(*(KafkaPartition(*tp) for tp in self._assigned - self._paused))
        self._consumer = consumer

    def _seek_to_next(self, consumer: AIOKafkaConsumer) -> None:
        for tp, offset in self._next.items():
            consumer.seek(KafkaPartition(*tp), offset)

    def _open_consumer(self) -> AIOKafkaConsumer:
        if self._closed:
            raise BusError(f"subscription {self._factory.client_id} is closed; open a new one")
        return self._consumer

    async def poll(self, *, max_records: int = 500, timeout_s: float = 1.0) -> list[Record]:
        """The next records; an empty list after the time-out. Paused partitions deliver nothing.

        Raises:
            DataLossRefused: the broker does not hold the next offset, or no longer holds it; lists the missing offsets.
            BusError: the subscription is closed, the broker refuses, or this reader is stuck for good.
        """
        self._open_consumer()
        if self._watchdog.is_due():
            await self._replace_if_stuck(self._consumer)
        consumer = self._consumer  # read here, because it may just have been replaced
        await asyncio.sleep(0)  # otherwise a caller that polls without waiting would keep the event loop from reading
        with converting_errors(f"reading as {self._factory.client_id}"):
            fetched = await self._fetch(consumer, max_records, timeout_s)
        # This may be cancelled, so the positions move only after it. There is no await from there to the return.
        if fetched and self._factory.prefetch:
            await self._let_it_prefetch(consumer)
        records = []
        for tp, batch in fetched.items():
            records += _records(tp, batch)
            self._next[TopicPartition(*tp)] = records[-1].offset + 1  # reading continues here after an error
        return records

    async def _fetch(
        self, consumer: AIOKafkaConsumer, max_records: int, timeout_s: float
    ) -> dict[KafkaPartition, list[ConsumerRecord]]:
        """The consumer's next records. After an error, reading continues after the last delivery, so none is lost."""
        try:
            fetched: dict[KafkaPartition, list[ConsumerRecord]] = await consumer.getmany(
                timeout_ms=int(timeout_s * 1000), max_records=max_records
            )
        except CorruptRecordException as error:
            log.warning("damaged bytes are fetched again", client_id=self._factory.client_id, error=str(error))
            self._seek_to_next(consumer)
            return {}
        except OffsetOutOfRangeError:
            self._seek_to_next(consumer)
            refuse_holes(self._next, *await self._factory.first_and_end_offsets(consumer, self._assigned))
            raise  # the log has changed again, and holds the offset now
        except Exception:
            self._seek_to_next(consumer)  # aiokafka has dropped the records that it took from other partitions
            raise
        return fetched

    async def _let_it_prefetch(self, consumer: AIOKafkaConsumer) -> None:
        """Let the consumer request more records now, because the caller's decoding keeps the event loop busy next."""
        try:
            await let_fetcher_request()
        except asyncio.CancelledError:
            self._seek_to_next(consumer)  # the records just taken are not delivered
            raise

    async def _replace_if_stuck(self, consumer: AIOKafkaConsumer) -> None:
        positions = await self.positions()
        stuck = self._watchdog.stuck_partitions(consumer, positions, self._paused)
        if not stuck:
            return
        log.warning("replacing a consumer that stopped reading", client_id=self._factory.client_id, stuck=stuck)
        asked_at = time.monotonic()
        try:
            # Opened before the old one is discarded: if no broker answers, the old one stays in use.
            fresh = await self._factory.open_consumer(self._assigned)
        except BusUnavailable as error:
            self._factory.availability.report_silence(self._factory.client_id, error, asked_at)
            return
        self._read_with(fresh, positions)
        self._watchdog.consumer_replaced(stuck)
        await discard(consumer)

    def pause(self, partitions: Iterable[TopicPartition]) -> None:
        """Stop delivering from these partitions."""
        wanted = self._assigned.intersection(partitions)  # aiokafka raises on others
        self._paused |= wanted
        self._open_consumer().pause(*(KafkaPartition(*tp) for tp in wanted))

    def resume(self, partitions: Iterable[TopicPartition]) -> None:
        """Deliver from these partitions again."""
        wanted = self._assigned.intersection(partitions)
        self._paused -= wanted
        self._open_consumer().resume(*(KafkaPartition(*tp) for tp in wanted))

    def partitions(self) -> frozenset[TopicPartition]:
        """The partitions this subscription reads."""
        return self._assigned

    def seek(self, offsets: Mapping[TopicPartition, int]) -> None:
        """Deliver from these offsets next. Other partitions keep their positions."""
        self._next |= offsets
        # Only these partitions: a seek takes time and drops the records already fetched from its partition.
        for tp in self._assigned.intersection(offsets):
            self._open_consumer().seek(KafkaPartition(*tp), offsets[tp])

    async def positions(self, partitions: Iterable[TopicPartition] | None = None) -> dict[TopicPartition, int]:
        """The next offset that ``poll`` will deliver, by partition; see the port."""
        consumer = self._open_consumer()
        return {tp: await consumer.position(KafkaPartition(*tp)) for tp in self._asked(partitions)}

    async def end_offsets(self, partitions: Iterable[TopicPartition] | None = None) -> dict[TopicPartition, int]:
        """The offset after the last record, by partition; see the port.

        Raises:
            BusUnavailable: no broker answers.
        """
        return await self._factory.offsets(self._open_consumer().end_offsets, self._asked(partitions))

    async def beginning_offsets(self, partitions: Iterable[TopicPartition] | None = None) -> dict[TopicPartition, int]:
        """The oldest offset that the broker still holds, by partition; see the port.

        Raises:
            BusUnavailable: no broker answers.
        """
        return await self._factory.offsets(self._open_consumer().beginning_offsets, self._asked(partitions))

    def _asked(self, partitions: Iterable[TopicPartition] | None) -> frozenset[TopicPartition]:
        return self._assigned if partitions is None else self._assigned.intersection(partitions)

    async def commit(self, offsets: Mapping[TopicPartition, int]) -> None:
        """Commit offsets to the broker, for lag displays only; see the port.

        Raises:
            BusError: the broker refuses or does not answer.
        """
        assert self._factory.group_id is not None, "commit needs a subscription with a group_id"
        if not offsets:
            return
        with converting_errors(f"committing offsets of {self._factory.group_id}"):
            async with asyncio.timeout(self._factory.settings.request_timeout_ms / 1000):
                await self._open_consumer().commit({KafkaPartition(*tp): offset for tp, offset in offsets.items()})

    async def close(self) -> None:
        """Release resources; bounded in time; idempotent."""
        if not self._closed:
            self._closed = True
            await self._watchdog.close()
            await discard(self._consumer)


def _records(tp: KafkaPartition, batch: Iterable[ConsumerRecord]) -> list[Record]:
    return [
        Record(
            tp.topic,
            tp.partition,
            raw.offset,
            None if raw.key is None else raw.key.decode(errors="replace"),
            raw.value,
            raw.headers,
            raw.timestamp / 1000,
        )
        for raw in batch
    ]


async def open_subscription(
    factory: "ConsumerFactory", assigned: Iterable[TopicPartition], start: Start, *, whole: bool
) -> KafkaSubscription:
    """A subscription whose start positions are fixed when this returns.

    Raises:
        BusUnavailable: no broker answers.
        DataLossRefused: the broker does not hold named start offsets, or no longer; lists the missing offsets.
    """
    partitions = tuple(assigned)
    consumer = await factory.open_consumer(partitions)
    try:
        positions = starting_positions(start, *await factory.first_and_end_offsets(consumer, partitions))
        return KafkaSubscription(factory, consumer, positions, whole=whole)
    except BaseException:
        await discard(consumer)
        raise


def starting_positions(start: Start, first: Positions, end: Positions) -> Positions:
    """The positions at which reading starts. ``first`` and ``end``: the oldest offsets held, and those after the last.

    Raises:
        DataLossRefused: the broker does not hold named offsets, or no longer; lists every one.
    """
    if start == "earliest":
        return first
    if start == "latest":
        return end
    positions = {tp: start.get(tp, oldest) for tp, oldest in first.items()}
    refuse_holes(positions, first, end)
    return positions


def refuse_holes(positions: Positions, first: Positions, end: Positions) -> None:
    """Refuse positions that the broker does not hold.

    Raises:
        DataLossRefused: lists the missing offsets. They are those from the position to the oldest offset held. If the
            log ends before the position, they are those from the end to the position; they were on another broker, or
            in a topic that was deleted and recreated.
    """
    holes, descriptions = [], []
    for tp, position in sorted(positions.items()):
        if not first[tp] <= position <= end[tp]:
            hole = (position, first[tp]) if position < first[tp] else (end[tp], position)
            holes.append((*tp, *hole))
            descriptions.append(
                f"offset {position} of {tp.topic}/{tp.partition}, but the broker holds {first[tp]} to {end[tp]}"
            )
    if holes:
        raise DataLossRefused(
            f"expected to continue at {'; '.join(descriptions)}: retention deleted records before they were read, or "
            "the topic was deleted and recreated, or this is not the broker that they were written to",
            holes,
        )


@dataclass(frozen=True, slots=True)
class ConsumerFactory:
    """Makes the consumers of one subscription, and asks the broker for offsets. It reads no records.

    ``prefetch``: a consumer requests more records while the caller processes the last ones.
    """

    settings: KafkaSettings
    client_id: str
    group_id: str | None
    availability: BrokerAvailability = field(default_factory=BrokerAvailability)
    prefetch: bool = True
    limits: ClientLimits = LIMITS

    async def open_consumer(self, partitions: Iterable[TopicPartition]) -> AIOKafkaConsumer:
        """A started consumer of these partitions, all paused at offset 0 so that it reads nothing yet."""
        limits = self.limits
        replace_record_reader(SafeRecords)
        consumer = AIOKafkaConsumer(
            **client_options(self.settings, self.client_id),
            group_id=self.group_id,
            enable_auto_commit=False,  # the checkpoint decides where reading continues; a commit is for lag displays
            auto_offset_reset="none",  # a missing offset is an error, never a silent jump
            isolation_level="read_committed",  # no records of aborted or open transactions
            fetch_max_wait_ms=limits.fetch_max_wait_ms,
            consumer_timeout_ms=FETCHER_WAKES_MS if self.prefetch else FETCHER_WAKES_WITHOUT_PREFETCH_MS,
            fetch_max_bytes=limits.fetch_max_bytes,
            max_partition_fetch_bytes=limits.max_partition_fetch_bytes,
        )
        await started(consumer, self.settings, limits)
        names = [KafkaPartition(*tp) for tp in partitions]
        consumer.assign(names)
        for name in names:
            consumer.seek(name, 0)  # without a position it would look for a committed offset, and raise without one
        consumer.pause(*names)
        return consumer

    async def offsets(self, ask: AskOffsets, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """The answer of ``ask``, a consumer's ``beginning_offsets`` or ``end_offsets``, within the connect time-out."""
        with converting_errors(f"reading offsets as {self.client_id}"):
            async with asyncio.timeout(self.limits.connect_timeout_s):
                found = await ask([KafkaPartition(*tp) for tp in partitions])
        return {TopicPartition(*tp): offset for tp, offset in found.items()}

    async def first_and_end_offsets(
        self, consumer: AIOKafkaConsumer, partitions: Iterable[TopicPartition]
    ) -> tuple[Positions, Positions]:
        """The oldest offsets held and the offsets after the last record, by partition."""
        wanted = tuple(partitions)
        first = await self.offsets(consumer.beginning_offsets, wanted)  # asked before the end, as both only grow
        return first, await self.offsets(consumer.end_offsets, wanted)


class _BrokerAnswer(NamedTuple):
    """Number of partitions of each topic, and ends of the partitions read.

    ``ends`` None: the broker answers, but not to this consumer.
    """

    counts: dict[str, int]
    ends: Positions | None


class ConsumerWatchdog:
    """Asks the broker now and then, during the reading, up to which offset a consumer should have read.

    A consumer has to be replaced if one of its partitions stalls (``StallDetector``), or if it gets no answer to
    ``MAX_UNANSWERED_QUESTIONS`` consecutive questions while the broker answers other clients. Reading ends with an
    error if ``max_client_restarts`` replacements did not help, or if the topics have changed since the start. If the
    broker answers no client at all, nothing is replaced. ``whole``: the subscription reads every partition of its
    topics.
    """

    def __init__(self, factory: ConsumerFactory, partitions: Iterable[TopicPartition], *, whole: bool) -> None:
        self._factory = factory
        self._partitions = tuple(partitions)
        self._whole = whole
        self._timeout_s = factory.limits.stall_timeout_s
        self._detector = StallDetector(self._timeout_s, factory.limits.max_client_restarts)
        self._missing_topics: frozenset[str] = frozenset()
        self._question: asyncio.Task[_BrokerAnswer | None] | None = None
        self._unanswered = 0
        self._due_at = 0.0

    def is_due(self) -> bool:
        """Whether it is time to call ``stuck_partitions``; cheap enough for every poll."""
        return asyncio.get_running_loop().time() >= self._due_at

    def stuck_partitions(
        self, consumer: AIOKafkaConsumer, positions: Positions, paused: Collection[TopicPartition]
    ) -> list[TopicPartition]:
        """The partitions for which this consumer must be replaced. Never waits: a task asks the broker.

        Raises:
            BusError: replacements did not help, a topic was deleted, or a topic has new partitions that are not read.
        """
        now = asyncio.get_running_loop().time()
        # Often enough to see a movement within a quarter of the time-out, after which the broker is asked.
        self._due_at = now + self._timeout_s / 8
        self._detector.observe_positions(now, positions, paused)
        stuck: list[TopicPartition] = []
        if self._question is not None and self._question.done():
            question, self._question = self._question, None
            if (answer := question.result()) is not None:
                stuck = self._stuck_by(answer, now)
                self._refuse_hopeless(stuck, positions)
        if not stuck and self._question is None and self._detector.should_ask(now):
            self._question = asyncio.create_task(self._ask(consumer))
        return stuck

    def _stuck_by(self, answer: _BrokerAnswer, now: float) -> list[TopicPartition]:
        self._refuse_changed_topics(answer.counts)
        if answer.ends is not None:
            self._unanswered = 0
            return self._detector.observe_ends(now, answer.ends)
        self._unanswered += 1
        return list(self._partitions) if self._unanswered >= MAX_UNANSWERED_QUESTIONS else []

    def consumer_replaced(self, stuck: Collection[TopicPartition]) -> None:
        """Note that a new consumer continues from the same positions."""
        self._unanswered = 0
        self._detector.consumer_replaced(asyncio.get_running_loop().time(), stuck)

    async def close(self) -> None:
        """Cancel the question in flight."""
        if self._question is not None:
            self._question.cancel()
            await asyncio.gather(self._question, return_exceptions=True)

    async def _ask(self, consumer: AIOKafkaConsumer) -> _BrokerAnswer | None:
        """The broker's answer; None if it answers no client."""
        factory = self._factory
        asked_at = time.monotonic()
        try:
            counts = await partitions_seen_by(client_of(consumer), factory.settings, limits=factory.limits)
        except BusError as error:
            factory.availability.report_silence(factory.client_id, error, asked_at)
            return None
        factory.availability.report_answer(factory.client_id)
        there = [tp for tp in self._partitions if tp.partition < counts.get(tp.topic, 0)]
        try:
            # A partition that the broker does not know ends at 0 and never stalls: ``_refuse_changed_topics`` finds it.
            ends = dict.fromkeys(self._partitions, 0) | await factory.offsets(consumer.end_offsets, there)
        except BusError as error:
            log.warning("a reader gets no offsets", client_id=factory.client_id, error=str(error))
            return _BrokerAnswer(counts, None)
        return _BrokerAnswer(counts, ends)

    def _refuse_changed_topics(self, counts: dict[str, int]) -> None:
        known: dict[str, int] = {}
        for tp in self._partitions:
            known[tp.topic] = max(known.get(tp.topic, 0), tp.partition + 1)
        missing = frozenset(topic for topic, count in known.items() if counts.get(topic, 0) < count)
        # Missing in two consecutive answers, because a broker that just started may not know a topic yet.
        if deleted := sorted(missing & self._missing_topics):
            raise BusError(f"expected the topics {deleted} to exist, but they were deleted; restart this process")
        self._missing_topics = missing
        for topic, count in known.items():
            if self._whole and counts.get(topic, 0) > count:
                raise BusError(
                    f"expected {count} partitions of {topic}, there are {counts[topic]} now; restart this process to "
                    "read all of them"
                )

    def _refuse_hopeless(self, stuck: list[TopicPartition], positions: Positions) -> None:
        if hopeless := self._detector.beyond_help(stuck):
            where = ", ".join(f"{tp.topic}/{tp.partition} at offset {positions[tp]}" for tp in hopeless)
            raise BusError(
                f"expected a new consumer to read on, but {self._factory.client_id} is still stuck in {where} after "
                f"{self._factory.limits.max_client_restarts} attempts; restart this process and look at the broker's "
                "log"
            )


class StallDetector:
    """Finds the partitions of a reader that stall. Pure: the caller passes the time, in seconds.

    With T = ``timeout_s``, a partition stalls at time t if t - behind_since >= T. ``behind_since`` is the time of the
    broker's first answer, since the position last moved, that the log continues beyond it. So a moving position clears
    only its own partition, a paused partition never stalls, and time before such an answer does not count. The broker
    is asked when a partition was quiet for T/4, and at least every T. ``max_replacements``: consecutive new consumers
    that may fail to move a partition.
    """

    def __init__(self, timeout_s: float, max_replacements: int) -> None:
        self._timeout_s = timeout_s
        self._max_replacements = max_replacements
        self._positions: dict[TopicPartition, int] = {}
        self._quiet_since: dict[TopicPartition, float] = {}  # time of the last movement or answer of the broker
        self._behind_since: dict[TopicPartition, float] = {}
        self._replacements: dict[TopicPartition, int] = {}
        self._answered_at: float | None = None

    def observe_positions(self, now: float, positions: Positions, paused: Collection[TopicPartition]) -> None:
        """Record the reader's positions."""
        for tp, position in positions.items():
            if position != self._positions.get(tp) or tp in paused:  # a resumed partition gets the whole time-out again
                self._positions[tp] = position
                self._quiet_since[tp] = now
                self._behind_since.pop(tp, None)
                if tp not in paused:  # a pause does not prove that a new consumer helped
                    self._replacements.pop(tp, None)

    def should_ask(self, now: float) -> bool:
        """Whether it is time to ask the broker for the ends of the logs."""
        if self._answered_at is None:
            self._answered_at = now  # the time-out runs from the first call, so a short reading asks nothing
        return now - self._answered_at >= self._timeout_s or any(
            now - since >= self._timeout_s / 4 for since in self._quiet_since.values()
        )

    def observe_ends(self, now: float, ends: Positions) -> list[TopicPartition]:
        """Record the broker's answer; returns the partitions that stall."""
        self._answered_at = now
        for tp, position in self._positions.items():
            self._quiet_since[tp] = now
            if ends[tp] > position:
                self._behind_since.setdefault(tp, now)  # the first such answer counts
            else:
                self._behind_since.pop(tp, None)
        return [tp for tp, since in self._behind_since.items() if now - since >= self._timeout_s]

    def consumer_replaced(self, now: float, stuck: Collection[TopicPartition]) -> None:
        """Note that a new consumer continues from the same positions; it gets the whole time-out."""
        for tp in stuck:
            self._replacements[tp] = self._replacements.get(tp, 0) + 1
            self._behind_since[tp] = now

    def beyond_help(self, stuck: Collection[TopicPartition]) -> list[TopicPartition]:
        """Those of the ``stuck`` partitions that no replacement has moved."""
        return [tp for tp in stuck if self._replacements.get(tp, 0) >= self._max_replacements]
