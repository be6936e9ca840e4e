"""Reads the trajectories topic and hands whole groups to the trainer: oldest first, or as ``sampling.py`` chooses.

Where reading begins after a restore, and whether the topic is still that of the checkpoint, ``opening.py`` finds out.
Invariants, each with a test of its name:
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

from streamrl.bus.port import Bus, Record, Subscription, TopicPartition
from streamrl.consumers.batching.micro_batches import Group
from streamrl.consumers.ingest.filters import IntakeRules, TrajectoryFilter
from streamrl.consumers.ingest.frontier import Frontier
from streamrl.consumers.ingest.groups import ClosedGroup, Rejection
from streamrl.consumers.ingest.ledger import FinishedGroups, KnownRecord, Ledger
from streamrl.consumers.ingest.metrics import IngestMetrics
from streamrl.consumers.ingest.opening import TopicOpening, Translation, translate
from streamrl.consumers.ingest.rejections import RejectionWriter, SkipTally
from streamrl.consumers.ingest.sampling import open_window
from streamrl.consumers.ingest.versions import CountedVersions
from streamrl.schemas.errors import BusError, DataLossRefused, LifecycleError, StreamRLError
from streamrl.schemas.reports import SkipReason
from streamrl.schemas.topics import TRAJECTORIES

log = structlog.get_logger()

POLL_S = 0.2
"""Longest wait for records: how soon a stop is noticed on a silent topic."""
RECORDS_PER_YIELD = 32
"""Records processed before other tasks of the event loop get their turn: a few milliseconds of decoding."""


@dataclass(frozen=True)
class ReadStream:
    """Whose trajectories are read, and for whom. ``scope``: prefix of the topics that it writes, which are its
    trainer's own.
    """

    bus: Bus
    run_name: str
    scope: str
    algorithm: str


@dataclass(frozen=True)
class Horizon:
    """When this version number was the current one, or a moment after, the topic reached to these ends."""

    version: int
    ends: Mapping[TopicPartition, int]


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

    ``versions`` say how old a trajectory is and where reading begins; their first answer is where the lineage starts.
    ``current_step``: of the trainer, asked for each row. ``start``: where an earlier reader left off; None: nowhere.
    Each sample of a group that was handed out is to be finished once, by ``ledger.mark_trained`` or
    ``ledger.mark_skipped``.
    """

    def __init__(
        self,
        stream: ReadStream,
        rules: IntakeRules,
        versions: CountedVersions,
        current_step: Callable[[], int],
        start: ReaderSnapshot | None = None,
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        scope, algorithm, settings = stream.scope, stream.algorithm, rules.settings
        is_fresh = start is None or not start.frontier.partitions
        start = start or ReaderSnapshot()
        # Where nothing of an earlier life is trained, what expired is no loss; nor to one that joined later.
        self._begins_anew = (bool(rules.orphans_through) or versions.joined_late) and is_fresh
        self._bus, self._topic = stream.bus, TRAJECTORIES.full_name(stream.run_name)
        self._versions, self._settings = versions, settings
        self._opening = TopicOpening(
            stream.bus, self._topic, f"{algorithm}-reader", f"{scope}.{algorithm}", settings.accept_loss
        )
        self._rejections = RejectionWriter(scope, algorithm, clock, start.tally.copy())
        self.ledger = Ledger(
            start.frontier.covering(rules.loop.trajectory_partitions),
            self._rejections,
            current_step,
            start.known_records,
            start.prompt_cursor,
            start.finished_groups.copy(),
        )
        self._metrics = IngestMetrics(rules.loop, clock, monotonic)
        self._filter = TrajectoryFilter(rules, versions, self.ledger, self._metrics)
        self._ready = open_window(rules.loop, settings, lambda: versions.next_step, may_choose=versions.may_choose)
        self._arrived = asyncio.Event()
        self._ended_by: StreamRLError | None = None
        self._withheld = versions.is_paused
        self._horizon: Horizon | None = None
        # Groups are withheld until everything was read that the topic held when it was opened.
        self._initial_ends: dict[TopicPartition, int] = {}
        self._caught_up = self._paused = False
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

    async def _open(self) -> None:
        if self._begins_anew:
            await self._opening.begin_with_what_is_held(self.ledger, self._versions.begin)
            self._begins_anew = False
        # The check comes first: on another topic the same offsets are other records, of which no row may be written.
        await self._opening.check(self.ledger)
        await self._rejections.open(self._bus, self._opening.client_id)
        self._subscription = await self._opening.open(self.ledger)
        self._initial_ends = await self._subscription.end_offsets()
        self._caught_up = False
        await self._check_caught_up(self._subscription)

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
            for closed in await self._outdated_groups(self._subscription):
                self._close_group(closed)
        await self._rejections.send()
        await self._look_at_ends(self._subscription)
        await self._check_caught_up(self._subscription)

    def _apply_back_pressure(self, subscription: Subscription) -> None:
        wanted = self._settings.should_pause(self._paused, self.ledger.pending_bytes, has_ready=bool(self._ready))
        withheld = self._versions.is_paused
        if self._withheld and not withheld:
            self._arrived.set()  # what was ready all the time may be taken again
        self._withheld, wanted = withheld, wanted or withheld
        if wanted and not self._paused:
            subscription.pause(subscription.partitions())
        elif self._paused and not wanted:
            subscription.resume(subscription.partitions())
        self._paused = wanted

    async def _reopen(self, failed: Subscription) -> None:
        """Go on behind records that were deleted while reading, if that is accepted."""
        await failed.close()
        self._subscription = await self._opening.open(self.ledger)
        self._paused = False  # a fresh subscription is not

    def _process(self, record: Record) -> None:
        if self.ledger.record_read(record):
            self._metrics.observe_record(len(record.value or b""))
            if (closed := self._filter.process(record)) is not None:
                self._close_group(closed)
                self._filter.note_closed(closed)  # last, since it may raise: the group is on the books by then

    def _close_group(self, closed: ClosedGroup) -> None:
        self.ledger.hold(closed)
        if (stale := closed.stale) is not None:
            self._age_out(closed.group, stale)
        elif closed.is_usable:
            self._ready.push(closed.group)
            self._arrived.set()
        else:
            self.ledger.mark_skipped(closed.group, SkipReason.GROUP_INCOMPLETE, closed.shortfall)

    def _age_out(self, group: Group, stale: Rejection) -> None:
        """All samples that are left of the group are skipped with the one that is too old."""
        detail = f"{stale.ref.trajectory_id} is too old, and its group with it: {stale.detail}"
        self.ledger.mark_skipped(group, stale.reason, detail)

    async def _outdated_groups(self, subscription: Subscription) -> list[ClosedGroup]:
        if not self._versions.moves_alone:
            return self._filter.close_outdated()
        # The version may be far ahead of the records read so far: use the one from when the topic held only those.
        horizon = self._horizon
        if horizon is None or not _all_read(await subscription.positions(), horizon.ends):
            return []
        self._horizon = None
        return self._filter.close_outdated(horizon.version)

    async def _look_at_ends(self, subscription: Subscription) -> None:
        before, version = self._metrics.ends, self._versions.current.number
        await self._metrics.look_at_ends(subscription)
        if self._horizon is None and self._metrics.ends is not before:
            self._horizon = Horizon(version, self._metrics.ends)

    async def _check_caught_up(self, subscription: Subscription) -> None:
        """Let groups be handed out once everything was read that was there at the start, or memory is full."""
        if self._caught_up:
            return
        # Paused, it may never get to those ends before a group is taken; waiting on would be for ever.
        is_full = self._paused and not self._withheld
        if is_full or _all_read(await subscription.positions(), self._initial_ends):
            self._caught_up = True
            self._arrived.set()

    async def _close(self) -> None:
        if self._subscription is not None:
            await self._subscription.close()
        await self._rejections.close()

    async def next_group(self, places: int | None = None) -> Group:
        """The next ready group, once there is one; raises what ``ready_group`` does."""
        while (group := self.ready_group(places)) is None:
            await self._arrived.wait()
        return group

    def ready_group(self, places: int | None = None) -> Group | None:
        """The next group that this step may train, none of whose samples is too old by now; or none.

        ``places``: groups that the step to come still lacks; None: all.

        Raises:
            StreamRLError: the reader ended; this is what ended it.
        """
        if self._ended_by is not None:
            raise self._ended_by
        while self._ready and self._caught_up and not self._withheld:
            group = self._ready.pop(places)
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

    async def is_drained(self) -> bool:
        """Whether everything was read that the topic holds, and no group of it is ready."""
        if self._subscription is None or not self._caught_up or self._ready:
            return False
        return _all_read(await self._subscription.positions(), await self._subscription.end_offsets())

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


def _all_read(positions: Mapping[TopicPartition, int], ends: Mapping[TopicPartition, int]) -> bool:
    return all(positions.get(tp, 0) >= end for tp, end in ends.items())
