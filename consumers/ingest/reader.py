"""Reads the trajectories topic and hands whole groups to the trainer, oldest first.

Two mechanisms: ``TrajectoryReader`` reads, and ``TopicOpening`` finds out where reading begins after a restore and
whether the topic is still the one of the checkpoint. Invariants, each with a test of its name:
- undecodable_bytes_are_dead_lettered_and_nothing_else_is_lost;
- a_resumed_reader_neither_repeats_nor_loses;
- nothing_is_handed_out_before_what_was_there_was_read, as far as the high-water mark lets it, so that a reader that
  resumes hands out the same groups in the same order as one that never stopped;
- reading_pauses_above_the_high_water_mark, but never while no group is ready: then the missing siblings are still on
  the topic, and only reading on can complete a group. Correctness goes before the bound.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import structlog

from bus.port import Bus, Record, Subscription, TopicPartition
from consumers.batching.micro_batches import Group
from consumers.ingest.filters import TrajectoryFilter
from consumers.ingest.finished_groups import FinishedGroups
from consumers.ingest.frontier import Frontier
from consumers.ingest.groups import ClosedGroup, ReadyGroups, Rejection
from consumers.ingest.ledger import KnownRecord, Ledger
from consumers.ingest.metrics import IngestMetrics
from consumers.ingest.rejections import RejectionWriter, SkipTally
from consumers.ingest.settings import IngestSettings
from consumers.ingest.translation import Translation, translate
from schemas.errors import BusError, BusUnavailable, DataLossRefused, LifecycleError, StreamRLError, WireError
from schemas.identifiers import PolicyVersion
from schemas.reports import SkipReason
from schemas.settings import LoopSettings
from schemas.topics import TRAJECTORIES
from schemas.trajectories import Trajectory

log = structlog.get_logger()

POLL_S = 0.2
"""Longest wait for records: how soon a stop is noticed on a silent topic."""
RECORDS_PER_YIELD = 32
"""Records processed before other tasks of the event loop get their turn: a few milliseconds of decoding."""
OPEN_ATTEMPTS = 5
"""Retention may go on deleting while what it deleted is recorded."""
COMPARE_TIMEOUT_S = 30.0
"""For reading one known record of each partition: far above what a broker needs that is there."""


@dataclass(frozen=True)
class ReaderSnapshot:
    """A reader's part of a checkpoint: finished records and groups, known records and skip rows."""

    frontier: Frontier = field(default_factory=Frontier)
    finished_groups: FinishedGroups = field(default_factory=FinishedGroups)
    known_records: Mapping[int, KnownRecord] = field(default_factory=dict)
    tally: SkipTally = field(default_factory=lambda: SkipTally(lineage=0))
    prompt_cursor: int = 0


