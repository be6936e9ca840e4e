"""Follows which played groups the trainer of the served policy has ended.

Each policy's trainer ends every group once, at its own pace. The follower counts the groups of all trainers, so that
nothing has to be read again after a promotion. The count of the currently served policy is the one that matters.

Invariants, each with a test of its name:
- only_the_served_policy_ends_groups: groups that other trainers ended make no room, and only its trainer ends the run;
- groups_before_a_promoted_policy_are_not_awaited: the promoted policy never reads groups that were on the topic before
  its instance was attached, so they count as ended.
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
    """One policy's account: the number of groups that its trainer has ended, and the trainer's last report.

    ``seen``: ids of ended groups. ``unread``: rows on records that the trainer never reads, whose groups are not known
    yet.
    """

    seen: FIFOCache[str, None]
    ended: int = 0
    last: StepReport | None = None
    unread: list[SkipRecord] = field(default_factory=list)


@dataclass
class GroupAccounts:
    """An account for each policy, of groups of these data sets. Pure.

    ``most``: most groups in flight. ``shared``: the policies that share the run, and which of them is served.
    """

    datasets: frozenset[str]
    most: int
    shared: PolicyDispatch = field(default_factory=OnePolicyDispatch)
    policies: dict[str, PolicyAccount] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.of(SERVED_POLICY)

    def of(self, policy: str) -> PolicyAccount:
        """A policy's account, which is opened if there is none."""
        # Reports may name several samples of a group, but none after so many other groups.
        return self.policies.setdefault(policy, PolicyAccount(FIFOCache(64 * self.most)))

    @property
    def current(self) -> PolicyAccount:
        """The account of the served policy."""
        return self.of(self.shared.trained)

    @property
    def is_finished(self) -> bool:
        """Whether the served policy's trainer has taken its last step, while the policy was served."""
        last = self.current.last
        return last is not None and self.shared.ends_run(last)

    def follow(self, message: Message | None) -> str | None:
        """Process a control message. Returns the policy whose trainer it is about, if that is not the run's own."""
        if not isinstance(message, Control):
            return None
        self.shared.observe(message)
        if (policy := self.shared.trainer_in(message)) is not None:
            # The account starts now: groups that the trainer ended before are not played now.
            self.of(policy)
        return policy

    def take(self, policy: str, message: Message | None) -> None:
        """Process a message of a policy's trainer."""
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
        """Count ended groups of these data sets, each once, even if several of its samples are named."""
        for group_id in group_ids:
            if group_id.partition("/")[0] in self.datasets and group_id not in account.seen:
                account.seen[group_id] = None
                account.ended += 1


