"""Rebuilds the dispatcher's state from the topics. Each topic is read up to the end that it had at the start.

The order matters. It follows from cause and effect only; time stamps are never compared. The order is:

1. heartbeats and control;
2. work orders;
3. steps and skips of the trainer that ends groups: steps in the order of their topic, and each skip row after the
   report of its step, by lineage, step and number (``in_causal_order``);
4. with graders, samples that they have not finished. A sample that a grader finishes in the meantime is then among the
   trajectories, which are read later;
5. trajectories, but only records that can belong to a group in flight. A group with base version b was sent after step
   b was reported, so everything that steps up to b consumed has lower offsets than the group's samples.

Orders expire before steps and trajectories do, so the prompt cursor is the largest that any of the three gives.
Positions below it that none of them names were drawn and never ordered, by a dispatcher that exited in the middle of a
window; they are sent first. Records that the trainer never reads belong to no group that it will end.
"""

from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field

import structlog

from streamrl.bus.port import Bus, Record, Start, TopicPartition, message_of
from streamrl.producers.dispatch.state import DispatchState
from streamrl.producers.lengths.startup import replay
from streamrl.schemas.control import RunFinished
from streamrl.schemas.identifiers import graders_group
from streamrl.schemas.lineage import SurvivingSteps
from streamrl.schemas.messages import Message
from streamrl.schemas.reports import SkipRecord, StepReport
from streamrl.schemas.topics import CONTROL, HEARTBEATS, SKIPS, STEPS, TRAJECTORIES, UNGRADED, WORK_ORDERS
from streamrl.schemas.trajectories import Trajectory, WorkOrder

log = structlog.get_logger()

CLIENT_ID = "dispatcher"
RECENT_HEARTBEATS = 100_000
"""Heartbeats read at the end of each partition."""
Positions = dict[TopicPartition, int]


@dataclass
class _TrainerRecords:
    """The trainer's records in order, and how far each step had read the trajectories."""

    reports: list[StepReport] = field(default_factory=list)
    rows: list[SkipRecord] = field(default_factory=list)
    consumed: list[tuple[int, dict[int, int]]] = field(default_factory=list)

    def add(self, message: Message) -> None:
        if isinstance(message, StepReport):
            if message.carried_parts:
                # The offsets of earlier steps are those of another cluster.
                self.consumed = [(number, {}) for number, _ in self.consumed]
            # Only the end offsets are needed; the references are dropped because they are most of a report.
            ends: dict[int, int] = {}
            for batch in message.micro_batches:
                for reference in batch:
                    ends[reference.partition] = max(ends.get(reference.partition, 0), reference.offset + 1)
            self.consumed.append((message.version.number, ends))
            self.reports.append(message.model_copy(update={"micro_batches": ()}))
        elif isinstance(message, SkipRecord):
            self.rows.append(message)

    def surviving(self) -> "_TrainerRecords":
        """The records without undone steps and their rows, which ended no group and consumed nothing."""
        chain = SurvivingSteps(self.reports).chain
        kept = [number for number, report in enumerate(self.reports) if chain.holds(report.version)]
        return _TrainerRecords(
            [self.reports[number] for number in kept],
            [row for row in self.rows if chain.holds_row(row)],
            [self.consumed[number] for number in kept],
        )

    @property
    def number(self) -> int:
        """The highest version number reported."""
        return max((number for number, _ in self.consumed), default=0)

    @property
    def steps_set_back(self) -> int:
        """How many steps below the highest step of older lineages the newest lineage started."""
        newest = max((report.version.lineage for report in self.reports), default=0)
        own = [report.version.number for report in self.reports if report.version.lineage == newest]
        older = [report.version.number for report in self.reports if report.version.lineage < newest]
        return max(0, max(older) - min(own)) if older else 0

    def groups_trained_long_ago(self, history_steps: int) -> frozenset[str]:
        """Groups that no resumed trainer will need again, so their orders need not be kept."""
        return frozenset(
            group_id
            for report in self.reports
            if report.version.number < self.number - history_steps
            for group_id in report.group_ids
        )

    def named(self) -> Iterator[str]:
        """Groups that the trainer's records name, so each of them had an order."""
        for report in self.reports:
            yield from report.group_ids
        for row in self.rows:
            if row.group_id is not None:
                yield row.group_id

    def in_causal_order(self) -> Iterator[StepReport | SkipRecord]:
        """Reports in the order of their topic, and before each one the rows of older versions.

        A lineage writes a row of step n after its report of n and before its report of n + 1, independent of any clock.
        Rows of an older lineage were written before the first report of the next.
        """
        rows = deque(sorted(self.rows, key=lambda row: (row.lineage, row.step, row.sequence)))
        for report in self.reports:
            while rows and (rows[0].lineage, rows[0].step) < report.version:
                yield rows.popleft()
            yield report
        yield from rows

    def ends_by(self, number: int) -> dict[int, int]:
        """By trajectory partition: the offset after the last record that steps up to this number consumed."""
        ends: dict[int, int] = {}
        for step, offsets in self.consumed:
            if step <= number:
                ends |= {partition: max(ends.get(partition, 0), end) for partition, end in offsets.items()}
        return ends


