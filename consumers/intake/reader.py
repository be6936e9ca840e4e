"""The intake's driver: reads the trajectories topic and hands whole groups to the trainer, oldest first.

Invariants, each with a test of its name:
- every_record_meets_one_fate: a record is trained, skipped with a reason, or pending;
- undecodable_bytes_are_dead_lettered_and_nothing_else_is_lost;
- reading_pauses_above_the_high_water_mark, unless nothing is ready: then the missing siblings are still on the topic.
"""

import asyncio
import heapq
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import structlog

from consumers.batching.samples import Group, Sample
from consumers.intake.breaker import CircuitBreaker
from consumers.intake.dedupe import DedupeWindow
from consumers.intake.frontier import Frontier
from consumers.intake.groups import Closed, GroupAssembler
from consumers.intake.measures import IntakeMeasures
from consumers.intake.rejects import Rejects
from consumers.intake.reward import weighted_reward
from consumers.intake.settings import IntakeSettings
from consumers.intake.staleness import StalenessRule
from schemas.errors import BusError, MalformedFrame, StreamRLError, WireError
from schemas.identifiers import PolicyVersion
from schemas.messages.reports import RecordRef, SkipReason
from schemas.messages.trajectories import Trajectory
from schemas.ports.bus import Bus, Record, Subscription, TopicPartition
from schemas.settings import LoopSettings
from schemas.wire.topics import TRAJECTORIES

log = structlog.get_logger()

POLL_S = 0.2


@dataclass(frozen=True)
class IntakeStart:
    """What a checkpoint says about the topic: finished records and the dedupe window."""

    frontier: Frontier
    dedupe: Mapping[str, tuple[int, int]]


