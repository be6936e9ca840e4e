"""Asks the broker, now and then and beside the reading, what a reader should have seen. Reads nothing itself."""

import asyncio
from collections.abc import Collection, Iterable
from typing import NamedTuple

import structlog
from aiokafka import AIOKafkaConsumer

from deploy.bus.client.stall import StallWatch
from deploy.bus.connection import partitions_seen_by
from deploy.bus.consumers import Positions, Reader
from schemas.errors import BusError
from schemas.ports.bus import TopicPartition

log = structlog.get_logger()


DEAF_AFTER = 2
"""So many times in a row the broker answered and the consumer did not: aiokafka's update of metadata can die unseen,
and then whoever waits for it waits for ever, while records go on coming."""


class _Answer(NamedTuple):
    """``ends`` None: the broker is there, but this consumer cannot ask it for offsets."""

    counts: dict[str, int]
    ends: Positions | None


class Lookout:
    """For one subscription. ``whole``: it means to read every partition of its topics."""

    def __init__(self, reader: Reader, partitions: Iterable[TopicPartition], *, whole: bool) -> None:
        self._reader = reader
        self._partitions = tuple(partitions)
        self._whole = whole
        self._timeout_s = reader.settings.stall_timeout_ms / 1000
        self._watch = StallWatch(self._timeout_s, reader.settings.stall_rebuilds)
        self._missing: frozenset[str] = frozenset()
        self._asking: asyncio.Task[_Answer | None] | None = None
        self._deaf = 0
        self._due_at = 0.0

    def is_due(self) -> bool:
        """Whether ``stuck`` has something to do; cheap, for every poll."""
        return asyncio.get_running_loop().time() >= self._due_at

    def stuck(
        self, consumer: AIOKafkaConsumer, positions: Positions, paused: Collection[TopicPartition]
    ) -> list[TopicPartition]:
        """The partitions for which this consumer is to be replaced; never waits.

        Raises:
            BusError: no new consumer got them moving, a topic is gone, or it has partitions that nobody reads.
        """
        now = asyncio.get_running_loop().time()
        self._due_at = now + self._timeout_s / 8
        self._watch.note(now, positions, paused)
        if self._asking is not None and self._asking.done():
            asking, self._asking = self._asking, None
            if (answer := asking.result()) is not None:
                self._judge_topics(answer.counts)
                self._deaf = self._deaf + 1 if answer.ends is None else 0
                if answer.ends is not None:
                    return self._judge_positions(self._watch.told(now, answer.ends), positions)
                if self._deaf >= DEAF_AFTER:
                    return self._judge_positions(list(self._partitions), positions)
        if self._asking is None and self._watch.should_ask(now):
            self._asking = asyncio.create_task(self._ask(consumer))
        return []

    def replaced(self, stuck: Collection[TopicPartition]) -> None:
        """A new consumer took over."""
        self._deaf = 0
        self._watch.rebuilt(asyncio.get_running_loop().time(), stuck)

    async def close(self) -> None:
        """End what is being asked."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)

    async def _ask(self, consumer: AIOKafkaConsumer) -> _Answer | None:
        try:
            counts = await partitions_seen_by(consumer._client, self._reader.settings)  # noqa: SLF001
        except BusError as error:
            self._reader.outage.begin(self._reader.client_id, error)
            return None
        self._reader.outage.end(self._reader.client_id)
        there = [tp for tp in self._partitions if tp.partition < counts.get(tp.topic, 0)]
        try:
            ends = dict.fromkeys(self._partitions, 0) | await self._reader.offsets(consumer.end_offsets, there)
        except BusError as error:
            log.warning("a reader gets no offsets", client_id=self._reader.client_id, error=str(error))
            return _Answer(counts, None)
        return _Answer(counts, ends)

    def _judge_topics(self, counts: dict[str, int]) -> None:
        known: dict[str, int] = {}
        for tp in self._partitions:
            known[tp.topic] = max(known.get(tp.topic, 0), tp.partition + 1)
        missing = frozenset(topic for topic, count in known.items() if counts.get(topic, 0) < count)
        if gone := sorted(missing & self._missing):  # seen twice: a broker that just started may not know it yet
            raise BusError(f"expected the topics {gone} to exist, the broker says they were deleted; start anew")
        self._missing = missing
        for topic, count in known.items():
            if self._whole and counts.get(topic, 0) > count:
                raise BusError(
                    f"expected {count} partitions of {topic}, there are {counts[topic]} now; start anew to read all"
                )

    def _judge_positions(self, stuck: list[TopicPartition], positions: Positions) -> list[TopicPartition]:
        if hopeless := self._watch.hopeless(stuck):
            where = ", ".join(f"{tp.topic}/{tp.partition} at offset {positions[tp]}" for tp in hopeless)
            raise BusError(
                f"expected a new consumer to read on, {self._reader.client_id} is still stuck in {where} after "
                f"{self._reader.settings.stall_rebuilds} attempts; start anew, and look at the broker's log"
            )
        return stuck