class TrajectoryReader:
    """One consumer of the trajectories topic. ``ledger``: where its records stand, and where the trainer ends them.

    ``current_version`` is asked for each trajectory; its first answer is where this lineage starts. Each sample of a
    group that was handed out is to be finished once, by ``ledger.mark_trained`` or ``ledger.mark_skipped``.
    ``orphans_through``: what lineages up to this one sampled is skipped.
    """

    def __init__(
        self,
        bus: Bus,
        run_name: str,
        loop: LoopSettings,
        settings: IngestSettings,
        *,
        reward_weights: Mapping[str, float],
        algorithm: str,
        current_version: Callable[[], PolicyVersion],
        start: ReaderSnapshot | None = None,
        orphans_through: int = 0,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        # Where nothing of an earlier life is trained, what expired of it is no loss.
        self._begins_anew = bool(orphans_through) and (start is None or not start.frontier.partitions)
        start = start or ReaderSnapshot()
        self._bus, self._settings, self._topic = bus, settings, TRAJECTORIES.full_name(run_name)
        self._opening = TopicOpening(
            bus, self._topic, f"{algorithm}-reader", f"{run_name}.{algorithm}", settings.accept_loss
        )
        self._rejections = RejectionWriter(run_name, algorithm, clock, start.tally.copy())
        self.ledger = Ledger(
            start.frontier.covering(loop.trajectory_partitions),
            self._rejections,
            lambda: current_version().number,
            start.known_records,
            start.prompt_cursor,
            start.finished_groups.copy(),
        )
        self._metrics = IngestMetrics(loop, clock, monotonic)
        self._filter = TrajectoryFilter(
            loop,
            settings,
            reward_weights=reward_weights,
            current_version=current_version,
            ledger=self.ledger,
            metrics=self._metrics,
            orphans_through=orphans_through,
        )
        self._ready = ReadyGroups(lambda: current_version().number + 1)
        self._arrived = asyncio.Event()
        self._ended_by: StreamRLError | None = None
        self._paused = False
        # Groups are withheld until everything was read that the topic held when it was opened.
        self._initial_ends: dict[TopicPartition, int] = {}
        self._caught_up = False
        self._subscription: Subscription | None = None

    async def run(self, stop: asyncio.Event) -> None:
        """Read until stopped.

        Consumes: trajectories, from the frontier on.
        Produces: groups for ``next_group``; skips; dead letters.
        Waits for: new records; while paused, for the trainer.
        On failure: ``next_group`` raises what happened here, so that the trainer never waits for a dead reader.
        On stop: closes its clients; what was not finished is read again after a restart.
        """
        self._ended_by = None
        try:
            await self._open()
            while not stop.is_set():
                await self._read_once()
            self._ended_by = LifecycleError("expected a running reader of trajectories, got one that was stopped")
        except StreamRLError as error:
            self._ended_by = error
            raise
        except BaseException as error:  # cancellation too: nobody may wait for a reader that is no more
            self._ended_by = StreamRLError(f"reading trajectories ended with {error!r}")
            self._ended_by.__cause__ = error
            raise
        finally:
            # First wake the trainer with the error: closing still waits for the broker.
            self._arrived.set()
            await self._close()

    async def next_group(self) -> Group:
        """The oldest ready group, once there is one; raises what ``ready_group`` does."""
        while (group := self.ready_group()) is None:
            await self._arrived.wait()
        return group

    def ready_group(self) -> Group | None:
        """The oldest group that this step may train, by creation, none of whose samples is too old by now; or none.

        Raises:
            StreamRLError: the reader ended; this is what ended it.
        """
        if self._ended_by is not None:
            raise self._ended_by
        while self._ready and self._caught_up:
            group = self._ready.pop()
            if (stale := self._filter.outdated(group)) is None:
                return group
            self._age_out(group, stale)
        # No await since the look that found nothing, so no arrival falls between the two.
        self._arrived.clear()
        return None

    async def carry_over(self) -> Translation | None:
        """Before anything is read: if this is another cluster's topic, go by names; None: it is the checkpoint's own.

        Without ``ingest.translate_offsets`` nothing is done here, and another topic is refused when reading begins.

        Raises:
            BusUnavailable: no broker answers.
        """
        if not self._settings.translate_offsets or not await self._opening.is_elsewhere(self.ledger):
            return None
        ledger, client_id = self.ledger, self._opening.client_id
        found = await translate(self._bus, self._topic, client_id, ledger.is_finished, ledger.frontier)
        ledger.move(found.frontier, found.known_records)
        log.warning(
            "going on with another cluster: finished trajectories were found by their names",
            found=len(found.carried),
            not_found_at_most=found.absent,
        )
        return found

    def snapshot(self) -> ReaderSnapshot:
        """Where a reader goes on that starts from this moment. A checkpoint may claim it only after ``flush``."""
        ledger = self.ledger
        return ReaderSnapshot(
            frontier=ledger.frontier.copy(),
            # Of groups that are not finished nothing is in it: their records are read again, and are no repeats then.
            finished_groups=ledger.finished_groups.copy(),
            known_records=dict(ledger.known_records),
            tally=self._rejections.tally.copy(),
            prompt_cursor=ledger.prompt_cursor,
        )

    async def flush(self) -> None:
        """Wait until every skip row written so far is on the bus; call it before a checkpoint claims them.

        Raises:
            BusError: the broker does not take them.
        """
        await self._rejections.flush()

    async def lag(self) -> dict[TopicPartition, int]:
        """Records on the topic that are not finished, read or not, by partition, as of the last look at its ends."""
        assert self._subscription is not None, "lag is known once the reader runs"
        return self._metrics.lag(await self._subscription.positions(), self.ledger.frontier)

    async def metrics(self) -> dict[str, float]:
        """``kafka/*``, ``off_policy/dropped`` and ``ledger/*``."""
        return self._metrics.summary(
            lag=await self.lag(),
            finished={tp: self.ledger.frontier.partition(tp.partition).finished() for tp in self._metrics.ends},
            pending_bytes=self.ledger.pending_bytes,
            skipped=self._rejections.tally.reasons,
            dead_letters=self._rejections.dead_letters,
        )

    def offsets(self) -> dict[TopicPartition, int]:
        """Where the live frontier stands, for lag displays only: a restart goes by its checkpoint."""
        lows = self.ledger.frontier.lows()
        return {TopicPartition(self._topic, number): low for number, low in lows.items() if low}

    async def commit(self) -> None:
        """Commit ``offsets``; for trainers that announce without transactions."""
        assert self._subscription is not None, "offsets are committed once the reader runs"
        try:
            await self._subscription.commit(self.offsets())
        except BusError as error:
            log.warning("offsets not committed; only lag displays are affected", error=str(error))

    async def _open(self) -> None:
        if self._begins_anew:
            await self._opening.begin_with_what_is_held(self.ledger)
        # The check comes first: on another topic the same offsets are other records, of which no row may be written.
        await self._opening.check(self.ledger)
        await self._rejections.open(self._bus, self._opening.client_id)
        self._subscription = await self._opening.open(self.ledger)
        self._initial_ends = await self._subscription.end_offsets()
        self._caught_up = False
        await self._check_caught_up(self._subscription)

    async def _close(self) -> None:
        if self._subscription is not None:
            await self._subscription.close()
        await self._rejections.close()

    async def _read_once(self) -> None:
        assert self._subscription is not None, "opened before the first read"
        self._apply_back_pressure(self._subscription)
        limit = self._settings.max_poll_records
        try:
            records = await self._subscription.poll(max_records=limit, timeout_s=POLL_S)
        except DataLossRefused:
            await self._reopen(self._subscription)
            return
        for index, record in enumerate(records, start=1):
            self._process(record)
            if index % RECORDS_PER_YIELD == 0:
                await asyncio.sleep(0)
        # Not before everything was read that was there: the missing sibling may be behind in another partition.
        if self._caught_up and not self._paused and len(records) < limit:
            for closed in self._filter.close_outdated():
                self._close_group(closed)
        await self._rejections.send()
        await self._metrics.look_at_ends(self._subscription)
        await self._check_caught_up(self._subscription)

    def _process(self, record: Record) -> None:
        if not self.ledger.record_read(record):
            return
        self._metrics.observe_record(len(record.value or b""))
        if (closed := self._filter.process(record)) is not None:
            self._close_group(closed)
            self._filter.note_closed(closed)  # last, since it may raise: the group is on the books by then

    async def _reopen(self, failed: Subscription) -> None:
        """Go on behind records that were deleted while reading, if that is accepted."""
        await failed.close()
        self._subscription = await self._opening.open(self.ledger)
        self._paused = False  # a fresh subscription is not

    async def _check_caught_up(self, subscription: Subscription) -> None:
        """Let groups be handed out once everything was read that was there at the start, or memory is full."""
        if self._caught_up:
            return
        # Paused, it may never get to those ends before a group is taken; waiting on would be for ever.
        if self._paused or _all_read(await subscription.positions(), self._initial_ends):
            self._caught_up = True
            self._arrived.set()

    def _apply_back_pressure(self, subscription: Subscription) -> None:
        wanted = self._settings.should_pause(self._paused, self.ledger.pending_bytes, has_ready=bool(self._ready))
        if wanted and not self._paused:
            subscription.pause(subscription.partitions())
        elif self._paused and not wanted:
            subscription.resume(subscription.partitions())
        self._paused = wanted

    def _close_group(self, closed: ClosedGroup) -> None:
        self.ledger.hold(closed)
        if (stale := closed.stale) is not None:
            self._age_out(closed.group, stale)
        elif closed.is_usable:
            self._ready.add(closed.group)
            self._arrived.set()
        else:
            self.ledger.mark_skipped(closed.group, SkipReason.GROUP_INCOMPLETE, closed.shortfall)

    def _age_out(self, group: Group, stale: Rejection) -> None:
        """All samples that are left of the group are skipped with the one that is too old."""
        detail = f"{stale.ref.trajectory_id} is too old, and its group with it: {stale.detail}"
        self.ledger.mark_skipped(group, stale.reason, detail)


def _all_read(positions: Mapping[TopicPartition, int], ends: Mapping[TopicPartition, int]) -> bool:
    return all(positions.get(tp, 0) >= end for tp, end in ends.items())


# Opening. Two things must never be passed in silence: records that retention deleted before they were read,
# and a topic that was deleted and created anew, whose offsets mean other records. The first can be accepted by name,
# the second never.

LostRange = tuple[str, int, int, int]
"""Topic, partition, first missing offset, the offset after the last missing one."""


@dataclass(frozen=True)
class TopicOpening:
    """How one reader opens its topic. ``accept_loss``: lost ranges get skip rows instead of ending the trainer."""

    bus: Bus
    topic: str
    client_id: str
    group_id: str
    accept_loss: bool

    async def open(self, ledger: Ledger) -> Subscription:
        """A subscription that goes on at the frontier's positions; accepted losses are in the ledger then.

        Raises:
            DataLossRefused: records are missing that were not trained, or this is another topic.
            BusUnavailable: no broker answers.
        """
        for attempt in range(1, OPEN_ATTEMPTS + 1):
            # The positions: at the beginning they are the low marks, after a loss while reading they are beyond them.
            start = {TopicPartition(self.topic, n): offset for n, offset in ledger.frontier.positions().items()}
            try:
                return await self.bus.subscribe(
                    [self.topic], client_id=self.client_id, start=start, group_id=self.group_id
                )
            except DataLossRefused as error:
                lost = await self._lost_ranges(start)
                # Nothing is missing by the broker's own account: then the refusal has another cause, which must show.
                if attempt == OPEN_ATTEMPTS or not lost:
                    raise
                if not self.accept_loss:
                    raise DataLossRefused(_loss_refused(lost), lost) from error
            for _, partition, first, end in lost:
                log.error("records were deleted before they were trained", partition=partition, first=first, end=end)
                ledger.record_loss(partition, first, end)
        raise AssertionError("unreachable: the last attempt raises or returns")

    async def begin_with_what_is_held(self, ledger: Ledger) -> None:
        """Let the frontier begin at the oldest records that there are.

        Raises:
            BusUnavailable: no broker answers.
        """
        begins, _ = await self._extents()
        ledger.frontier.begin_at({tp.partition: first for tp, first in begins.items()})

    async def is_elsewhere(self, ledger: Ledger) -> bool:
        """Whether the topic is not the one that the checkpoint was taken of, or cannot be told to be.

        Raises:
            BusUnavailable: no broker answers.
        """
        try:
            if await self.check(ledger):
                return False
        except DataLossRefused:
            return True
        # Nothing to compare: if it does not hold what comes next either, retention alone may have done that. Then
        # ``accept_loss`` is asked for on the checkpoint's own cluster, and this option on another one.
        begins, _ = await self._extents()
        lows = {TopicPartition(self.topic, n): low for n, low in ledger.frontier.lows().items() if low}
        return any(low < begins.get(tp, 0) for tp, low in lows.items())

    async def check(self, ledger: Ledger) -> bool:
        """Make sure that the topic is the one the checkpoint was taken of; false if it held nothing to compare.

        Raises:
            DataLossRefused: it ends before the frontier, or holds other records than it did.
            BusUnavailable: no broker answers, or it does not deliver the records to compare.
        """
        known = {TopicPartition(self.topic, n): record for n, record in ledger.known_records.items()}
        lows = {TopicPartition(self.topic, n): low for n, low in ledger.frontier.lows().items() if low}
        if not known and not lows:
            return False
        begins, ends = await self._extents()
        for tp, low in lows.items():
            _must_reach(tp, low, ends)
        for tp, record in known.items():
            _must_reach(tp, record.offset + 1, ends)
        # A known record that retention has deleted since can no longer be compared; all others are.
        held = {tp: record for tp, record in known.items() if record.offset >= begins.get(tp, 0)}
        if held:
            await self._compare(held)
        return bool(held)

    async def _extents(self) -> tuple[Mapping[TopicPartition, int], Mapping[TopicPartition, int]]:
        """The first offset held and the one after the last, by partition."""
        probe = await self.bus.subscribe([self.topic], client_id=f"{self.client_id}-probe", start="latest")
        try:
            return await probe.beginning_offsets(), await probe.end_offsets()
        finally:
            await probe.close()

    async def _lost_ranges(self, start: Mapping[TopicPartition, int]) -> list[LostRange]:
        begins, ends = await self._extents()
        for tp, offset in start.items():
            _must_reach(tp, offset, ends)
        return [
            (tp.topic, tp.partition, offset, begins[tp])
            for tp, offset in sorted(start.items())
            if offset < begins.get(tp, 0)
        ]

    async def _compare(self, known: Mapping[TopicPartition, KnownRecord]) -> None:
        found = await self._first_records({tp: record.offset for tp, record in known.items()})
        for tp, expected in known.items():
            name = _trajectory_id(found[tp])
            if found[tp].offset != expected.offset or name != expected.trajectory_id:
                wanted = f"trajectory {expected.trajectory_id!r} at offset {expected.offset}"
                raise DataLossRefused(_recreated(tp, wanted, repr(name)))

    async def _first_records(self, offsets: Mapping[TopicPartition, int]) -> dict[TopicPartition, Record]:
        """The first record at or after each offset."""
        reading = await self.bus.subscribe(
            [self.topic],
            client_id=f"{self.client_id}-compare",
            start=offsets,
            partitions=[tp.partition for tp in offsets],
        )
        found: dict[TopicPartition, Record] = {}
        try:
            async with asyncio.timeout(COMPARE_TIMEOUT_S):
                while len(found) < len(offsets):
                    for record in await reading.poll(timeout_s=POLL_S):
                        found.setdefault(TopicPartition(record.topic, record.partition), record)
                    reading.pause(found)  # one record of each is enough, and the long partitions would fill every poll
        except TimeoutError:
            missing = sorted(offsets.keys() - found.keys())
            raise BusUnavailable(
                f"expected a record of each of {missing} within {COMPARE_TIMEOUT_S:.0f} s, got none; check the broker"
            ) from None
        finally:
            await reading.close()
        return found


def _must_reach(tp: TopicPartition, offset: int, ends: Mapping[TopicPartition, int]) -> None:
    # Retention moves a partition's beginning and never its end: one that ends earlier than it did is another one.
    if ends.get(tp, 0) < offset:
        raise DataLossRefused(_recreated(tp, f"{offset} records", f"{ends.get(tp, 0)}"))


def _trajectory_id(record: Record) -> str | None:
    try:
        message = record.message()
    except WireError:
        return None
    return message.trajectory_id if isinstance(message, Trajectory) else None


def _recreated(tp: TopicPartition, expected: str, got: str) -> str:
    return (
        f"expected {expected} in {tp.topic}/{tp.partition}, as the checkpoint says, got {got}: the topic was deleted "
        "and recreated, or this is another broker; restore the topic or name the right broker; for a mirror or backup "
        "with the same trajectories, give --ingest.translate_offsets true; or begin a new run from the checkpoint's "
        "model (--model.path) under another name"
    )


def _loss_refused(lost: list[LostRange]) -> str:
    ranges = ", ".join(f"{topic}/{number} offsets {start} to {end - 1}" for topic, number, start, end in lost)
    return (
        f"expected to read on without loss, but retention deleted {ranges} before they were trained; give "
        "--ingest.accept_loss true to go on without them, each lost range then gets a retention_expired row; on "
        "another cluster than the checkpoint's, give --ingest.translate_offsets true instead"
    )
