"""Records of one partition on their way: gathered into batches, sent one at a time. Does not know how they are sent.

Invariants: batches of a partition leave one after the other, in order; the future of every record is settled once,
at the latest when the delivery deadline passes; bytes count as held until the batch is settled or dropped unsent.
"""

import asyncio
import functools
import random
from collections import deque
from collections.abc import Awaitable, Callable

from aiokafka.partitioner import murmur2
from aiokafka.producer.message_accumulator import BatchBuilder

from schemas.errors import BusError, DeliveryUnknown
from schemas.ports.bus import Outgoing, Position, TopicPartition

MAX_AGE_S = 1.0
_CODECS = {"none": 0, "gzip": 1, "snappy": 2, "lz4": 3, "zstd": 4}


def new_builder(max_bytes: int, compression_type: str) -> BatchBuilder:
    """An empty batch of aiokafka's; a first record larger than ``max_bytes`` travels alone."""
    return BatchBuilder(max_bytes, _CODECS[compression_type])


def append(builder: BatchBuilder, record: Outgoing) -> bool:
    """Put a record into a batch; False: it is full."""
    key = None if record.key is None else record.key.encode()
    return builder.append(timestamp=None, key=key, value=record.value, headers=list(record.headers)) is not None


def partition_of(key: str | None, count: int) -> int:
    """As Kafka's default partitioner has it; any partition for a record without a key."""
    return random.randrange(count) if key is None else _hashed(key, count)


@functools.lru_cache(maxsize=4096)
def _hashed(key: str, count: int) -> int:
    return int(murmur2(key.encode()) & 0x7FFFFFFF) % count


class Batch:
    """Records that travel together."""

    def __init__(self, builder: BatchBuilder, lane: TopicPartition, deadline_s: float) -> None:
        self.builder = builder
        self.lane = lane
        self.size = 0
        loop = asyncio.get_running_loop()
        self.settled: asyncio.Future[None] = loop.create_future()
        self._futures: list[asyncio.Future[Position]] = []
        self._deadline_s = deadline_s
        self._closes_at = loop.time() + MAX_AGE_S
        self._timer = loop.call_later(deadline_s, self._expire)

    def append(self, record: Outgoing, size: int) -> "asyncio.Future[Position] | None":
        """The record's future, or None: the batch is full, or too old for the record to have its whole deadline."""
        loop = asyncio.get_running_loop()
        if loop.time() > self._closes_at or self.settled.done():
            return None
        if not append(self.builder, record):
            return None
        future: asyncio.Future[Position] = loop.create_future()
        self._futures.append(future)
        self.size += size
        return future

    def stored(self, offset: int) -> None:
        """The broker has the records, the first one at this offset."""
        topic, partition = self.lane
        for index, future in enumerate(self._futures):
            if not future.done():
                future.set_result(Position(topic, partition, offset + index))
        self._end()

    def fail(self, error: BusError) -> None:
        """Tell every record that is not settled yet."""
        for future in self._futures:
            if not future.done():
                future.set_exception(type(error)(*error.args))
        self._end()

    def _expire(self) -> None:
        self.fail(
            DeliveryUnknown(
                f"expected {self.lane.topic}/{self.lane.partition} to take {len(self._futures)} records within "
                f"{self._deadline_s:g} s, got no answer; they may still arrive, send them again under the same ids"
            )
        )

    def _end(self) -> None:
        self._timer.cancel()
        if not self.settled.done():
            self.settled.set_result(None)


class Lane:
    """The batches of one partition, the newest still open."""

    def __init__(
        self,
        name: TopicPartition,
        new_batch: Callable[[TopicPartition], Batch],
        send: Callable[[Batch], Awaitable[None]],
        drop: Callable[[Batch], None],
        linger_s: float,
    ) -> None:
        self._name = name
        self._new_batch = new_batch
        self._send = send
        self._drop = drop
        self._linger_s = linger_s
        self._queue: deque[Batch] = deque()
        self._sending: Batch | None = None
        self._task: asyncio.Task[None] | None = None

    def append(self, record: Outgoing, size: int) -> "asyncio.Future[Position]":
        """Put a record behind the others; its future."""
        future = self._queue[-1].append(record, size) if self._queue else None
        if future is not None:
            return future
        batch = self._new_batch(self._name)
        future = batch.append(record, size)
        assert future is not None, "an empty batch takes a record of any size"
        self._queue.append(batch)
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        return future

    def unsettled(self) -> "list[asyncio.Future[None]]":
        """What is still to be settled, to be waited for."""
        held = [*self._queue, *([self._sending] if self._sending else [])]
        return [batch.settled for batch in held if not batch.settled.done()]

    async def _run(self) -> None:
        try:
            await asyncio.sleep(self._linger_s)
            while self._queue:
                batch = self._queue.popleft()
                if batch.settled.done():
                    self._drop(batch)
                    continue
                self._sending = batch
                await self._send(batch)
                self._sending = None
        finally:
            self._task = None

    async def stop(self, error: BusError) -> None:
        """End the sending; what is not settled fails with this error."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for batch in (*self._queue, *([self._sending] if self._sending else [])):
            batch.fail(error)
        self._queue.clear()