class Intake:
    """One consumer of the trajectories topic, with its own frontier, skips and lag."""

    def __init__(
        self,
        bus: Bus,
        run_name: str,
        loop: LoopSettings,
        settings: IntakeSettings,
        *,
        reward_weights: Mapping[str, float],
        algorithm: str,
        current_version: Callable[[], PolicyVersion],
        start: IntakeStart | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._bus, self._run_name, self._loop, self._settings = bus, run_name, loop, settings
        self._weights, self._algorithm = reward_weights, algorithm
        self._current_version, self._clock = current_version, clock
        self._frontier = start.frontier.copy() if start else Frontier()
        self._dedupe = DedupeWindow(max(10_000, 8 * loop.max_groups_in_flight * loop.num_generations))
        self._dedupe.restore(start.dedupe if start else {})
        self._rule = StalenessRule(loop.max_staleness, settings.orphan_lineage)
        self._assembler = GroupAssembler(settings.group_timeout_s)
        self._breaker = CircuitBreaker(settings.max_consecutive_poison, settings.max_poison_share)
        self._measures = IntakeMeasures(loop, clock)
        self._ready: list[tuple[float, str, Group]] = []
        self._arrived = asyncio.Event()
        self._failure: BaseException | None = None
        self._positions: dict[int, int] = {}
        self._bytes: dict[tuple[int, int], int] = {}
        self._pending_bytes = 0
        self._paused = False
        self._rejects: Rejects | None = None
        self._subscription: Subscription | None = None

    async def run(self, stop: asyncio.Event) -> None:
        """Read until stopped.

        Consumes: trajectories, from the frontier on.
        Produces: groups for ``next_group``; skips; dead-letters.
        Waits for: new records; while paused, for the trainer.
        On failure: ``next_group`` raises what happened here, so that the trainer never waits for a dead reader.
        On stop: closes its clients; what was not finished is read again after a restart.
        """
        try:
            await self._open()
            while not stop.is_set():
                await self._read_once()
        except BaseException as error:
            self._failure = error
            raise
        finally:
            self._arrived.set()
            await self.close()

    async def next_group(self) -> Group:
        """The oldest whole group, by creation; groups that have become too old meanwhile are skipped.

        Raises:
            StreamRLError: the reader failed; the cause is attached.
        """
        while True:
            while self._ready:
                _, _, group = heapq.heappop(self._ready)
                if (fresh := await self._still_fresh(group)) is not None:
                    return fresh
            if self._failure is not None:
                raise StreamRLError(f"reading trajectories failed: {self._failure}") from self._failure
            self._arrived.clear()
            await self._arrived.wait()

    async def mark_skipped(self, group: Group, reason: SkipReason, detail: str) -> None:
        """The trainer does not train these samples; rows are written and the records are finished."""
        for sample in group.samples:
            await self._skip(sample.ref, group.group_id, reason, detail)

    def mark_trained(self, refs: Iterable[RecordRef]) -> None:
        """These records are in the weights now."""
        for ref in refs:
            self._finish(ref)

    def frontier(self) -> Frontier:
        """The live frontier: what the weights in memory contain, and what was skipped."""
        return self._frontier

    def dedupe_ids(self) -> dict[str, tuple[int, int]]:
        """Finished ids of the dedupe window with partition and offset, for the checkpoint."""
        return {name: place for name, place in self._dedupe.ids.items() if self._frontier.is_done(*place)}

    @property
    def counts_by_reason(self) -> dict[str, int]:
        """Skipped trajectories since this process started."""
        return dict(self._rejects.counts) if self._rejects else {}

    @property
    def pending_bytes(self) -> int:
        """Bytes read and not finished."""
        return self._pending_bytes

    async def settled(self) -> None:
        """Wait until every skip row written so far is on the bus; call it before a checkpoint claims them."""
        if self._rejects is not None:
            await self._rejects.settled()

    async def lag(self) -> dict[TopicPartition, int]:
        """Records on the topic that were not read yet, by partition."""
        assert self._subscription is not None, "lag is known once the intake runs"
        ends, positions = await self._subscription.end_offsets(), await self._subscription.positions()
        return {tp: max(0, end - positions.get(tp, 0)) for tp, end in ends.items()}

    async def metrics(self) -> dict[str, float]:
        """``kafka/*``, ``off_policy/dropped`` and ``ledger/*``."""
        return self._measures.summary(
            lag=await self.lag(),
            pending_bytes=self._pending_bytes,
            skipped=self.counts_by_reason,
            dead_letters=self._rejects.dead_letters if self._rejects else 0,
        )

    async def commit(self) -> None:
        """Tell the broker where we are, for lag displays only."""
        assert self._subscription is not None, "offsets are committed once the intake runs"
        lows = {TopicPartition(self._topic, number): low for number, low in self._frontier.lows().items() if low}
        try:
            await self._subscription.commit(lows)
        except BusError as error:
            log.warning("offsets not committed; only lag displays are affected", error=str(error))

    async def close(self) -> None:
        """Release the clients."""
        if self._subscription is not None:
            await self._subscription.close()
        if self._rejects is not None:
            await self._rejects.publisher.close()

    @property
    def _topic(self) -> str:
        return TRAJECTORIES.full_name(self._run_name)

    async def _open(self) -> None:
        publisher = await self._bus.publisher(f"{self._algorithm}-intake")
        self._rejects = Rejects(publisher, self._run_name, self._algorithm, self._clock)
        self._positions = self._frontier.lows()
        self._subscription = await self._bus.subscribe(
            [self._topic],
            client_id=f"{self._algorithm}-intake",
            start={TopicPartition(self._topic, number): low for number, low in self._positions.items()},
            group_id=f"{self._run_name}.{self._algorithm}",
        )

    async def _read_once(self) -> None:
        assert self._subscription is not None, "opened before the first read"
        self._apply_back_pressure(self._subscription)
        records = await self._subscription.poll(max_records=self._settings.max_poll_records, timeout_s=POLL_S)
        for record in records:
            await self._take(record)
        for closed in self._assembler.expire(self._clock()):
            await self._close_group(closed)
        if self._ready:
            self._arrived.set()

    def _apply_back_pressure(self, subscription: Subscription) -> None:
        too_much = self._pending_bytes > self._settings.high_water_bytes and bool(self._ready)
        if too_much and not self._paused:
            subscription.pause(subscription.partitions())
            self._paused = True
        elif self._paused and (self._pending_bytes < self._settings.low_water_bytes or not self._ready):
            subscription.resume(subscription.partitions())
            self._paused = False

    async def _take(self, record: Record) -> None:
        expected = self._positions.get(record.partition, 0)
        if record.offset > expected:
            self._frontier.partition(record.partition).skip_gap(expected, record.offset)
        self._positions[record.partition] = record.offset + 1
        if self._frontier.is_done(record.partition, record.offset):
            return
        size = len(record.value or b"")
        self._bytes[record.partition, record.offset] = size
        self._pending_bytes += size
        self._measures.observe_record(size)
        trajectory = await self._decoded(record)
        if trajectory is not None:
            await self._admit(trajectory, RecordRef(trajectory.trajectory_id, record.partition, record.offset), size)

    async def _decoded(self, record: Record) -> Trajectory | None:
        where = f"{record.topic}[{record.partition}]@{record.offset}"
        try:
            message = record.message()
            if not isinstance(message, Trajectory):
                raise MalformedFrame(f"expected a trajectory, got a {message.SCHEMA}")
        except WireError as error:
            assert self._rejects is not None, "opened before the first read"
            await self._rejects.dead_letter(record, error)
            ref = RecordRef(record.key or "", record.partition, record.offset)
            await self._skip(ref, record.key, SkipReason.POISON, str(error), known=False)
            self._breaker.observe(usable=False, where=where)
            log.warning("undecodable record dead-lettered", where=where, error=str(error))
            return None
        return message

    async def _admit(self, trajectory: Trajectory, ref: RecordRef, size: int) -> None:
        group_id = trajectory.group_id
        if not self._dedupe.accept(trajectory.trajectory_id, (ref.partition, ref.offset)):
            await self._skip(ref, group_id, SkipReason.DUPLICATE, "this trajectory was accepted before")
            return
        if self._assembler.is_closed(group_id):
            await self._skip(ref, group_id, SkipReason.GROUP_INCOMPLETE, "its group was closed before it came")
            return
        self._measures.observe_trajectory(trajectory)
        reward, fault = weighted_reward(trajectory, self._weights)
        self._breaker.observe(usable=fault is None, where=f"{self._topic}[{ref.partition}]@{ref.offset}")
        refusal = (SkipReason.POISON, fault) if fault else self._rule.verdict(trajectory, self._current_version())
        if refusal is None:
            closed = self._assembler.add(Sample(trajectory, ref, reward, size), self._clock())
        else:
            await self._skip(ref, group_id, *refusal)
            closed = self._assembler.add_unusable(trajectory, self._clock())
        if closed is not None:
            await self._close_group(closed)

    async def _close_group(self, closed: Closed) -> None:
        if closed.usable:
            heapq.heappush(self._ready, (closed.group.created_at, closed.group.group_id, closed.group))
            self._arrived.set()
        else:
            await self.mark_skipped(closed.group, SkipReason.GROUP_INCOMPLETE, closed.detail)

    async def _still_fresh(self, group: Group) -> Group | None:
        current = self._current_version()
        verdicts = [(sample, self._rule.verdict(sample.trajectory, current)) for sample in group.samples]
        kept = tuple(sample for sample, verdict in verdicts if verdict is None)
        for sample, verdict in verdicts:
            if verdict is not None:
                await self._skip(sample.ref, group.group_id, *verdict)
        rest = Group(group.group_id, group.created_at, kept)
        if len(kept) >= 2:
            return rest
        await self.mark_skipped(rest, SkipReason.GROUP_INCOMPLETE, f"{len(kept)} samples left, the others are stale")
        return None

    async def _skip(
        self, ref: RecordRef, group_id: str | None, reason: SkipReason, detail: str, *, known: bool = True
    ) -> None:
        assert self._rejects is not None, "opened before anything can be skipped"
        await self._rejects.skip(ref, group_id, reason, detail, self._current_version().number, known=known)
        self._finish(ref)

    def _finish(self, ref: RecordRef) -> None:
        self._frontier.mark(ref.partition, ref.offset)
        self._pending_bytes -= self._bytes.pop((ref.partition, ref.offset), 0)
