"""Reads the trajectories topic and hands complete groups to the trainer: oldest first, or as ``sampling.py`` chooses.

``opening.py`` finds where reading starts after a restore, and whether the topic is still the checkpoint's.
Invariants, each with a test of its name:
- undecodable_bytes_are_dead_lettered_and_nothing_else_is_lost;
- a_resumed_reader_neither_repeats_nor_loses;
- no_group_is_handed_out_before_the_backlog_is_read, as far as the high-water mark allows. So a resumed reader hands out
  the same groups in the same order as one that never stopped;
- reading_pauses_above_the_high_water_mark, but never while no group is ready: then missing siblings are still on the
  topic, and only reading can complete a group. Correctness takes precedence over the bound.
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
from streamrl.consumers.ingest.skip_streak import SkipStreak
from streamrl.consumers.ingest.versions import CountedVersions
from streamrl.schemas.errors import DataLossRefused, LifecycleError, StreamRLError
from streamrl.schemas.reports import SkipReason
from streamrl.schemas.topics import TRAJECTORIES

log = structlog.get_logger()

POLL_S = 0.2
"""Longest wait for records, in seconds, and so until a stop is noticed on a silent topic."""
RECORDS_PER_YIELD = 32
"""Records processed before other tasks of the event loop may run: a few milliseconds of decoding."""


@dataclass(frozen=True)
class ReadStream:
    """The run whose trajectories are read, and the trainer that reads them.

    ``scope``: prefix of the topics that the reader writes, which belong to its trainer.
    """

    bus: Bus
    run_name: str
    scope: str
    algorithm: str


@dataclass(frozen=True)
class Horizon:
    """The topic's ends when this version number was current, or a moment later."""

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
    """One consumer of the trajectories topic. ``ledger``: the states of its records.

    ``versions``: give the age of a trajectory and the start of reading; their first answer is the version with which
    the lineage starts. ``current_step``: gives the trainer's step, for each row. ``start``: an earlier reader's
    snapshot to continue from. The trainer must finish each sample of a group that it was handed exactly once, with
    ``ledger.mark_trained`` or ``ledger.mark_skipped``.
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
        # Expired records are no loss if earlier lineages are skipped anyway, or if this reader joined the stream later.
        self._ignores_expired = (bool(rules.orphans_through) or versions.joined_late) and is_fresh
        self._bus, self._topic = stream.bus, TRAJECTORIES.full_name(stream.run_name)
        self._versions, self._settings, self._limits = versions, settings, rules.limits
        self._opening = TopicOpening(stream.bus, self._topic, f"{algorithm}-reader", settings.accept_loss)
        self._rejections = RejectionWriter(scope, algorithm, clock, start.tally.copy())
        self.ledger = Ledger(
            start.frontier.covering(rules.loop.trajectory_partitions),
            self._rejections,
            current_step,
            start.known_records,
            start.prompt_cursor,
            start.finished_groups.copy(),
            SkipStreak(rules.limits.end_after(rules.loop)),
        )
        self._metrics = IngestMetrics(rules.loop, clock, monotonic)
        self._filter = TrajectoryFilter(rules, versions, self.ledger, self._metrics)
        self._ready = open_window(rules.loop, settings, lambda: versions.next_step, may_choose=versions.may_choose)
        self._arrived = asyncio.Event()
        self._ended_by: StreamRLError | None = None
        self._withheld = versions.is_paused
        self._horizon: Horizon | None = None
        # Groups are withheld until everything that the topic held when it was opened has been read.
        self._initial_ends: dict[TopicPartition, int] = {}
        self._caught_up = self._paused = False
        self._subscription: Subscription | None = None

    async def run(self, stop: asyncio.Event) -> None:
        """Read until stopped.

        Consumes: trajectories, from the frontier on.
        Produces: groups for ``next_group``; skips; dead letters.
        Waits for: new records; while paused, for the trainer.
        On failure: ``next_group`` raises the error too, so that the trainer never waits for a dead reader.
        On stop: closes its clients; unfinished records are read again after a restart.
        """
        self._ended_by = None
        try:
            await self._open()
            while not stop.is_set():
                await self._read_once()
            self._ended_by = LifecycleError("expected a running reader of trajectories, found a stopped one")
        except StreamRLError as error:
            self._ended_by = error
            raise
        except BaseException as error:  # cancellation too: the trainer must not wait for a dead reader
            self._ended_by = StreamRLError(f"reading trajectories ended with {error!r}")
            self._ended_by.__cause__ = error
            raise
        finally:
            # Wake the trainer first: closing still waits for the broker.
            self._arrived.set()
            await self._close()

    async def _open(self) -> None:
        if self._ignores_expired:
            await self._opening.start_at_held_records(self.ledger, self._versions.begin)
            self._ignores_expired = False
        # Checked before rows are written: on another topic the same offsets mean other records.
        await self._opening.check(self.ledger)
        await self._rejections.open(self._bus, self._opening.client_id)
        self._subscription = await self._opening.open(self.ledger)
        self._initial_ends = await self._subscription.end_offsets()
        self._caught_up = False
        await self._check_caught_up(self._subscription)

    async def _read_once(self) -> None:
        assert self._subscription is not None, "open before the first read"
        self._apply_back_pressure(self._subscription)
        limit = self._limits.max_poll_records
        try:
            records = await self._subscription.poll(max_records=limit, timeout_s=POLL_S)
        except DataLossRefused:
            await self._reopen(self._subscription)
            return
        for index, record in enumerate(records, start=1):
            self._process(record)
            if index % RECORDS_PER_YIELD == 0:
                await asyncio.sleep(0)
        # Only after the backlog is read: a missing sibling may still be unread in another partition.
        if self._caught_up and not self._paused and len(records) < limit:
            for closed in await self._outdated_groups(self._subscription):
                self._close_group(closed)
        await self._rejections.send()
        await self._look_at_ends(self._subscription)
        await self._check_caught_up(self._subscription)

    def _apply_back_pressure(self, subscription: Subscription) -> None:
        wanted = self._limits.should_pause(self._paused, self.ledger.pending_bytes, has_ready=bool(self._ready))
        withheld = self._versions.is_paused
        if self._withheld and not withheld:
            self._arrived.set()  # groups that were ready during the pause may be taken again
        self._withheld, wanted = withheld, wanted or withheld
        if wanted and not self._paused:
            subscription.pause(subscription.partitions())
        elif self._paused and not wanted:
            subscription.resume(subscription.partitions())
        self._paused = wanted

    async def _reopen(self, failed: Subscription) -> None:
        """Continue after records that were deleted during reading, if the settings accept their loss."""
        await failed.close()
        self._subscription = await self._opening.open(self.ledger)
        self._paused = False  # a new subscription is not paused

    def _process(self, record: Record) -> None:
        if self.ledger.record_read(record):
            self._metrics.observe_record(len(record.value or b""))
            if (closed := self._filter.process(record)) is not None:
                self._close_group(closed)
                self._filter.count_refused_prompt(closed)  # last: it may raise

    def _close_group(self, closed: ClosedGroup) -> None:
        self.ledger.hold(closed)
        if (outdated := closed.outdated) is not None:
            self._skip_outdated(closed.group, outdated)
        elif closed.is_usable:
            self._ready.push(closed.group)
            self._arrived.set()
        else:
            self.ledger.mark_skipped(closed.group, SkipReason.GROUP_INCOMPLETE, closed.shortfall)

    def _skip_outdated(self, group: Group, outdated: Rejection) -> None:
        """Skip all remaining samples of the group, because one of its samples is outdated."""
        detail = f"{outdated.ref.trajectory_id} is outdated, and its group with it: {outdated.detail}"
        self.ledger.mark_skipped(group, outdated.reason, detail)

    async def _outdated_groups(self, subscription: Subscription) -> list[ClosedGroup]:
        if not self._versions.moves_alone:
            return self._filter.close_outdated()
        # The present version may be far ahead of the records read. Use the version that was current when the topic held
        # only records that are read by now.
        horizon = self._horizon
        if horizon is None or not _all_read(await subscription.positions(), horizon.ends):
            return []
        self._horizon = None
        return self._filter.close_outdated(horizon.version)

    async def _look_at_ends(self, subscription: Subscription) -> None:
        before, version = self._metrics.ends, self._versions.current.number
        await self._metrics.refresh_ends(subscription)
        if self._horizon is None and self._metrics.ends is not before:
            self._horizon = Horizon(version, self._metrics.ends)

    async def _check_caught_up(self, subscription: Subscription) -> None:
        """Allow groups to be handed out once the backlog at the start is read, or memory is full."""
        if self._caught_up:
            return
        # A reader that pauses for memory reaches these ends only after a group is taken, so waiting would never end.
        is_full = self._paused and not self._withheld
        if is_full or _all_read(await subscription.positions(), self._initial_ends):
            self._caught_up = True
            self._arrived.set()

    async def _close(self) -> None:
        if self._subscription is not None:
            await self._subscription.close()
        await self._rejections.close()

    async def next_group(self, places: int | None = None) -> Group:
        """Wait for the next ready group; raises what ``ready_group`` raises."""
        while (group := self.ready_group(places)) is None:
            await self._arrived.wait()
        return group

    def ready_group(self, places: int | None = None) -> Group | None:
        """The next group that this step may train and whose samples are all fresh enough; None if there is none.

        ``places``: number of groups that the next step still lacks; None: all.

        Raises:
            StreamRLError: the reader has ended, with this error.
        """
        if self._ended_by is not None:
            raise self._ended_by
        while self._ready and self._caught_up and not self._withheld:
            group = self._ready.pop(places)
            if (outdated := self._filter.outdated(group)) is None:
                return group
            self._skip_outdated(group, outdated)
        # No await since the check above, so no arrival is missed in between.
        self._arrived.clear()
        return None

    async def carry_over(self) -> Translation | None:
        """Before reading: translate the checkpoint to another cluster's topic; None: the topic is the checkpoint's own.

        Without ``ingest.translate_offsets`` this does nothing, and another topic is refused when reading starts.

        Raises:
            BusUnavailable: no broker answers.
        """
        if not self._settings.translate_offsets or not await self._opening.is_other_topic(self.ledger):
            return None
        ledger, client_id = self.ledger, self._opening.client_id
        found = await translate(self._bus, self._topic, client_id, ledger.is_finished, ledger.frontier)
        ledger.move(found.frontier, found.known_records)
        log.warning(
            "continuing on another cluster: finished trajectories were found by their names",
            found=len(found.carried),
            not_found_at_most=found.absent,
        )
        return found

    def snapshot(self) -> ReaderSnapshot:
        """The reader's state, to continue from this moment. A checkpoint may store it only after ``flush``."""
        ledger = self.ledger
        return ReaderSnapshot(
            frontier=ledger.frontier.copy(),
            # Unfinished groups are not in it: their records are read again, and must not count as repeats then.
            finished_groups=ledger.finished_groups.copy(),
            known_records=dict(ledger.known_records),
            tally=self._rejections.tally.copy(),
            prompt_cursor=ledger.prompt_cursor,
        )

    async def flush(self) -> None:
        """Wait until every skip row written so far is on the bus; call it before a checkpoint counts them.

        Raises:
            BusError: the broker does not accept them.
        """
        await self._rejections.flush()

    async def is_drained(self) -> bool:
        """Whether everything on the topic has been read, and no group is ready."""
        if self._subscription is None or not self._caught_up or self._ready:
            return False
        return _all_read(await self._subscription.positions(), await self._subscription.end_offsets())

    async def lag(self) -> dict[TopicPartition, int]:
        """By partition, records that are not finished, whether read or not, up to the last known ends of the topic."""
        assert self._subscription is not None, "lag is known once the reader runs"
        return self._metrics.lag(await self._subscription.positions(), self.ledger.frontier)

    async def metrics(self) -> dict[str, float]:
        """The metrics ``kafka/*``, ``off_policy/dropped`` and ``ledger/*``."""
        return self._metrics.summary(
            lag=await self.lag(),
            finished={tp: self.ledger.frontier.partition(tp.partition).finished() for tp in self._metrics.ends},
            pending_bytes=self.ledger.pending_bytes,
            skipped=self._rejections.tally.reasons,
            dead_letters=self._rejections.dead_letters,
        )

    def offsets(self) -> dict[TopicPartition, int]:
        """The live frontier's low marks, for lag displays only: a restart uses its checkpoint."""
        lows = self.ledger.frontier.lows()
        return {TopicPartition(self._topic, number): low for number, low in lows.items() if low}


def _all_read(positions: Mapping[TopicPartition, int], ends: Mapping[TopicPartition, int]) -> bool:
    return all(positions.get(tp, 0) >= end for tp, end in ends.items())
