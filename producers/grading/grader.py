"""The grader's driver: ungraded trajectories in, trajectories with all of their rewards out.

A worker puts what needs a slow judge on the ungraded topic, in the partition that the trajectory is to have; a grader
scores it and puts the trajectory into the same partition of the trajectories topic. Graders are members of a consumer
group, which shares out the partitions.

Delivery is at least once, as a worker's is: a record is committed when the broker has its trajectory, so a member that
is killed loses nothing, and what it had in hand is graded again by another. The trajectory's name is the same, so the
trainer tells the repeat (``duplicate``), whatever the judge said the second time. Not in transactions: one that a
killed member left open would hold back the trainer's reading, and a dead grader shall delay nobody else.

Invariants:
- nothing_ungraded_is_committed: the group's offset never passes a record whose trajectory is not on its topic;
- a_failing_judge_loses_no_sample: after its last attempt the trajectory goes on without that reward and with the
  reason, by which its group can end, and the ungraded record is among the dead letters.
"""

import asyncio
from collections.abc import Callable, Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import structlog
from pydantic import ValidationError

from streamrl.bus.clocks import Clocks
from streamrl.bus.dead_letters import dead_letter
from streamrl.bus.port import Bus, GroupMember, Outgoing, Record, Subscription, TopicPartition, message_of
from streamrl.producers.generation.outbox import Outbox
from streamrl.producers.grading.scoring import Scorer, scored
from streamrl.producers.rewards.runner import ScoreRequest
from streamrl.schemas.codec import CONTINUATIONS_HEADER
from streamrl.schemas.control import RunFinished
from streamrl.schemas.errors import BusError, BusUnavailable, DataLossRefused, MalformedFrame, WireError
from streamrl.schemas.identifiers import graders_group
from streamrl.schemas.topics import CONTROL, DEAD_LETTERS, TRAJECTORIES, UNGRADED
from streamrl.schemas.trajectories import UngradedTrajectory

log = structlog.get_logger()

POLL_S = 0.2
COMMIT_S = 0.25
"""Between two commits. Where a partition changes hands, what ended within this time is graded again, and what ran."""
PARTITIONS_AT_ONCE = 4
"""So many partitions may have ``concurrency`` records in hand each; more wait on the topic."""
FAILED = "GradingFailed"
"""By which dead letters of samples are counted that a judge gave no reward."""


@dataclass
class PartitionProgress:
    """How far the grading of one partition is: records are begun in order and end in any.

    Invariant nothing_unfinished_is_committed: ``low`` is never above a record that was begun and has not ended.
    ``position``: the next offset to be read. ``committed``: what the group was told last.
    """

    position: int | None = None
    committed: int | None = None
    # In the order in which they were read, which is that of their offsets.
    _unfinished: dict[int, None] = field(default_factory=dict)

    @property
    def unfinished(self) -> int:
        """Records that were begun and have not ended."""
        return len(self._unfinished)

    @property
    def low(self) -> int | None:
        """Every record below this offset has ended; None: nothing was read yet."""
        return next(iter(self._unfinished), self.position)

    def begin(self, offset: int) -> None:
        """The next record was read."""
        if self.committed is None:
            self.committed = offset  # where the group begins anyway
        self._unfinished[offset] = None
        self.position = offset + 1

    def end(self, offset: int) -> None:
        """What was made of a record is on its topic."""
        self._unfinished.pop(offset, None)