@dataclass
class GroupFollower:
    """Keeps the accounts up to date. Calls ``changed`` after each poll, and ``on_tick`` at each turn of its loop."""

    bus: Bus
    run_name: str
    accounts: GroupAccounts
    changed: Callable[[], None]
    on_tick: Callable[[str], None] = lambda name: None
    _positions: Positions = field(default_factory=dict)
    _trajectories_from: Positions = field(default_factory=dict)
    """End of the trajectories topic before the first group was started."""
    _deleted: set[str] = field(default_factory=set)
    """Policies whose instances' topics were deleted."""

    async def run(self) -> None:
        """Follow until the trainer of the served policy has taken its last step.

        Consumes: control, from the start; steps and skips of the run's trainer and of trainers attached so far, from
            now on; those of trainers attached later, from the start; after a promotion, the trajectories that the
            promoted policy's trainer does not read.
        Produces: only the accounts.
        Waits for: trainers, the coordinator.
        On failure: continues where it was when the broker answers again.
        On stop: is cancelled.
        """
        while not self.accounts.is_finished:
            try:
                await self._follow()
            except StreamRLError as error:
                if isinstance(error, DataLossRefused):
                    self._positions = {}
                if isinstance(error, TopicMissing) and await self._leave_out_deleted():
                    continue
                log.warning("the broker does not answer, so ended groups make no room", error=str(error))
                await asyncio.sleep(RETRY_S)

    async def _follow(self) -> None:
        """Follow the known policies until another one becomes known, or the run ends."""
        if not self._positions:
            self._positions = await self._start()
        known = self._known
        policies = self._topics(known)
        topics = [CONTROL.full_name(self.run_name), *policies]
        # Topics without a position belong to an instance that was attached since; they are read from the start.
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
        return tuple(policy for policy in self.accounts.policies if policy not in self._deleted)

    async def _leave_out_deleted(self) -> bool:
        """Leave out instances whose topics were deleted, until control names them again; whether there are any."""
        before = len(self._deleted)
        for policy in self._known:
            if policy == SERVED_POLICY:
                continue
            try:
                topics = self._topics([policy])
                await (await self.bus.subscribe(topics, client_id=CLIENT_ID, start="latest")).close()
            except TopicMissing:
                self._deleted.add(policy)
            except StreamRLError:
                return False
        return len(self._deleted) > before

    def _topics(self, policies: Iterable[str]) -> dict[str, str]:
        """Topics of these policies' trainers, with the policy of each topic."""
        return {
            topic.full_name(scope_of(self.run_name, policy)): policy for policy in policies for topic in (STEPS, SKIPS)
        }

    def _take(self, record: Record, policies: dict[str, str]) -> None:
        message = message_of(record)
        if (policy := policies.get(record.topic)) is not None:
            self.accounts.take(policy, message)
            return
        if (named := self.accounts.follow(message)) is not None:
            self._deleted.discard(named)

    async def _start(self) -> Positions:
        """Read which policies there are. Returns the position in control and the ends of the trainers' topics."""
        positions: Positions = {}
        control = history(self.bus, [CONTROL.full_name(self.run_name)], "earliest", positions, client_id=CLIENT_ID)
        async for message in control:
            self.accounts.follow(message)
        trajectories = TRAJECTORIES.full_name(self.run_name)
        topics = [*self._topics(self._known), trajectories]
        # Subscribing at the end is the only way to find out where the end is.
        now = await self.bus.subscribe(topics, client_id=CLIENT_ID, start="latest")
        try:
            ends = dict(await now.positions())
        finally:
            await now.close()
        self._trajectories_from = self._trajectories_from or {
            tp: end for tp, end in ends.items() if tp.topic == trajectories
        }
        return positions | {tp: end for tp, end in ends.items() if tp.topic != trajectories}

    async def _note_unread(self) -> None:
        """Count as ended the groups that a promoted policy never reads."""
        account = self.accounts.current
        if not account.unread:
            return
        rows, topic = account.unread, TRAJECTORIES.full_name(self.run_name)
        ends: Positions = {}
        for row in rows:
            tp = TopicPartition(topic, row.partition)
            ends[tp] = max(ends.get(tp, 0), row.end)
        subscription = await self.bus.subscribe([topic], client_id=CLIENT_ID, start=await self._first_offsets(topic))
        try:
            while any(at < ends.get(tp, 0) for tp, at in (await subscription.positions()).items()):
                self.on_tick("follow")
                for record in await subscription.poll(timeout_s=POLL_S):
                    if record.key and any(covers(row, record) for row in rows):
                        self.accounts.note(account, (record.key,))
        finally:
            await subscription.close()
        account.unread = []

    async def _first_offsets(self, topic: str) -> Positions:
        """First offsets of the played groups' trajectories that the broker still has."""
        subscription = await self.bus.subscribe([topic], client_id=CLIENT_ID, start="latest")
        try:
            first, ends = await subscription.beginning_offsets(), await subscription.end_offsets()
        finally:
            await subscription.close()
        return {tp: min(max(self._trajectories_from.get(tp, 0), first[tp]), end) for tp, end in ends.items()}
