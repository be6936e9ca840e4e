"""The grader's loop: it reads ungraded trajectories and writes trajectories with all their rewards.

A worker writes a trajectory that needs a slow judge to the ungraded topic, in the trajectory's final partition. A
grader scores it, and writes it to the same partition of the trajectories topic. Graders are members of a consumer
group, which distributes the partitions.

Trajectories are delivered at least once, as by workers. A record is committed when the broker has its trajectory. So a
killed member loses nothing: another one grades its records in progress again. The trajectory's name is the same, so the
trainer recognises the repeat (``duplicate``), even if the judge's second score differs. Transactions are not used: a
killed member's open transaction would delay the trainer's reading.

Invariants:
- only_graded_records_are_committed: the group's offset never passes a record whose trajectory is not on its topic;
- a_failing_judge_loses_no_sample: after the last attempt the trajectory is delivered without that reward and with the
  reason, so that its group can end. The ungraded record becomes a dead letter.
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
"""Seconds between two commits. When a partition moves to another member, records that ended since the last commit are
graded again, and so are running ones."""
PARTITIONS_AT_ONCE = 4
"""Partitions that may have ``concurrency`` records in progress each; further records wait on the topic."""
ATTEMPTS = 3
"""Calls of a function for one completion, if it fails: an endpoint that was busy answers again after some seconds."""
FAILED = "GradingFailed"
"""Error class of the dead letters of samples without a judge's reward."""


@dataclass
class PartitionProgress:
    """How far the grading of one partition is: records are started in order, and end in any order.

    Invariant only_finished_records_are_committed: ``low`` is never above a record that was started and has not ended.
    ``position``: the next offset to read. ``committed``: the offset that was last committed.
    """

    position: int | None = None
    committed: int | None = None
    # In the order of their offsets, in which they were read.
    _unfinished: dict[int, None] = field(default_factory=dict)

    @property
    def unfinished(self) -> int:
        """Records that were started and have not ended."""
        return len(self._unfinished)

    @property
    def low(self) -> int | None:
        """The offset below which every record has ended; None before the first read."""
        return next(iter(self._unfinished), self.position)

    def begin(self, offset: int) -> None:
        """Note the next record, which was read."""
        if self.committed is None:
            self.committed = offset  # the group starts here anyway
        self._unfinished[offset] = None
        self.position = offset + 1

    def end(self, offset: int) -> None:
        """Note a record whose result is on its topic."""
        self._unfinished.pop(offset, None)


@dataclass
class Grader:
    """Grades a share of the ungraded trajectories; a run may have any number of graders, one per process.

    ``concurrency``: records of one partition in progress at a time. ``attempts``: calls of a function for one
    completion. ``on_tick`` is called with the loop's name at every turn. ``graded`` counts samples; ``failed`` counts
    those of them without a judge's reward.
    """

    bus: Bus
    run_name: str
    grader_id: str
    scorer: Scorer
    attempts: int = ATTEMPTS
    concurrency: int = 64
    clocks: Clocks = field(default_factory=Clocks)
    on_tick: Callable[[str], None] = lambda name: None
    graded: int = field(init=False, default=0)
    failed: int = field(init=False, default=0)

    async def run(self, stop: asyncio.Event) -> None:
        """Grade this member's share of the trajectories.

        Consumes: its share of the ungraded topic, from the group's offsets; control, from now on.
        Produces: trajectories; dead letters of records that do not decode or got no reward.
        Waits for: records; a share; the judges; the broker.
        On failure: raises (``RewardLoadError``, ``BusError``); other members take over its share.
        On stop: returns within one poll, as it does when the run has finished; other members grade its records in
            progress.
        """
        client_id = f"grader-{self.grader_id}"
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self.scorer.close)
            # Start before joining, so that no partition is assigned to a member that cannot grade yet.
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
    """The partitions that the group has assigned to this member, their progress, and the tasks that grade."""

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
        """One turn of the loop: update the share, read records, start tasks, commit."""
        try:
            await self._follow()
            await self._read()
        except DataLossRefused as error:
            log.error("ungraded trajectories expired before they were graded", error=str(error))
            await self._open(skip_expired=True)
        except BusUnavailable as error:
            log.warning("grader cannot reach a broker", error=str(error))
            await asyncio.sleep(POLL_S)
        self._raise_failures()
        if self.grader.clocks.monotonic() - self._committed_at >= COMMIT_S:
            await self._commit()

    async def close(self) -> None:
        """Commit finished records, and leave those in progress to other members."""
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
        # Changed only now: if the broker did not answer above, the next turn finds the same difference.
        for tp in lost:
            del self.partitions[tp]
        for tp in gained:
            self.partitions[tp] = PartitionProgress(offsets.get(tp), offsets.get(tp))
        log.info("grader's share", grader=self.grader.grader_id, partitions=sorted(tp.partition for tp in share))
        await self._open()

    async def _offsets(self) -> dict[TopicPartition, int]:
        topic, group_id = UNGRADED.full_name(self.grader.run_name), graders_group(self.grader.run_name)
        return await self.grader.bus.group_offsets(topic, group_id=group_id)

    async def _open(self, *, skip_expired: bool = False) -> None:
        """Subscribe to the share at its positions; with ``skip_expired`` no earlier than the oldest records held."""
        if self.subscription is not None:
            await self.subscription.close()
            self.subscription = None
        self._paused.clear()
        if not self.partitions:
            return
        topic, numbers = UNGRADED.full_name(self.grader.run_name), [tp.partition for tp in self.partitions]
        start = {tp: found.position for tp, found in self.partitions.items() if found.position is not None}
        if skip_expired:
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
            await self._wait_for_a_task()
            return
        busy = {tp for tp, found in self.partitions.items() if found.unfinished >= self.grader.concurrency}
        self.subscription.pause(busy - self._paused)
        self.subscription.resume(self._paused - busy)
        self._paused = busy
        # At most as many as one partition may have, because all of them may be of one partition.
        most = min(room, self.grader.concurrency)
        for record in await self.subscription.poll(max_records=most, timeout_s=POLL_S):
            tp = TopicPartition(record.topic, record.partition)
            self.partitions[tp].begin(record.offset)
            task = asyncio.create_task(self._grade(record, self.partitions[tp]))
            self.tasks[task] = tp

    async def _wait_for_a_task(self) -> None:
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
        # The group may be rebalancing, or the broker unavailable: the next commit includes these offsets.
        except BusError as error:
            log.warning("grader's offsets not committed", grader=self.grader.grader_id, error=str(error))
            return
        for tp, low in offsets.items():
            self.partitions[tp].committed = low

    async def _grade(self, record: Record, progress: PartitionProgress) -> None:
        """Score one record, and deliver the trajectory or a dead letter."""
        try:
            message = record.message()
            if not isinstance(message, UngradedTrajectory):
                raise MalformedFrame(f"expected an ungraded trajectory, got a {message.SCHEMA}")
        except WireError as error:
            # The record's sample is unknown, so it stays missing and the dispatcher orders it again.
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
            log.warning("sample delivered without a judge's reward", trajectory=message.trajectory_id, reason=reasons)
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
