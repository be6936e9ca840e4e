"""Opens the trajectories topic where a checkpoint says, and notices when it is not the topic it was.

Two things must never be passed in silence: records that retention deleted before they were read (a hole), and a topic
that was deleted and made anew, whose offsets mean other records. The first can be accepted by name, the second never.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

import structlog

from consumers.intake.frontier import Frontier
from consumers.intake.judging.dedupe import Place
from consumers.intake.ledger import Anchor, Ledger
from consumers.intake.tally import SkipTally
from schemas.errors import BusUnavailable, DataLossRefused, WireError
from schemas.messages.trajectories import Trajectory
from schemas.ports.bus import Bus, Record, Subscription, TopicPartition

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
