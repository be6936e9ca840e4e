"""Rebuilds the dispatcher's state from the topics, each read up to the end it had at the start.

Order matters, and rests on causes alone; no time stamp is compared with any other. Heartbeats and control come first,
then our own orders, then what the trainer wrote: steps in the order of their topic, and each skip row by its lineage,
step and number, behind the report of that step (``in_order_of_causes``). Last come trajectories. Of those, only the
records are read that can belong to a group in flight: a group whose base version is b was sent after step b was
reported, so everything that steps up to b consumed lies before its samples. Orders expire before steps and
trajectories do, so the prompt cursor is the largest of what all three say. Positions below it that none of them
names were drawn and never ordered, by a dispatcher that ended in the middle of a window; they come first again.
The steps and skips are those of the trainer that ends groups; what it never reads is of no group that it will end.
With graders, what they have not finished is read before the trajectories: what they have is among these by then.
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
Positions = dict[TopicPartition, int]


@dataclass
class _TrainerRecords:
    """What the trainer wrote: its records in order, and how far each step had read the trajectories."""

    reports: list[StepReport] = field(default_factory=list)
    rows: list[SkipRecord] = field(default_factory=list)
    consumed: list[tuple[int, dict[int, int]]] = field(default_factory=list)

    def add(self, message: Message) -> None:
        if isinstance(message, StepReport):
            if message.carried_parts:
                # What was consumed before has its offsets on another cluster.
                self.consumed = [(number, {}) for number, _ in self.consumed]
            # Only the offsets behind what a step consumed are needed, and the references are most of a report.
            ends: dict[int, int] = {}
            for batch in message.micro_batches:
                for reference in batch:
                    ends[reference.partition] = max(ends.get(reference.partition, 0), reference.offset + 1)
            self.consumed.append((message.version.number, ends))
            self.reports.append(message.model_copy(update={"micro_batches": ()}))
        elif isinstance(message, SkipRecord):
            self.rows.append(message)

    def surviving(self) -> "_TrainerRecords":
        """Without what was undone: by it no group has ended, and nothing was consumed."""
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
    def set_back(self) -> int:
        """How many steps the newest lineage began below the highest of those before it."""
        newest = max((report.version.lineage for report in self.reports), default=0)
        begins = [report.version.number for report in self.reports if report.version.lineage == newest]
        before = [report.version.number for report in self.reports if report.version.lineage < newest]
        return max(0, max(before) - min(begins)) if before else 0

    def trained_long_ago(self, history_steps: int) -> frozenset[str]:
        """Groups that no resumed trainer will ask for again; their orders need not be held."""
        return frozenset(
            group_id
            for report in self.reports
            if report.version.number < self.number - history_steps
            for group_id in report.group_ids
        )

    def named(self) -> Iterator[str]:
        """Groups that the trainer has seen something of, so that there was an order for them."""
        for report in self.reports:
            yield from report.group_ids
        for row in self.rows:
            if row.group_id is not None:
                yield row.group_id

    def in_order_of_causes(self) -> Iterator[StepReport | SkipRecord]:
        """Reports in the order of their topic, and before each the rows that older versions wrote.

        A row of step n was written by its lineage after the report of n and before that of n + 1, whatever the clock of
        its machine said; rows of an older lineage came before the first report of the next.
        """
        rows = deque(sorted(self.rows, key=lambda row: (row.lineage, row.step, row.sequence)))
        for report in self.reports:
            while rows and (rows[0].lineage, rows[0].step) < report.version:
                yield rows.popleft()
            yield report
        yield from rows

    def ends_by(self, number: int) -> dict[int, int]:
        """By trajectory partition: the offset behind everything that steps up to this number consumed."""
        ends: dict[int, int] = {}
        for step, offsets in self.consumed:
            if step <= number:
                ends |= {partition: max(ends.get(partition, 0), end) for partition, end in offsets.items()}
        return ends


async def rebuild(
    bus: Bus, run: str, state: DispatchState, clock: Callable[[], float], *, has_graders: bool = False
) -> Positions:
    """Apply the history to a new state; returns where each topic is to be read on from. ``clock`` is monotonic.

    Raises:
        BusUnavailable: the broker does not answer, or the topics do not exist.
    """
    # Nothing was heard before this moment by this process, so all leases and time-outs begin with it.
    started = clock()
    positions: Positions = {}
    trainer = _TrainerRecords()
    present = [topic.full_name(run) for topic in (HEARTBEATS, CONTROL)]
    async for message in history(bus, present, await _recent(bus, present[0]), positions):
        # A finished run that is started again still has the old end on the topic; a new end arrives live.
        if not isinstance(message, RunFinished):
            state.recall(message, started)
    scope = state.policies.trainer_scope(run)
    async for message in history(bus, [STEPS.full_name(scope), SKIPS.full_name(scope)], "earliest", positions):
        trainer.add(message)
    # An operator may have had the trainer go on from a checkpoint that is older than any that is kept otherwise.
    state.ledger.remember_steps(trainer.set_back)
    named, trainer = set(trainer.named()), trainer.surviving()
    # Orders before what the trainer said of them, so that each report finds its groups in flight.
    await _restore_orders(bus, run, state, trainer.trained_long_ago(state.ledger.history_steps), started)
    for message in trainer.in_order_of_causes():
        state.observe(message, started)
    # Groups in flight reach the predictor below, with the prompt that was ordered.
    await replay(bus, run, state.predictor, skip=lambda group_id: state.flights.get(group_id) is not None)
    if has_graders:
        await _restore_ungraded(bus, run, state, positions, started)
    await _restore_samples(bus, run, state, trainer, positions, started)
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
            # Over for good, but its position still tells how far prompts were drawn.
            state.positions.see(order.position)
        elif isinstance(order, WorkOrder):
            state.restore(order, now)


async def _restore_samples(
    bus: Bus, run: str, state: DispatchState, trainer: _TrainerRecords, positions: Positions, now: float
) -> None:
    topic, oldest = TRAJECTORIES.full_name(run), state.ledger.oldest
    # No sample of a group in flight lies before what was consumed by its base version.
    last = trainer.number if oldest is None else state.policies.own_step(oldest)
    # That is known of this trainer's own steps: of older groups, all that is there is read.
    ends = {} if last is None else trainer.ends_by(last)
    start = {TopicPartition(topic, partition): end for partition, end in ends.items()}
    start = await _still_held(bus, topic, start)
    unread = [row for row in trainer.rows if state.policies.is_never_read(row)]
    async for record, message in _records(bus, [topic], start, positions):
        state.observe(message, now)
        if isinstance(message, Trajectory) and any(covers(row, record) for row in unread):
            state.never_read(message.group_id, now)


def covers(row: SkipRecord, record: Record) -> bool:
    """Whether a record is one of the trajectories that a row stands for."""
    return row.partition == record.partition and row.offset <= record.offset < row.end


async def _restore_ungraded(bus: Bus, run: str, state: DispatchState, positions: Positions, now: float) -> None:
    topic = UNGRADED.full_name(run)
    # What lies before these offsets was on the trajectories topic before the graders said so.
    start = await _still_held(bus, topic, await bus.group_offsets(topic, group_id=graders_group(run)))
    async for message in history(bus, [topic], start, positions):
        state.observe(message, now)


async def _still_held(bus: Bus, topic: str, start: Positions) -> Positions:
    """The same offsets, or the oldest that the broker still has; on another cluster a log may end before them."""
    subscription = await bus.subscribe([topic], client_id=CLIENT_ID)
    try:
        first, ends = await subscription.beginning_offsets(), await subscription.end_offsets()
    finally:
        await subscription.close()
    return {tp: min(max(offset, first.get(tp, 0)), ends[tp]) for tp, offset in start.items() if tp in ends}


async def _recent(bus: Bus, topic: str) -> Start:
    """Where the newest heartbeats begin; every worker writes one a second, and old ones say nothing."""
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
    """Every readable record up to the end offsets of now; ``positions`` receives where reading stopped.

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
    """The same, with where each stands."""
    subscription = await bus.subscribe(topics, client_id=client_id, start=start)
    try:
        ends = await subscription.end_offsets()
        while any(position < ends[tp] for tp, position in (await subscription.positions()).items()):
            on_poll()
            for record in await subscription.poll(timeout_s=1.0):
                if (message := message_of(record)) is not None:
                    yield record, message
        # Behind the last record that was yielded, which may lie past `ends`: who reads on misses and repeats nothing.
        positions |= await subscription.positions()
    finally:
        await subscription.close()