@dataclass
class Grader:
    """One per process; as many as wanted. ``concurrency``: records of one partition in hand at a time.

    ``attempts``: calls of a function for one completion. ``on_tick`` is told, by name, of every turn of the loop.
    ``graded`` and ``failed`` count samples, those that a judge gave no reward among the former.
    """

    bus: Bus
    run_name: str
    grader_id: str
    scorer: Scorer
    attempts: int = 3
    concurrency: int = 64
    clocks: Clocks = field(default_factory=Clocks)
    on_tick: Callable[[str], None] = lambda name: None
    graded: int = field(init=False, default=0)
    failed: int = field(init=False, default=0)

    async def run(self, stop: asyncio.Event) -> None:
        """Grade what is the member's share.

        Consumes: its share of the ungraded topic, from where the group is; control, from now on.
        Produces: trajectories; dead letters of what does not decode or got no reward.
        Waits for: records; a share; the judges; the broker.
        On failure: raises (``RewardLoadError``, ``BusError``); others take its share over.
        On stop: ends within one poll, as it does when the run has finished; what is in hand is left to others.
        """
        client_id = f"grader-{self.grader_id}"
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self.scorer.close)
            # Before it joins: a share that is not worked on would lie idle.
            await self.scorer.start()
            publisher = await self.bus.publisher(client_id)
            stack.push_async_callback(publisher.close)
            control = await self.bus.subscribe([CONTROL.full_name(self.run_name)], client_id=client_id, start="latest")
            stack.push_async_callback(control.close)
            topic, group_id = UNGRADED.full_name(self.run_name), graders_group(self.run_name)
            member = await self.bus.join(topic, group_id=group_id, client_id=client_id)
            stack.push_async_callback(member.close)
            share = _Share(self, member, Outbox(publisher, PARTITIONS_AT_ONCE * self.concurrency), client_id)
            stack.push_async_callback(share.close)
            log.info("grader ready", grader=self.grader_id, rewards=self.scorer.names)
            finished = False
            while not stop.is_set() and not finished:
                self.on_tick("grading")
                await share.turn()
                records = await control.poll(timeout_s=0.0)
                finished = any(isinstance(message_of(record), RunFinished) for record in records)
        log.info("grader ended", grader=self.grader_id, graded=self.graded, failed=self.failed)


