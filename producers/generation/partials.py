"""The partial-trajectory pool: unfinished completions are kept on a topic, so that any worker can continue them.

``PartialPool`` is a worker's part of the pool. While a completion grows, its ``PartialLog`` writes new tokens, after a
number of tokens or seconds. Each worker writes to one partition. When the trajectory is delivered, tombstones let
compaction remove its records. An order to continue a lost worker's completion says where that worker wrote
(``WorkOrder.partials``). ``PartialReader`` reads the records there, and ``longest_prefix`` chooses the tokens to keep.

The topic alone is the pool: no process holds it in memory.

Invariants, each with a test of its name:
- decoding_never_waits_for_the_pool: chunks are written while decoding continues, one at a time for each completion.
  Tokens sampled in the meantime go into the next chunk, so an outage of the broker costs no memory and chunks stay in
  order;
- every_prefix_is_of_one_process: a process writes a trajectory from token 0 on, including a prefix that it continued,
  and chunks of two processes are never joined;
- a_record_stays_until_its_trajectory_is_delivered: only then it gets a tombstone.
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
"""Most tokens of one record (256 KiB); a long prefix, or the tokens of an outage, are written as several records."""
READ_ATTEMPTS = 8
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0
"""Pauses between attempts, doubled up to the longest: 11 seconds in all. Then the completion starts again."""
POLL_S = 1.0


class RecordKey(NamedTuple):
    """Names a record of the pool, for its tombstone."""

    partition: int
    key: str


@dataclass
class PartialPool:
    """One worker's part of the pool: writes its own completions, and reads those of other workers.

    A completion's new tokens are written ``chunk_tokens`` tokens or ``chunk_s`` seconds after its last chunk.
    ``incarnation``: the id of this process, which a restarted worker does not share. ``continued``: number of
    completions that this process continued. The heartbeat's ``partials_from`` is an offset in this worker's partition:
    all its records of unfinished completions are at or after that offset.
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
        """Read the end offset of this worker's partition: all records of this process will be at or after it."""
        try:
            self._next_offset = await self.reader.end_offset(self.partition)
            self._update_status()
        except BusError as error:
            log.warning("end of the partial trajectories not known, readers will read all of them", error=str(error))

    def _update_status(self) -> None:
        firsts = (one.first_offset for one in self._open.values() if one.first_offset is not None)
        # Records that are not acknowledged yet will get later offsets than acknowledged ones.
        self.status.partials_from = min(firsts, default=self._next_offset)

    async def begin(self, order: WorkOrder, sample_index: int, prompt_token_ids: Sequence[int]) -> "PartialLog":
        """Start the log of an order's sample, with the tokens of an earlier attempt if the pool has some."""
        trajectory_id = make_trajectory_id(order.group_id, sample_index)
        found = await self.reader.read(trajectory_id, order.partials) if order.partials else []
        prompt_hash = hash_of_tokens(prompt_token_ids)
        chunks = [message for record in found if isinstance(message := message_of(record), PartialTrajectory)]
        # Completions of another policy, sampled before a split changed, are not continued.
        wanted = prompt_hash, order.policy
        of_it = (chunk for chunk in chunks if (chunk.prompt_hash, chunk.policy) == wanted)
        completion = longest_prefix(of_it, trajectory_id)
        if len(completion.token_ids):
            self.continued += 1
            own = TrajectoryPart(worker_id=self.worker_id, attempt=order.attempt, start=len(completion.token_ids))
            completion.parts = (*completion.parts, own)
            log.info("trajectory continued", trajectory=trajectory_id, tokens=own.start, attempt=order.attempt)
        earlier = [RecordKey(record.partition, record.key) for record in found if record.key is not None]
        partial_log = PartialLog(self, trajectory_id, order, prompt_hash, completion, earlier, self.monotonic())
        self._open[trajectory_id] = partial_log
        # The found tokens are written again by this process: the next worker needs to read only this process's records.
        partial_log.grown()
        return partial_log

    async def flush(self, timeout_s: float) -> None:
        """Write all unwritten tokens, for at most ``timeout_s``, so that other workers can continue the completions."""
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
        """Keep a task until it ends, since asyncio holds no reference to it."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def forget(self, finished: "PartialLog") -> None:
        """Remove a log whose trajectory was delivered or handed over."""
        if self._open.get(finished.trajectory_id) is finished:
            del self._open[finished.trajectory_id]
            self._update_status()

    def written(self, offset: int, *, is_first: bool) -> None:
        """Note that a record is at this offset. ``is_first``: it is the first of its completion."""
        nothing_unfinished = self.status.partials_from == self._next_offset
        self._next_offset = max(self._next_offset, offset + 1)
        # Not for every chunk: thousands of completions may be open, and only a first chunk changes the lowest offset.
        if is_first or nothing_unfinished:
            self._update_status()

    def note_failure(self, error: Exception) -> None:
        """Count a chunk that was not written. Its tokens go into the next chunk."""
        self._failures += 1
        if self._failures.bit_count() == 1:  # logs failures 1, 2, 4, 8, ...: all completions fail together
            log.warning("partial trajectory not written, trying again", failures=self._failures, error=str(error))


@dataclass(eq=False)
class PartialLog:
    """The records of one completion. ``durable``: number of its tokens on the topic; ``first_offset``: offset of its
    first record; ``earlier``: records of other processes, whose tokens this completion continues.
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
        """Write a chunk if enough tokens are new. Call this whenever the completion may have grown. Never waits."""
        # One chunk at a time, and none of a finished completion: its trajectory will be delivered.
        if self._writing is not None or self.completion.finish_reason is not None:
            return
        new = len(self.completion.token_ids) - self.durable
        if new >= self.pool.chunk_tokens or (new and self.pool.monotonic() - self.written_at >= self.pool.chunk_s):
            self._write()

    async def flush(self) -> None:
        """Write all tokens, even of a finished completion; returns when the broker has stored or refused them."""
        if self._writing is not None:
            await asyncio.wait({self._writing})
        reason_is_written = self.completion.finish_reason is None
        while not self._is_closed and (self.durable < len(self.completion.token_ids) or not reason_is_written):
            before = self.durable
            await asyncio.wait({self._write()})
            reason_is_written = True
            if self.durable == before:
                return

    def close(self) -> None:
        """Delete the completion's records after its trajectory was delivered."""
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
            # Slices are copies: the completion could not grow while numpy exports the buffers of its own arrays.
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
            # Whether it arrived or not, the next chunk starts at the same token and has the same key.
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
        # Wait for the chunk in flight: a tombstone before it would not delete it. A lost tombstone only costs space.
        if self._writing is not None:
            await asyncio.wait({self._writing})
        with suppress(BusError, Superseded):
            for key in keys:
                sent = await self.pool.publisher.submit(
                    Outgoing(self.pool.topic, None, key.key, partition=key.partition)
                )
                # Retrieves the exception: otherwise asyncio logs a lost tombstone as an unhandled error.
                sent.add_done_callback(lambda done: done.cancelled() or done.exception())


