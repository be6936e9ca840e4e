"""The partial-trajectory pool: what is sampled and not finished is on a topic, and any worker goes on from there.

``PartialPool`` is what a worker has of it. While a completion grows, its ``PartialLog`` writes what is new, by tokens
or by seconds; when its trajectory is delivered, tombstones let compaction take that away. An order for what a lost
worker left says where it wrote (``WorkOrder.partials``); ``PartialReader`` looks there, and ``longest_prefix`` decides.

No dispatcher and no memory stands between: the pool is the topic, of which each worker writes one partition.

Invariants, each with a test of its name:
- decoding_never_waits_for_the_pool: a chunk is written beside the decoding, one at a time for each completion; what
  grew meanwhile goes with the next one, so a broker that is away costs no memory and no order of chunks;
- every_prefix_is_one_process_s: what one process writes of a trajectory begins at token 0, a prefix that it went on
  from included, and chunks of two processes are never joined;
- a_record_stays_until_its_trajectory_is_delivered.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import structlog
import xxhash
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_exponential

from streamrl.bus.port import Bus, Outgoing, Publisher, Record, Subscription, TopicPartition, message_of
from streamrl.producers.generation.rollout import SampledCompletion
from streamrl.producers.generation.status import WorkerStatus
from streamrl.schemas.errors import BusError, DataLossRefused, Superseded
from streamrl.schemas.identifiers import make_trajectory_id, partial_partition_of
from streamrl.schemas.trajectories import PartialSource, PartialTrajectory, TrajectoryPart, VersionSpan, WorkOrder

log = structlog.get_logger()

MAX_CHUNK_TOKENS = 32_768
"""Of one record, 256 KiB: a long prefix, or what grew while the broker was away, is written in several."""
READ_ATTEMPTS = 8
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0
"""Doubled from the first to the longest: some 15 seconds in all, after which a completion begins anew."""
POLL_S = 1.0


class RecordKey(NamedTuple):
    """What a tombstone needs to name a record of the pool."""

    partition: int
    key: str


@dataclass
class PartialPool:
    """One worker's: what it writes, and where it reads what others have written.

    ``chunk_tokens`` or ``chunk_s`` seconds after the last one, a completion's new tokens are written. ``incarnation``:
    of this process. ``continued`` counts the completions that it went on with. The heartbeat's ``partials_from`` is the
    offset in our partition from which on all lies that we wrote of what is unfinished.
    """

    publisher: Publisher
    reader: "PartialReader"
    topic: str
    worker_id: str
    incarnation: str
    chunk_tokens: int
    chunk_s: float
    status: WorkerStatus
    monotonic: Callable[[], float] = time.monotonic
    continued: int = field(init=False, default=0)
    _open: "dict[str, PartialLog]" = field(init=False, default_factory=dict)
    _tasks: "set[asyncio.Task[None]]" = field(init=False, default_factory=set)
    _next_offset: int = field(init=False, default=0)
    _failures: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.partition = partial_partition_of(self.worker_id)
        self._update_status()

    async def open(self) -> None:
        """Find out where our partition ends: what this process will write lies behind that, and whoever looks for it
        need not read what others wrote before.
        """
        try:
            self._next_offset = await self.reader.end_offset(self.partition)
            self._update_status()
        except BusError as error:
            log.warning("end of the partial trajectories not known, ours are looked for in all", error=str(error))

    def _update_status(self) -> None:
        firsts = (one.first_offset for one in self._open.values() if one.first_offset is not None)
        # What was not acknowledged yet will lie behind what was.
        self.status.partials_from = min(firsts, default=self._next_offset)

    async def begin(self, order: WorkOrder, sample_index: int, prompt_token_ids: Sequence[int]) -> "PartialLog":
        """A sample of an order: with what an earlier attempt left of it, if there is anything."""
        trajectory_id = make_trajectory_id(order.group_id, sample_index)
        found = await self.reader.read(trajectory_id, order.partials) if order.partials else []
        prompt_hash = hash_of_tokens(prompt_token_ids)
        chunks = [message for record in found if isinstance(message := message_of(record), PartialTrajectory)]
        # What another policy's weights sampled, before a split was changed, is not gone on with.
        wanted = prompt_hash, order.policy
        of_it = (chunk for chunk in chunks if (chunk.prompt_hash, chunk.policy) == wanted)
        completion = longest_prefix(of_it, trajectory_id)
        if len(completion.token_ids):
            self.continued += 1
            own = TrajectoryPart(worker_id=self.worker_id, attempt=order.attempt, start=len(completion.token_ids))
            completion.parts = (*completion.parts, own)
            log.info("trajectory continued", trajectory=trajectory_id, tokens=own.start, attempt=order.attempt)
        earlier = [RecordKey(record.partition, record.key) for record in found if record.key is not None]
        begun = PartialLog(self, trajectory_id, order, prompt_hash, completion, earlier, self.monotonic())
        self._open[trajectory_id] = begun
        # What was found is written once more, as ours: who goes on with it next needs to look for ours alone.
        begun.grown()
        return begun

    async def flush(self, timeout_s: float) -> None:
        """Write what is not on record yet, within so many seconds: what is given up here goes on elsewhere."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await asyncio.gather(*(one.flush() for one in self._open.values()))
                if self._tasks:  # tombstones
                    await asyncio.wait(self._tasks)

    def close(self) -> None:
        """Stop writing; idempotent."""
        for task in self._tasks:
            task.cancel()

    def start_task(self, task: "asyncio.Task[None]") -> "asyncio.Task[None]":
        """Keep a task until it ends: asyncio itself holds none."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def forget(self, finished: "PartialLog") -> None:
        """Its trajectory is delivered."""
        if self._open.get(finished.trajectory_id) is finished:
            del self._open[finished.trajectory_id]
            self._update_status()

    def written(self, offset: int, *, is_first: bool) -> None:
        """The broker has our record at this offset; ``is_first``: the first one of its completion."""
        nothing_unfinished = self.status.partials_from == self._next_offset
        self._next_offset = max(self._next_offset, offset + 1)
        # Not at every chunk: thousands of completions may be open, and no other chunk moves where they begin.
        if is_first or nothing_unfinished:
            self._update_status()

    def note_failure(self, error: Exception) -> None:
        """A chunk was not written; it is part of the next one."""
        self._failures += 1
        if self._failures.bit_count() == 1:  # attempts 1, 2, 4, 8, ...: all completions fail at the same broker
            log.warning("partial trajectory not written, trying again", failures=self._failures, error=str(error))


@dataclass(eq=False)
class PartialLog:
    """What is on record of one completion: tokens up to ``durable``. ``first_offset``: of its first record.

    ``earlier``: records of other processes that it went on from.
    """

    pool: PartialPool
    trajectory_id: str
    order: WorkOrder
    prompt_hash: int
    completion: SampledCompletion
    earlier: list[RecordKey]
    written_at: float
    durable: int = field(init=False, default=0)
    first_offset: int | None = field(init=False, default=None)
    _keys: list[RecordKey] = field(init=False, default_factory=list)
    _writing: "asyncio.Task[None] | None" = field(init=False, default=None)
    _is_closed: bool = field(init=False, default=False)

    def grown(self) -> None:
        """The completion may have grown: write if enough is new. Never waits."""
        # One at a time, and nothing of what is whole: its trajectory is on its way.
        if self._writing is not None or self.completion.finish_reason is not None:
            return
        new = len(self.completion.token_ids) - self.durable
        if new >= self.pool.chunk_tokens or (new and self.pool.monotonic() - self.written_at >= self.pool.chunk_s):
            self._write()

    async def flush(self) -> None:
        """Write all that there is, whole completions too; returns when the broker has it, or refused."""
        if self._writing is not None:
            await asyncio.wait({self._writing})
        is_told = self.completion.finish_reason is None
        while not self._is_closed and (self.durable < len(self.completion.token_ids) or not is_told):
            before = self.durable
            await asyncio.wait({self._write()})
            is_told = True
            if self.durable == before:
                return

    def close(self) -> None:
        """The trajectory is delivered: nobody will go on with what is on record of it."""
        self._is_closed = True
        self.pool.forget(self)
        if keys := [*self._keys, *self.earlier]:
            self.pool.start_task(asyncio.create_task(self._retire(keys)))

    def _write(self) -> "asyncio.Task[None]":
        start = self.durable
        end = min(len(self.completion.token_ids), start + MAX_CHUNK_TOKENS)
        key = RecordKey(self.pool.partition, f"{self.trajectory_id}@{self.pool.incarnation}/{start}")
        if key not in self._keys[-1:]:  # a chunk that is written again has the same name
            self._keys.append(key)
        self._writing = self.pool.start_task(asyncio.create_task(self._deliver(self._chunk(start, end), key, end)))
        return self._writing

    def _chunk(self, start: int, end: int) -> PartialTrajectory:
        whole = end == len(self.completion.token_ids)
        return PartialTrajectory(
            trajectory_id=self.trajectory_id,
            group_id=self.order.group_id,
            worker_id=self.pool.worker_id,
            incarnation=self.pool.incarnation,
            attempt=self.order.attempt,
            prompt_hash=self.prompt_hash,
            start=start,
            # Copies: the completion cannot grow while numpy holds its own arrays.
            token_ids=np.frombuffer(self.completion.token_ids[start:end], dtype="<i4"),
            logprobs=np.frombuffer(self.completion.logprobs[start:end], dtype="<f4"),
            version_spans=spans_within(self.completion.version_spans(), start, end),
            parts=self.completion.parts,
            finish_reason=self.completion.finish_reason if whole else None,
            policy=self.order.policy,
        )

    async def _deliver(self, chunk: PartialTrajectory, key: RecordKey, end: int) -> None:
        try:
            record = Outgoing.of(self.pool.topic, chunk, key=key.key, partition=key.partition)
            position = await self.pool.publisher.publish(record)
        except (BusError, Superseded) as error:
            # Whether it arrived or not: what comes next begins at the same token, under the same name.
            self.pool.note_failure(error)
        else:
            self.durable = end
            is_first = self.first_offset is None
            if is_first:
                self.first_offset = position.offset
            self.pool.written(position.offset, is_first=is_first)
        finally:
            self.written_at = self.pool.monotonic()
            self._writing = None

    async def _retire(self, keys: Iterable[RecordKey]) -> None:
        # Behind the chunk under way, or that one would stay. A tombstone that is lost costs space until retention.
        if self._writing is not None:
            await asyncio.wait({self._writing})
        with suppress(BusError, Superseded):
            for key in keys:
                sent = await self.pool.publisher.submit(
                    Outgoing(self.pool.topic, None, key.key, partition=key.partition)
                )
                # Looked at, or asyncio would log a lost tombstone as a forgotten error.
                sent.add_done_callback(lambda done: done.cancelled() or done.exception())


def hash_of_tokens(token_ids: Sequence[int]) -> int:
    """The number that stands for a prompt: a prefix is of use behind the same tokens only."""
    return xxhash.xxh3_64_intdigest(np.array(token_ids, dtype="<i4").tobytes())


def spans_within(spans: Iterable[VersionSpan], start: int, end: int) -> tuple[VersionSpan, ...]:
    """What these spans say of tokens [start, end)."""
    return tuple(
        VersionSpan(version=span.version, start=max(span.start, start), end=min(span.end, end))
        for span in spans
        if span.start < end and span.end > start
    )


def longest_prefix(chunks: Iterable[PartialTrajectory], trajectory_id: str) -> SampledCompletion:
    """The most that one process left of a trajectory, empty if none left anything; of equals the newest attempt's."""
    by_process: dict[tuple[int, str], list[PartialTrajectory]] = {}
    for chunk in chunks:
        if chunk.trajectory_id == trajectory_id:
            by_process.setdefault((chunk.attempt, chunk.incarnation), []).append(chunk)
    found = ((_joined(left), attempt) for (attempt, _), left in by_process.items())
    return max(
        found,
        key=lambda one: (len(one[0].token_ids), one[0].finish_reason is not None, one[1]),
        default=(SampledCompletion(), 0),
    )[0]


