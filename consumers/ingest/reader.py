"""The intake's driver: reads the trajectories topic and hands whole groups to the trainer, oldest first.

Invariants, each with a test of its name:
- undecodable_bytes_are_dead_lettered_and_nothing_else_is_lost;
- a_resumed_intake_neither_repeats_nor_loses;
- nothing_is_handed_out_before_what_was_there_was_read, as far as the high-water mark lets it, so that an intake that
  resumes hands out the same groups in the same order as one that never stopped;
- reading_pauses_above_the_high_water_mark, but never while no group is ready: then the missing siblings are still on
  the topic, and only reading on can complete a group. Correctness goes before the bound.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

import structlog

from bus.port import Bus, Record, Subscription, TopicPartition
from consumers.batching.micro_batches import Group
from consumers.ingest.filters import Place, Sorter
from consumers.ingest.frontier import Frontier
from consumers.ingest.groups import Closed, Patience, ReadyGroups
from consumers.ingest.ledger import Anchor, Fates, Ledger
from consumers.ingest.measures import IntakeMeasures
from consumers.ingest.rejections import Rejects, SkipTally
from consumers.ingest.settings import IntakeSettings
from schemas.errors import BusError, BusUnavailable, DataLossRefused, LifecycleError, StreamRLError, WireError
from schemas.identifiers import PolicyVersion
from schemas.reports import RecordRef, SkipReason
from schemas.settings import LoopSettings
from schemas.topics import TRAJECTORIES
from schemas.trajectories import Trajectory

# Opens the trajectories topic where a checkpoint says, and notices when it is not the topic it was. Two things must
# never be passed in silence: records that retention deleted before they were read (a hole), and a topic that was
# deleted and made anew, whose offsets mean other records. The first can be accepted by name, the second never.

log = structlog.get_logger()

ATTEMPTS = 5
"""Retention may go on deleting while the holes it left are looked at."""
ANCHOR_TIMEOUT_S = 30.0
POLL_S = 0.2

Hole = tuple[str, int, int, int]
"""Topic, partition, first missing offset, the offset after the last missing one."""


@dataclass(frozen=True)
class IntakeStart:
    """What a checkpoint says about the topic: finished records, the dedupe window, anchors and skip rows."""

    frontier: Frontier = field(default_factory=Frontier)
    dedupe: Mapping[str, Place] = field(default_factory=dict)
    anchors: Mapping[int, Anchor] = field(default_factory=dict)
    tally: SkipTally = field(default_factory=lambda: SkipTally(lineage=0))
    prompt_cursor: int = 0


@dataclass(frozen=True)
class Opening:
    """How one intake opens its topic. ``accept_loss``: holes get rows instead of ending the trainer."""

    bus: Bus
    topic: str
    client_id: str
    group_id: str
    accept_loss: bool

    async def open(self, ledger: Ledger) -> Subscription:
        """A subscription that goes on at the frontier's positions; accepted holes are in the books then.

        Raises:
            DataLossRefused: records are missing that were not trained, or this is another topic.
            BusUnavailable: no broker answers.
        """
        for attempt in range(1, ATTEMPTS + 1):
            start = {TopicPartition(self.topic, n): offset for n, offset in ledger.frontier.positions().items()}
            try:
                return await self.bus.subscribe(
                    [self.topic], client_id=self.client_id, start=start, group_id=self.group_id
                )
            except DataLossRefused as error:
                holes = await self._holes(start, ledger)
                if attempt == ATTEMPTS or not holes:
                    raise
                if not self.accept_loss:
                    raise DataLossRefused(_refusal(holes), holes) from error
            for _, partition, first, end in holes:
                log.error("records were deleted before they were trained", partition=partition, first=first, end=end)
                ledger.lose(partition, first, end)
        raise AssertionError("unreachable: the last attempt raises or returns")

    async def check(self, ledger: Ledger) -> None:
        """Make sure that the topic is the one the checkpoint was taken of.

        Raises:
            DataLossRefused: it ends before the frontier, or holds other records than it did.
            BusUnavailable: no broker answers, or it does not deliver the records to compare.
        """
        expected = {TopicPartition(self.topic, n): anchor for n, anchor in ledger.anchors.items()}
        lows = {TopicPartition(self.topic, n): low for n, low in ledger.frontier.lows().items() if low}
        if not expected and not lows:
            return
        begins, ends = await self._extents()
        for tp, low in lows.items():
            self._must_reach(tp, low, ends)
        for tp, anchor in expected.items():
            self._must_reach(tp, anchor.offset + 1, ends)
        held = {tp: anchor for tp, anchor in expected.items() if anchor.offset >= begins.get(tp, 0)}
        if held:
            await self._compare(held)

    async def _extents(self) -> tuple[Mapping[TopicPartition, int], Mapping[TopicPartition, int]]:
        """The first offset held and the one after the last, by partition."""
        probe = await self.bus.subscribe([self.topic], client_id=f"{self.client_id}-probe", start="latest")
        try:
            return await probe.beginning_offsets(), await probe.end_offsets()
        finally:
            await probe.close()

    async def _holes(self, start: Mapping[TopicPartition, int], ledger: Ledger) -> list[Hole]:
        begins, ends = await self._extents()
        for tp, offset in start.items():
            self._must_reach(tp, offset, ends)
        return [
            (tp.topic, tp.partition, offset, begins[tp])
            for tp, offset in sorted(start.items())
            if offset < begins.get(tp, 0)
        ]

    def _must_reach(self, tp: TopicPartition, offset: int, ends: Mapping[TopicPartition, int]) -> None:
        if ends.get(tp, 0) < offset:
            raise DataLossRefused(_recreated(tp, f"{offset} records", f"{ends.get(tp, 0)}"))

    async def _compare(self, anchors: Mapping[TopicPartition, Anchor]) -> None:
        found = await self._records({tp: anchor.offset for tp, anchor in anchors.items()})
        for tp, anchor in anchors.items():
            name = _trajectory_id(found[tp])
            if found[tp].offset != anchor.offset or name != anchor.trajectory_id:
                wanted = f"trajectory {anchor.trajectory_id!r} at offset {anchor.offset}"
                raise DataLossRefused(_recreated(tp, wanted, repr(name)))

    async def _records(self, offsets: Mapping[TopicPartition, int]) -> dict[TopicPartition, Record]:
        """The first record at or after each offset."""
        reading = await self.bus.subscribe(
            [self.topic],
            client_id=f"{self.client_id}-anchors",
            start=offsets,
            partitions=[tp.partition for tp in offsets],
        )
        found: dict[TopicPartition, Record] = {}
        try:
            async with asyncio.timeout(ANCHOR_TIMEOUT_S):
                while len(found) < len(offsets):
                    for record in await reading.poll(timeout_s=POLL_S):
                        found.setdefault(TopicPartition(record.topic, record.partition), record)
                    reading.pause(found)
        except TimeoutError:
            missing = sorted(offsets.keys() - found.keys())
            raise BusUnavailable(
                f"expected a record of each of {missing} within {ANCHOR_TIMEOUT_S:.0f} s, got none; check the broker"
            ) from None
        finally:
            await reading.close()
        return found


def positions_and_ends_meet(positions: Mapping[TopicPartition, int], ends: Mapping[TopicPartition, int]) -> bool:
    """Whether everything up to the ends was read."""
    return all(positions.get(tp, 0) >= end for tp, end in ends.items())


def _trajectory_id(record: Record) -> str | None:
    try:
        message = record.message()
    except WireError:
        return None
    return message.trajectory_id if isinstance(message, Trajectory) else None


def _recreated(tp: TopicPartition, expected: str, got: str) -> str:
    return (
        f"expected {expected} in {tp.topic}/{tp.partition}, as the checkpoint says, got {got}: the topic was deleted "
        "and recreated, or this is another broker; restore the topic or name the right broker, or begin a new run "
        "from the checkpoint's model (--model.path) under another name"
    )


def _refusal(holes: list[Hole]) -> str:
    first = ", ".join(f"{topic}/{number} offsets {start} to {end - 1}" for topic, number, start, end in holes)
    return (
        f"expected to read on without a gap, got a hole: retention deleted {first} before they were "
        "trained; give --intake.accept_loss true to go on without them, each hole then gets a retention_expired row"
    )


ROUND = 32
"""Records judged before other tasks of the event loop get their turn."""


class Intake:
    """One consumer of the trajectories topic, with its own frontier, skips and lag.

    ``current_version`` is asked for each trajectory; its first answer is where this lineage starts. Groups are to be
    finished by ``mark_trained`` and ``mark_skipped``, every sample once.
    """

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
        self._bus, self._settings, self._topic = bus, settings, TRAJECTORIES.full_name(run_name)
        start = start or IntakeStart()
        group_id = f"{run_name}.{algorithm}"
        self._opening = Opening(bus, self._topic, f"{algorithm}-intake", group_id, settings.accept_loss)
        self._rejects = Rejects(run_name, algorithm, clock, start.tally.copy())
        frontier = start.frontier.covering(loop.trajectory_partitions)
        books = frontier, self._rejects, lambda: current_version().number
        self._ledger = Ledger(*books, start.anchors, start.prompt_cursor)
        self._measures = IntakeMeasures(loop, clock)
        self._sorter = Sorter(
            loop,
            settings,
            reward_weights=reward_weights,
            current_version=current_version,
            ledger=self._ledger,
            measures=self._measures,
            finished=start.dedupe,
        )
        self._ready = ReadyGroups(lambda: current_version().number + 1)
        self._arrived = asyncio.Event()
        self._end: StreamRLError | None = None
        self._patience = Patience(clock)
        self._paused = False
        self._ends: dict[TopicPartition, int] | None = None
        self._subscription: Subscription | None = None

    async def run(self, stop: asyncio.Event) -> None:
        """Read until stopped.

        Consumes: trajectories, from the frontier on.
        Produces: groups for ``next_group``; skips; dead-letters.
        Waits for: new records; while paused, for the trainer.
        On failure: ``next_group`` raises what happened here, so that the trainer never waits for a dead reader.
        On stop: closes its clients; what was not finished is read again after a restart.
        """
        self._end = None
        try:
            await self._open()
            while not stop.is_set():
                await self._read_once()
            self._end = LifecycleError("expected a running intake, got one that was stopped")
        except StreamRLError as error:
            self._end = error
            raise
        except BaseException as error:
            self._end = StreamRLError(f"reading trajectories ended with {error!r}")
            self._end.__cause__ = error
            raise
        finally:
            self._arrived.set()
            await self.close()

    async def next_group(self) -> Group:
        """The oldest ready group, once there is one; raises what ``ready_group`` does."""
        while (group := self.ready_group()) is None:
            await self._arrived.wait()
        return group

    def ready_group(self) -> Group | None:
        """The oldest group that this step may train, by creation, without samples that are too old by now; or none.

        Raises:
            StreamRLError: the reader ended; this is what ended it.
        """
        if self._end is not None:
            raise self._end
        while self._ready and self._ends == {}:
            if (fresh := self._still_fresh(self._ready.take())) is not None:
                return fresh
        self._arrived.clear()
        return None

    def mark_skipped(self, group: Group, reason: SkipReason, detail: str) -> None:
        """The trainer does not train these samples of a group: rows are written and the records are finished.

        Raises:
            LifecycleError: they are finished already.
        """
        self._ledger.skip_samples(group, reason, detail)

    def mark_trained(self, refs: Iterable[RecordRef]) -> None:
        """These records are in the weights now.

        Raises:
            LifecycleError: one of them is finished already.
        """
        self._ledger.mark_trained(refs)

    def frontier(self) -> Frontier:
        """The live frontier: what the weights in memory contain, and what was skipped. Copy it to keep it."""
        return self._ledger.frontier

    def snapshot(self) -> IntakeStart:
        """Where an intake goes on that starts from this moment. Claim it only after ``settled``."""
        frontier = self.frontier()
        return IntakeStart(
            frontier=frontier.copy(),
            dedupe={name: at for name, at in self._sorter.dedupe.ids.items() if frontier.is_done(*at)},
            anchors=dict(self._ledger.anchors),
            tally=self._rejects.tally.copy(),
            prompt_cursor=self.prompt_cursor,
        )

    @property
    def prompt_cursor(self) -> int:
        """All prompts whose groups ended lie below this position of the prompt source."""
        return self._ledger.prompt_cursor

    def fates(self) -> Fates:
        """Records read by this process, and what became of them."""
        return self._ledger.fates()

    @property
    def counts_by_reason(self) -> dict[str, int]:
        """Skipped trajectories since this process started."""
        return dict(self._rejects.counts)

    @property
    def pending_bytes(self) -> int:
        """Bytes of trajectories held: in groups that are incomplete, ready, or handed out and not finished."""
        return self._ledger.pending_bytes

    async def settled(self) -> None:
        """Wait until every skip row written so far is on the bus; call it before a checkpoint claims them.

        Raises:
            BusError: the broker does not take them.
        """
        await self._rejects.settled()

    async def lag(self) -> dict[TopicPartition, int]:
        """Records on the topic that are not finished, read or not, by partition; of the last look at its ends."""
        assert self._subscription is not None, "lag is known once the intake runs"
        return self._measures.lag(await self._subscription.positions(), self.frontier())

    async def metrics(self) -> dict[str, float]:
        """``kafka/*``, ``off_policy/dropped`` and ``ledger/*``."""
        return self._measures.summary(
            lag=await self.lag(),
            pending_bytes=self.pending_bytes,
            skipped=self.counts_by_reason,
            dead_letters=self._rejects.dead_letters,
        )

    def offsets(self) -> dict[TopicPartition, int]:
        """Where the live frontier stands, for lag displays only."""
        return {TopicPartition(self._topic, number): low for number, low in self.frontier().lows().items() if low}

    async def commit(self) -> None:
        """Tell the broker where we are, for lag displays only; for trainers that announce without transactions."""
        assert self._subscription is not None, "offsets are committed once the intake runs"
        try:
            await self._subscription.commit(self.offsets())
        except BusError as error:
            log.warning("offsets not committed; only lag displays are affected", error=str(error))

    async def close(self) -> None:
        """Release the clients; whatever ended the reading, the rows that say why go out first."""
        if self._subscription is not None:
            await self._subscription.close()
        if self._rejects.publisher is not None:
            with contextlib.suppress(BusError):
                await self._rejects.send()
            await self._rejects.publisher.close()

    async def _open(self) -> None:
        await self._opening.check(self._ledger)
        self._rejects.publisher = await self._bus.publisher(self._opening.client_id)
        self._subscription = await self._opening.open(self._ledger)
        self._ends = await self._subscription.end_offsets()
        await self._look_for_the_ends(self._subscription)

    async def _read_once(self) -> None:
        assert self._subscription is not None, "opened before the first read"
        self._apply_back_pressure(self._subscription)
        limit = self._settings.max_poll_records
        try:
            records = await self._subscription.poll(max_records=limit, timeout_s=POLL_S)
        except DataLossRefused:
            await self._reopen(self._subscription)
            return
        for index, record in enumerate(records):
            if self._ledger.read(record):
                self._measures.observe_record(len(record.value or b""))
                if (closed := self._sorter.take(record, self._patience.listened_s)) is not None:
                    self._close_group(closed)
            if index % ROUND == ROUND - 1:
                await asyncio.sleep(0)
        caught_up = len(records) < limit and not self._paused
        await self._patience.listen(self._subscription, len(records), caught_up=caught_up)
        for closed in self._sorter.assembler.expire(self._patience.listened_s):
            self._close_group(closed)
        await self._rejects.send()
        await self._measures.look_at_ends(self._subscription)
        await self._look_for_the_ends(self._subscription)

    async def _reopen(self, failed: Subscription) -> None:
        """Go on behind a hole that opened while reading, if that is accepted."""
        await failed.close()
        self._subscription = await self._opening.open(self._ledger)
        self._paused = False

    async def _look_for_the_ends(self, subscription: Subscription) -> None:
        """Let groups be handed out once everything was read that was there at the start, or memory is full."""
        if self._ends and (self._paused or positions_and_ends_meet(await subscription.positions(), self._ends)):
            self._ends = {}
            self._arrived.set()

    def _apply_back_pressure(self, subscription: Subscription) -> None:
        wanted = self._settings.should_pause(self._paused, self.pending_bytes, has_ready=bool(self._ready))
        if wanted and not self._paused:
            subscription.pause(subscription.partitions())
        elif self._paused and not wanted:
            subscription.resume(subscription.partitions())
        self._paused = wanted

    def _close_group(self, closed: Closed) -> None:
        group = closed.group
        self._ledger.hold(closed)
        if closed.is_usable:
            self._ready.add(group)
            self._arrived.set()
        else:
            self.mark_skipped(group, SkipReason.GROUP_INCOMPLETE, closed.shortfall)

    def _still_fresh(self, group: Group) -> Group | None:
        """The group without samples that are too old by now, as if they had been when they were read."""
        refusals = self._sorter.outdated(group)
        if not refusals:
            return group
        refused = {refusal.ref for refusal in refusals}
        rest = replace(group, samples=tuple(sample for sample in group.samples if sample.ref not in refused))
        if self._ledger.refuse(group, refusals):
            return rest
        self.mark_skipped(rest, SkipReason.GROUP_INCOMPLETE, f"{len(rest.samples)} usable samples were left")
        return None