async def rebuild(
    bus: Bus,
    run: str,
    state: DispatchState,
    clock: Callable[[], float],
    *,
    has_graders: bool = False,
    on_poll: Callable[[], None] = lambda: None,
) -> Positions:
    """Apply the history to a new state; returns the offsets from which to continue reading. ``clock`` is monotonic.

    ``on_poll`` is called while earlier samples are read.

    Raises:
        BusUnavailable: the broker does not answer, or the topics do not exist.
    """
    # This process has received nothing before now, so all leases and time-outs start now.
    started = clock()
    positions: Positions = {}
    trainer = _TrainerRecords()
    present = [topic.full_name(run) for topic in (HEARTBEATS, CONTROL)]
    async for message in history(bus, present, await _recent(bus, present[0]), positions):
        # The topic of a finished run that was restarted still has the old end; a new end arrives live.
        if not isinstance(message, RunFinished):
            state.recall(message, started)
    scope = state.policies.trainer_scope(run)
    async for message in history(bus, [STEPS.full_name(scope), SKIPS.full_name(scope)], "earliest", positions):
        trainer.add(message)
    # An operator may have resumed the trainer from a checkpoint older than those that are normally kept.
    state.ledger.remember_steps(trainer.steps_set_back)
    named, trainer = set(trainer.named()), trainer.surviving()
    # Orders before the trainer's records of them, so that each report finds its groups in flight.
    await _restore_orders(bus, run, state, trainer.groups_trained_long_ago(state.ledger.history_steps), started)
    for message in trainer.in_causal_order():
        state.observe(message, started)
    # The predictor skips groups in flight here: it learns them below, with the prompts of their orders.
    await replay(bus, run, state.predictor, skip=lambda group_id: state.flights.get(group_id) is not None)
    if has_graders:
        await _restore_ungraded(bus, run, state, positions, started)
    await _restore_samples(bus, run, state, trainer, positions, started)
    await state.chooser.recall(bus, run, on_poll)
    state.positions.find_unsent(named)
    state.resume(clock())
    state.extend(clock() - started)
    log.info(
        "dispatcher rebuilt",
        cursor=state.cursor,
        unsent=len(state.positions.unsent),
        in_flight=state.ledger.in_flight,
        version=str(state.ledger.current),
    )
    return positions


async def _restore_orders(bus: Bus, run: str, state: DispatchState, trained: frozenset[str], now: float) -> None:
    async for order in history(bus, [WORK_ORDERS.full_name(run)], "earliest", {}):
        if isinstance(order, WorkOrder) and order.group_id in trained:
            # It will not be needed again, but its positions show how far prompts were drawn.
            state.see_positions(order)
        elif isinstance(order, WorkOrder):
            state.restore(order, now)