def _joined(chunks: Sequence[PartialTrajectory]) -> SampledCompletion:
    """Chunks of one process up to the first gap; those that were written again may overlap."""
    completion = SampledCompletion()
    for chunk in sorted(chunks, key=lambda chunk: (chunk.start, chunk.end)):
        end = len(completion.token_ids)
        if chunk.start > end:
            break
        if chunk.end < end or completion.finish_reason is not None:
            continue
        known = end - chunk.start
        spans = spans_within(chunk.version_spans, end, chunk.end)
        completion.take(chunk.token_ids[known:], chunk.logprobs[known:], spans)
        completion.finish_reason = chunk.finish_reason
        first = TrajectoryPart(worker_id=chunk.worker_id, attempt=chunk.attempt, start=0)
        # A prefix that was being written again may end before the part that goes on with it.
        completion.parts = tuple(part for part in chunk.parts or (first,) if part.start <= chunk.end)
    return completion


@dataclass(eq=False)
class _Scan:
    """One reading of a partition, for several trajectories; ``found``: their records by trajectory id."""

    offset: int
    found: dict[str, list[Record]] = field(default_factory=dict)
    task: "asyncio.Task[None] | None" = None


@dataclass
class PartialReader:
    """Finds what was written of trajectories. Orders that come together are looked for together, in one reading."""

    bus: Bus
    topic: str
    client_id: str
    _waiting: dict[int, _Scan] = field(default_factory=dict)
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def read(self, trajectory_id: str, sources: Iterable[PartialSource]) -> list[Record]:
        """Records of a trajectory, as far as they are there; none if the topic cannot be read."""
        scans = [self._join(source, trajectory_id) for source in sources]
        for scan in scans:
            assert scan.task is not None, "it was begun when it was joined"
            # One of those who wait may be given up; the others still want it.
            await asyncio.shield(scan.task)
        return [record for scan in scans for record in scan.found[trajectory_id]]

    async def end_offset(self, partition: int) -> int:
        """Where a partition ends now.

        Raises:
            BusError: the topic cannot be read.
        """
        subscription = await self._open(partition)
        try:
            return (await subscription.end_offsets())[TopicPartition(self.topic, partition)]
        finally:
            await subscription.close()

    async def _open(self, partition: int) -> Subscription:
        return await self.bus.subscribe([self.topic], client_id=self.client_id, start="latest", partitions=[partition])

    def _join(self, source: PartialSource, trajectory_id: str) -> _Scan:
        scan = self._waiting.get(source.partition)
        if scan is None:
            scan = self._waiting[source.partition] = _Scan(source.offset)
            scan.task = asyncio.create_task(self._run(source.partition, scan))
        scan.offset = min(scan.offset, source.offset)
        scan.found.setdefault(trajectory_id, [])
        return scan

    async def _run(self, partition: int, scan: _Scan) -> None:
        # One after the other: who asks for the same partition meanwhile joins the next reading of it.
        async with self._turn:
            del self._waiting[partition]
            patiently = AsyncRetrying(
                sleep=asyncio.sleep,
                retry=retry_if_exception_type((BusError, DataLossRefused)),
                stop=stop_after_attempt(READ_ATTEMPTS),
                wait=wait_exponential(multiplier=FIRST_PAUSE_S, max=LONGEST_PAUSE_S),
                reraise=True,
            )
            try:
                await patiently(self._scan, TopicPartition(self.topic, partition), scan)
            except (BusError, DataLossRefused) as error:
                log.error("partial trajectories not read, they begin anew", count=len(scan.found), error=str(error))

    async def _scan(self, tp: TopicPartition, scan: _Scan) -> None:
        for records in scan.found.values():
            records.clear()  # of an attempt that failed
        subscription = await self._open(tp.partition)
        try:
            end = (await subscription.end_offsets())[tp]
            first = (await subscription.beginning_offsets())[tp]
            subscription.seek({tp: min(end, max(scan.offset, first))})
            while (await subscription.positions())[tp] < end:
                for record in await subscription.poll(timeout_s=POLL_S):
                    # By the key: most records are of others, and are not decoded.
                    wanted = scan.found.get((record.key or "").rpartition("@")[0])
                    if wanted is not None and record.value is not None:
                        wanted.append(record)
        finally:
            await subscription.close()
