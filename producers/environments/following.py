"""What becomes of the groups that are played: ended by the trainer of the policy that is served, or not yet.

Each policy's trainer ends every group once, in its own time. All of them are followed, so that a promotion costs no
reading: the count of the policy that is served now is what counts.

Invariants, each with a test of its name:
- the_served_policy_ends_groups: what other trainers ended makes no room, and no end but its own is the run's;
- what_a_promoted_policy_never_reads_is_not_waited_for: groups that were there before its instance was attached.
"""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import structlog
from cachetools import FIFOCache

from streamrl.bus.port import Bus, Record, TopicPartition, message_of
from streamrl.producers.dispatch.policies import OnePolicyDispatch, PolicyDispatch
from streamrl.producers.dispatch.recovery import Positions, covers, history
from streamrl.schemas.control import Control
from streamrl.schemas.errors import DataLossRefused, StreamRLError, TopicMissing
from streamrl.schemas.identifiers import SERVED_POLICY, scope_of
from streamrl.schemas.messages import Message
from streamrl.schemas.reports import SkipRecord, StepReport
from streamrl.schemas.topics import CONTROL, SKIPS, STEPS, TRAJECTORIES

log = structlog.get_logger()

CLIENT_ID = "environments"
POLL_S = 0.5
RETRY_S = 1.0


@dataclass
class PolicyAccount:
    """Of one policy: how many groups its trainer has ended, its last report, and rows on what it never reads, of which
    it is not known yet which groups that were.
    """

    seen: FIFOCache[str, None]
    ended: int = 0
    last: StepReport | None = None
    unread: list[SkipRecord] = field(default_factory=list)


@dataclass
class GroupAccounts:
    """By policy, what its trainer said of groups of these data sets. Pure.

    ``most``: groups under way at most. ``shared``: which policies share the run, and whose end of a group counts.
    """

    datasets: frozenset[str]
    most: int
    shared: PolicyDispatch = field(default_factory=OnePolicyDispatch)
    policies: dict[str, PolicyAccount] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.of(SERVED_POLICY)

    def of(self, policy: str) -> PolicyAccount:
        """Its account, from now on."""
        # Of a group several samples may be named, and none after so many others.
        return self.policies.setdefault(policy, PolicyAccount(FIFOCache(64 * self.most)))

    @property
    def current(self) -> PolicyAccount:
        """Of the policy that is served."""
        return self.of(self.shared.trained)

    @property
    def is_finished(self) -> bool:
        """Whether the policy that is served has taken its last step, and not before it was."""
        last = self.current.last
        return last is not None and self.shared.ends_run(last)

    def follow(self, message: Message | None) -> str | None:
        """Take one message of control into account; the policy, beside the run's own, whose trainer it is about."""
        if not isinstance(message, Control):
            return None
        self.shared.observe(message)
        if (policy := self.shared.trainer_in(message)) is not None:
            # Whatever it is told: what it ended before is of no group that is played now.
            self.of(policy)
        return policy

    def take(self, policy: str, message: Message | None) -> None:
        """Take what the trainer of a policy said into account."""
        account = self.of(policy)
        match message:
            case StepReport():
                account.last = message
                self.note(account, message.group_ids)
            case SkipRecord() if self.shared.is_never_read(message):
                account.unread.append(message)
            case SkipRecord() if message.group_id is not None:
                self.note(account, (message.group_id,))

    def note(self, account: PolicyAccount, group_ids: Iterable[str]) -> None:
        """Groups that have ended, of ours or not; each counts once, however many of its samples are named."""
        for group_id in group_ids:
            if group_id.partition("/")[0] in self.datasets and group_id not in account.seen:
                account.seen[group_id] = None
                account.ended += 1