def hash_of_tokens(token_ids: Sequence[int]) -> int:
    """A hash of a prompt's tokens, to continue a prefix only after the same prompt."""
    return xxhash.xxh3_64_intdigest(np.array(token_ids, dtype="<i4").tobytes())


def spans_within(spans: Iterable[VersionSpan], start: int, end: int) -> tuple[VersionSpan, ...]:
    """The parts of these spans within tokens [start, end)."""
    return tuple(
        VersionSpan(version=span.version, start=max(span.start, start), end=min(span.end, end))
        for span in spans
        if span.start < end and span.end > start
    )


def longest_prefix(chunks: Iterable[PartialTrajectory], trajectory_id: str) -> SampledCompletion:
    """The longest prefix of a trajectory that one process wrote; among equals the newest attempt's. Empty if none."""
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
    """One process's chunks, joined up to the first gap. Chunks that were written twice may overlap."""
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
        # If the process died while it wrote an earlier prefix again, it sampled nothing of its own: leave its part out.
        completion.parts = tuple(part for part in chunk.parts or (first,) if part.start <= chunk.end)
    return completion


@dataclass(eq=False)
class _Scan:
    """One pass over a partition for several trajectories. ``found``: their records, by trajectory id."""

    offset: int
    found: dict[str, list[Record]] = field(default_factory=dict)
    task: "asyncio.Task[None] | None" = None


@dataclass
class PartialReader:
    """Finds the records of trajectories. Requests that arrive together share one pass over the partition."""

    bus: Bus
    topic: str
    client_id: str
    _waiting: dict[int, _Scan] = field(default_factory=dict)
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def read(self, trajectory_id: str, sources: Iterable[PartialSource]) -> list[Record]:
        """The records of a trajectory that are on the topic; none if the topic cannot be read."""
        scans = [self._join(source, trajectory_id) for source in sources]
        for scan in scans:
            assert scan.task is not None, "``_join`` starts the task"
            # Shielded: if one caller is cancelled, the others still need the result.
            await asyncio.shield(scan.task)
        return [record for scan in scans for record in scan.found[trajectory_id]]

    async def end_offset(self, partition: int) -> int:
        """The current end offset of a partition.

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
        # One pass at a time: callers that ask for the same partition in the meantime share its next pass.
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
                log.error("partial trajectories not read, they start again", count=len(scan.found), error=str(error))

    async def _scan(self, tp: TopicPartition, scan: _Scan) -> None:
        for records in scan.found.values():
            records.clear()  # a failed attempt may have left some
        subscription = await self._open(tp.partition)
        try:
            end = (await subscription.end_offsets())[tp]
            first = (await subscription.beginning_offsets())[tp]
            subscription.seek({tp: min(end, max(scan.offset, first))})
            while (await subscription.positions())[tp] < end:
                for record in await subscription.poll(timeout_s=POLL_S):
                    # Selected by key, without decoding: most records are of other trajectories.
                    wanted = scan.found.get((record.key or "").rpartition("@")[0])
                    if wanted is not None and record.value is not None:
                        wanted.append(record)
        finally:
            await subscription.close()