async def _restore_samples(
    bus: Bus, run: str, state: DispatchState, trainer: _TrainerRecords, positions: Positions, now: float
) -> None:
    topic, oldest = TRAJECTORIES.full_name(run), state.ledger.oldest
    # All samples of a group in flight come after the records that steps up to its base version consumed.
    last = trainer.number if oldest is None else state.policies.own_step(oldest)
    # This is known only for this trainer's own steps. For groups from before them the whole topic is read.
    ends = {} if last is None else trainer.ends_by(last)
    start = {TopicPartition(topic, partition): end for partition, end in ends.items()}
    start = await _still_held(bus, topic, start)
    unread = [row for row in trainer.rows if state.policies.is_never_read(row)]
    async for record, message in _records(bus, [topic], start, positions):
        state.observe(message, now)
        if isinstance(message, Trajectory) and any(covers(row, record) for row in unread):
            state.end_unread_group(message.group_id, now)


def covers(row: SkipRecord, record: Record) -> bool:
    """Whether a record is one of the trajectories that a row covers."""
    return row.partition == record.partition and row.offset <= record.offset < row.end


async def _restore_ungraded(bus: Bus, run: str, state: DispatchState, positions: Positions, now: float) -> None:
    topic = UNGRADED.full_name(run)
    # Graders commit these offsets after writing to the trajectories topic, so everything before them is there.
    start = await _still_held(bus, topic, await bus.group_offsets(topic, group_id=graders_group(run)))
    async for message in history(bus, [topic], start, positions):
        state.observe(message, now)


async def _still_held(bus: Bus, topic: str, start: Positions) -> Positions:
    """The offsets, limited to the range that the broker has.

    Old records expire, and on another cluster a log may end before these offsets.
    """
    subscription = await bus.subscribe([topic], client_id=CLIENT_ID)
    try:
        first, ends = await subscription.beginning_offsets(), await subscription.end_offsets()
    finally:
        await subscription.close()
    return {tp: min(max(offset, first.get(tp, 0)), ends[tp]) for tp, offset in start.items() if tp in ends}


async def _recent(bus: Bus, topic: str) -> Start:
    """Offsets of the newest heartbeats: every worker writes one a second, and old ones are irrelevant."""
    subscription = await bus.subscribe([topic], client_id=CLIENT_ID, start="latest")
    try:
        first, ends = await subscription.beginning_offsets(), await subscription.end_offsets()
    finally:
        await subscription.close()
    return {tp: max(first[tp], ends[tp] - RECENT_HEARTBEATS) for tp in ends}


async def history(
    bus: Bus,
    topics: list[str],
    start: Start,
    positions: Positions,
    *,
    client_id: str = CLIENT_ID,
    on_poll: Callable[[], None] = lambda: None,
) -> AsyncIterator[Message]:
    """Every readable record up to the present end offsets; ``positions`` receives the offsets where reading stopped.

    ``on_poll`` is called before each poll.
    """
    async for _, message in _records(bus, topics, start, positions, client_id=client_id, on_poll=on_poll):
        yield message


async def _records(
    bus: Bus,
    topics: list[str],
    start: Start,
    positions: Positions,
    *,
    client_id: str = CLIENT_ID,
    on_poll: Callable[[], None] = lambda: None,
) -> AsyncIterator[tuple[Record, Message]]:
    """As ``history``, each message with its record."""
    subscription = await bus.subscribe(topics, client_id=client_id, start=start)
    try:
        ends = await subscription.end_offsets()
        while any(position < ends[tp] for tp, position in (await subscription.positions()).items()):
            on_poll()
            for record in await subscription.poll(timeout_s=1.0):
                if (message := message_of(record)) is not None:
                    yield record, message
        # After the last record yielded, which may be past `ends`: reading on from here misses and repeats nothing.
        positions |= await subscription.positions()
    finally:
        await subscription.close()