@dataclass
class GroupFollower:
    """Keeps the accounts; ``changed`` is called after each look. ``on_tick`` is told of every turn."""

    bus: Bus
    run_name: str
    accounts: GroupAccounts
    changed: Callable[[], None]
    on_tick: Callable[[str], None] = lambda name: None
    _positions: Positions = field(default_factory=dict)
    _began_at: Positions = field(default_factory=dict)
    """Where the trajectories ended when the first group was begun."""
    _gone: set[str] = field(default_factory=set)

    async def run(self) -> None:
        """Follow until the policy that is served has taken its last step.

        Consumes: control, from the beginning; steps and skips of the run's trainer and of those that were attached so
            far from now on, of later ones from the beginning; after a promotion the trajectories that its trainer will
            not read.
        Produces: nothing but the accounts.
        Waits for: trainers, the coordinator.
        On failure: goes on where it was once the broker answers.
        On stop: cancelled.
        """
        while not self.accounts.is_finished:
            try:
                await self._follow()
            except StreamRLError as error:
                if isinstance(error, DataLossRefused):
                    self._positions = {}
                if isinstance(error, TopicMissing) and await self._lacks_instances():
                    continue
                log.warning("no room is made while the broker is away", error=str(error))
                await asyncio.sleep(RETRY_S)

    async def _follow(self) -> None:
        """Follow the policies that are known, until another one is, or the end."""
        if not self._positions:
            self._positions = await self._begin()
        known = self._known
        policies = self._topics(known)
        topics = [CONTROL.full_name(self.run_name), *policies]
        # Topics that are not among these positions are of an instance that was attached meanwhile: all of them.
        start = {tp: offset for tp, offset in self._positions.items() if tp.topic in topics}
        subscription = await self.bus.subscribe(topics, client_id=CLIENT_ID, start=start)
        try:
            while not self.accounts.is_finished and self._known == known:
                self.on_tick("follow")
                for record in await subscription.poll(timeout_s=POLL_S):
                    self._take(record, policies)
                self._positions |= await subscription.positions()
                await self._note_unread()
                self.changed()
        finally:
            await subscription.close()

    @property
    def _known(self) -> tuple[str, ...]:
        return tuple(policy for policy in self.accounts.policies if policy not in self._gone)

    async def _lacks_instances(self) -> bool:
        """Leave out instances whose topics were deleted, until something is said of them again; whether any were."""
        before = len(self._gone)
        for policy in self._known:
            if policy == SERVED_POLICY:
                continue
            try:
                topics = self._topics([policy])
                await (await self.bus.subscribe(topics, client_id=CLIENT_ID, start="latest")).close()
            except TopicMissing:
                self._gone.add(policy)
            except StreamRLError:
                return False
        return len(self._gone) > before

    def _topics(self, policies: Iterable[str]) -> dict[str, str]:
        """Topics of what their trainers say, with the policy of each."""
        return {
            topic.full_name(scope_of(self.run_name, policy)): policy for policy in policies for topic in (STEPS, SKIPS)
        }

    def _take(self, record: Record, policies: dict[str, str]) -> None:
        message = message_of(record)
        if (policy := policies.get(record.topic)) is not None:
            self.accounts.take(policy, message)
            return
        if (told_of := self.accounts.follow(message)) is not None:
            self._gone.discard(told_of)

    async def _begin(self) -> Positions:
        """Read which policies there are; where all their topics, and the trajectories, end now."""
        positions: Positions = {}
        control = history(self.bus, [CONTROL.full_name(self.run_name)], "earliest", positions, client_id=CLIENT_ID)
        async for message in control:
            self.accounts.follow(message)
        trajectories = TRAJECTORIES.full_name(self.run_name)
        topics = [*self._topics(self._known), trajectories]
        # A subscription at the end is the only way to ask where the end is.
        now = await self.bus.subscribe(topics, client_id=CLIENT_ID, start="latest")
        try:
            ends = dict(await now.positions())
        finally:
            await now.close()
        self._began_at = self._began_at or {tp: end for tp, end in ends.items() if tp.topic == trajectories}
        return positions | {tp: end for tp, end in ends.items() if tp.topic != trajectories}

    async def _note_unread(self) -> None:
        """Of a policy that was promoted: groups that were on the topic before its instance was attached."""
        account = self.accounts.current
        if not account.unread:
            return
        rows, topic = account.unread, TRAJECTORIES.full_name(self.run_name)
        ends: Positions = {}
        for row in rows:
            tp = TopicPartition(topic, row.partition)
            ends[tp] = max(ends.get(tp, 0), row.end)
        subscription = await self.bus.subscribe([topic], client_id=CLIENT_ID, start=await self._held(topic))
        try:
            while any(at < ends.get(tp, 0) for tp, at in (await subscription.positions()).items()):
                self.on_tick("follow")
                for record in await subscription.poll(timeout_s=POLL_S):
                    if record.key and any(covers(row, record) for row in rows):
                        self.accounts.note(account, (record.key,))
        finally:
            await subscription.close()
        account.unread = []

    async def _held(self, topic: str) -> Positions:
        """Where the trajectories of the groups that are played begin, as far as the broker still has them."""
        subscription = await self.bus.subscribe([topic], client_id=CLIENT_ID, start="latest")
        try:
            first, ends = await subscription.beginning_offsets(), await subscription.end_offsets()
        finally:
            await subscription.close()
        return {tp: min(max(self._began_at.get(tp, 0), first[tp]), end) for tp, end in ends.items()}