@dataclass
class _Share:
    """What the group has given to this member: partitions, how far each is, and the tasks that grade."""

    grader: Grader
    member: GroupMember
    outbox: Outbox
    client_id: str
    partitions: dict[TopicPartition, PartitionProgress] = field(default_factory=dict)
    subscription: Subscription | None = None
    tasks: "dict[asyncio.Task[None], TopicPartition]" = field(default_factory=dict)
    _paused: set[TopicPartition] = field(default_factory=set)
    _committed_at: float = 0.0

    async def turn(self) -> None:
        """One turn of the loop: follow the share, read, start, commit."""
        try:
            await self._follow()
            await self._read()
        except DataLossRefused as error:
            log.error("ungraded trajectories expired before they were graded", error=str(error))
            await self._open(from_what_is_held=True)
        except BusUnavailable as error:
            log.warning("no broker answers the grader", error=str(error))
            await asyncio.sleep(POLL_S)
        self._raise_failures()
        if self.grader.clocks.monotonic() - self._committed_at >= COMMIT_S:
            await self._commit()

    async def close(self) -> None:
        """Leave what is in hand to others; what has ended is committed."""
        await self._abandon(self.tasks)
        await self._commit()
        if self.subscription is not None:
            await self.subscription.close()

    async def _follow(self) -> None:
        share = await self.member.partitions()
        if share == self.partitions.keys():
            return
        lost = self.partitions.keys() - share
        await self._abandon([task for task, tp in self.tasks.items() if tp in lost])
        gained = share - self.partitions.keys()
        offsets = await self._offsets() if gained else {}
        # Only now: if the broker did not answer, the next turn finds the same difference.
        for tp in lost:
            del self.partitions[tp]
        for tp in gained:
            self.partitions[tp] = PartitionProgress(offsets.get(tp), offsets.get(tp))
        log.info("grader's share", grader=self.grader.grader_id, partitions=sorted(tp.partition for tp in share))
        await self._open()

    async def _offsets(self) -> dict[TopicPartition, int]:
        topic, group_id = UNGRADED.full_name(self.grader.run_name), graders_group(self.grader.run_name)
        return await self.grader.bus.group_offsets(topic, group_id=group_id)

    async def _open(self, *, from_what_is_held: bool = False) -> None:
        """Read the share on from where it is; or, where that is gone, from the oldest record there is."""
        if self.subscription is not None:
            await self.subscription.close()
            self.subscription = None
        self._paused.clear()
        if not self.partitions:
            return
        topic, numbers = UNGRADED.full_name(self.grader.run_name), [tp.partition for tp in self.partitions]
        start = {tp: found.position for tp, found in self.partitions.items() if found.position is not None}
        if from_what_is_held:
            probe = await self.grader.bus.subscribe(
                [topic], client_id=self.client_id, start="latest", partitions=numbers
            )
            try:
                first = await probe.beginning_offsets()
            finally:
                await probe.close()
            start = {tp: max(offset, first[tp]) for tp, offset in start.items()}
        self.subscription = await self.grader.bus.subscribe(
            [topic], client_id=self.client_id, start=start, partitions=numbers
        )

    async def _read(self) -> None:
        room = PARTITIONS_AT_ONCE * self.grader.concurrency - len(self.tasks)
        if self.subscription is None or room <= 0:
            await self._wait_for_an_end()
            return
        busy = {tp for tp, found in self.partitions.items() if found.unfinished >= self.grader.concurrency}
        self.subscription.pause(busy - self._paused)
        self.subscription.resume(self._paused - busy)
        self._paused = busy
        # No more at once than one partition may have: all of them may be of one.
        most = min(room, self.grader.concurrency)
        for record in await self.subscription.poll(max_records=most, timeout_s=POLL_S):
            tp = TopicPartition(record.topic, record.partition)
            self.partitions[tp].begin(record.offset)
            task = asyncio.create_task(self._grade(record, self.partitions[tp]))
            self.tasks[task] = tp

    async def _wait_for_an_end(self) -> None:
        if self.tasks:
            await asyncio.wait(self.tasks, timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED)
        else:
            await asyncio.sleep(POLL_S)

    def _raise_failures(self) -> None:
        for task in [task for task in self.tasks if task.done()]:
            del self.tasks[task]
            task.result()

    async def _abandon(self, tasks: "Iterable[asyncio.Task[None]]") -> None:
        found = list(tasks)
        for task in found:
            task.cancel()
        if found:
            await asyncio.wait(found)
        for task in found:
            self.tasks.pop(task, None)

    async def _commit(self) -> None:
        self._committed_at = self.grader.clocks.monotonic()
        lows = ((tp, found.low, found.committed) for tp, found in self.partitions.items())
        offsets = {tp: low for tp, low, committed in lows if low is not None and low != committed}
        if not offsets:
            return
        try:
            await self.member.commit(offsets)
        # The group may be sharing out anew, or the broker away: the next commit says the same and more.
        except BusError as error:
            log.warning("grader's offsets not committed", grader=self.grader.grader_id, error=str(error))
            return
        for tp, low in offsets.items():
            self.partitions[tp].committed = low

    async def _grade(self, record: Record, progress: PartitionProgress) -> None:
        """Score one record and deliver what became of it."""
        try:
            message = record.message()
            if not isinstance(message, UngradedTrajectory):
                raise MalformedFrame(f"expected an ungraded trajectory, got a {message.SCHEMA}")
        except WireError as error:
            # Nobody knows whose it was: the dispatcher misses the sample, and orders it again.
            await self._dead_letter(record, type(error).__name__, str(error))
        else:
            await self._deliver(record, message)
        progress.end(record.offset)

    async def _deliver(self, record: Record, message: UngradedTrajectory) -> None:
        grader = self.grader
        try:
            request = ScoreRequest(message.prompt, message.completion_text, message.token_ids.tolist())
        except ValidationError as error:
            names = grader.scorer.names
            rewards, errors = dict.fromkeys(names), dict.fromkeys(names, f"its prompt does not decode: {error}"[:300])
        else:
            scores = await scored(grader.scorer, request, grader.attempts)
            rewards, errors = scores.rewards, scores.errors
        if errors:
            grader.failed += 1
            reasons = "; ".join(f"{name}: {reason}" for name, reason in sorted(errors.items()))
            log.warning("no reward from a judge", trajectory=message.trajectory_id, reason=reasons)
            await self._dead_letter(record, FAILED, f"after {grader.attempts} attempts: {reasons}")
        trajectory = message.graded(rewards, errors)
        graded = Outgoing.of(
            TRAJECTORIES.full_name(grader.run_name), trajectory, key=message.group_id, partition=record.partition
        )
        kept = tuple(header for header in record.headers if header[0] == CONTINUATIONS_HEADER)
        await self.outbox.deliver(graded._replace(headers=(*graded.headers, *kept)))
        grader.graded += 1

    async def _dead_letter(self, record: Record, error_class: str, reason: str) -> None:
        topic = DEAD_LETTERS.full_name(self.grader.run_name)
        await self.outbox.deliver(dead_letter(record, topic, error_class, reason, now=self.grader.clocks.time_of_day()))
