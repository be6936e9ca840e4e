"""Keeps a split: assigns workers to its arms as workers come and go, and announces the weights of each arm.

The wanted split is on the control topic (``PolicySplit``), so a killed coordinator leaves it to its successor.

Invariants:
- a_removed_arm_returns_its_share: an arm loses its share when its instance is detached, has taken its last step or
  becomes the served policy;
- an_arm_s_weights_only_grow: an arm's versions grow by (lineage, number), as those of the served policy do.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import structlog

from streamrl.bus.port import Subscription, message_of
from streamrl.bus.waiting import wait_for_event
from streamrl.coordinator.policies import CoordinatorContext
from streamrl.coordinator.state import VersionLedger
from streamrl.policies.splitting import deal_workers, decide_split, may_be_arm
from streamrl.schemas.control import ArmShare, ArmWeights, Control, InstanceState, OperatorCommand, PolicySplit
from streamrl.schemas.errors import BusUnavailable
from streamrl.schemas.identifiers import scope_of
from streamrl.schemas.reports import StepReport
from streamrl.schemas.topics import STEPS

log = structlog.get_logger()

CLIENT_ID = "coordinator-arms"
POLL_S = 0.5
RETRY_S = 1.0
"""Seconds before missing topics of an instance are looked for again."""
RELAYS_AGAIN_S = 5.0
"""Seconds between two announcements of the same weights at other relays."""


@dataclass
class SplitKeeper:
    """Keeps the split that was ordered last.

    ``instances``: the trainers besides the run's own, by name. ``served``: gives the served policy. ``weights``: the
    last announcement of each arm; ``_announced_at``: when that was, in seconds of the coordinator's clock.
    ``_ledgers``: the versions of the arms whose steps are read.
    """

    context: CoordinatorContext
    instances: Mapping[str, InstanceState]
    served: Callable[[], str]
    split: PolicySplit | None = None
    weights: dict[str, ArmWeights] = field(default_factory=dict)
    _ledgers: dict[str, VersionLedger] = field(default_factory=dict)
    _announced_at: dict[str, float] = field(default_factory=dict)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def shares(self) -> dict[str, float]:
        """The share of each arm; empty without a split."""
        return {} if self.split is None else self.split.shares

    def observe(self, message: Control) -> None:
        """Take one message of the control topic into account."""
        match message:
            case PolicySplit():
                self.split = message
            case ArmWeights():
                self.weights[message.policy] = message

    async def order(self, command: OperatorCommand, offset: int) -> None:
        """Carry out an operator's command to split."""
        wanted = decide_split(command, self.instances, self.served(), self.shares)
        if wanted is None or self.context.state.finished:
            log.warning("command changes nothing", action=command.action, shares=dict(self.shares))
            return
        for arm in wanted.shares.keys() - self.shares.keys():
            self._ledgers.pop(arm, None)  # the arm may have ended in an earlier split, and continues now
        await self._announce(wanted.shares, wanted.reason, offset)

    async def settle(self) -> None:
        """Remove arms that are gone, and assign the living workers to the others."""
        split = self.split
        if split is None or not split.arms:
            return
        shares = {arm: share for arm, share in split.shares.items() if self._is_there(arm)}
        if shares != split.shares or deal_workers(shares, self.context.workers(), split.workers) != split.workers:
            await self._announce(shares, split.reason)

    def _is_there(self, arm: str) -> bool:
        ledger = self._ledgers.get(arm)
        has_ended = ledger is not None and ledger.latest is not None and ledger.latest.finished
        return not has_ended and may_be_arm(arm, self.instances, self.served())

    async def _announce(self, shares: Mapping[str, float], reason: str, command_offset: int = -1) -> None:
        dealt = deal_workers(shares, self.context.workers(), {} if self.split is None else self.split.workers)
        arms = tuple(ArmShare(policy=policy, share=share) for policy, share in shares.items())
        fields = {"arms": arms, "workers": dealt, "reason": reason, "command_offset": command_offset}
        self.observe(await self.context.announcer.announce(PolicySplit, **fields))
        self._changed.set()
        log.info("groups are split", shares=dict(shares), workers=dealt)

    async def arms_loop(self, stop: asyncio.Event) -> None:
        """Announce the weights of the arms.

        Consumes: steps of each arm's policy, from the beginning. Produces: control (arm weights).
        Waits for: a split; then the trainers of its arms.
        On failure: looks for missing topics again after a pause; raises other errors to ``run``.
        On stop: returns within one poll.
        """
        while not stop.is_set():
            self._changed.clear()
            if arms := tuple(sorted(self.shares)):
                await self._follow(arms, stop)
            else:
                await wait_for_event(self._changed, POLL_S)

    async def _follow(self, arms: tuple[str, ...], stop: asyncio.Event) -> None:
        """Announce the weights of these arms, as long as they are the split's."""
        topics = {STEPS.full_name(scope_of(self.context.run, arm)): arm for arm in arms}
        try:
            steps = await self.context.bus.subscribe(list(topics), client_id=CLIENT_ID, start="earliest")
        except BusUnavailable as error:
            log.warning("steps of an arm cannot be read", arms=arms, error=str(error))
            await asyncio.sleep(RETRY_S)
            return
        self._ledgers.clear()  # all steps are read again
        try:
            await self._read(steps, topics, stop)
        finally:
            await steps.close()

    def _ledger_of(self, arm: str) -> VersionLedger:
        if (found := self._ledgers.get(arm)) is None:
            known = self.weights.get(arm)
            found = self._ledgers[arm] = VersionLedger(announced=None if known is None else known.version)
        return found

    async def _read(self, steps: Subscription, topics: Mapping[str, str], stop: asyncio.Event) -> None:
        arms, ends = set(topics.values()), await steps.end_offsets()
        while not stop.is_set() and set(self.shares) == arms:
            for record in await steps.poll(timeout_s=POLL_S):
                report = message_of(record, warn=True)
                # Weights exported while the policy was served are in the run's own store, under served versions.
                if isinstance(report, StepReport) and report.served_as is None:
                    self._ledger_of(topics[record.topic]).observe_report(report)
            # Only after reading up to the end: of several versions only the newest is announced.
            if all(at >= ends[tp] for tp, at in (await steps.positions()).items()):
                for arm in sorted(arms & set(self.shares)):
                    await self._announce_weights(arm)

    async def _announce_weights(self, arm: str) -> None:
        ledger, known = self._ledger_of(arm), self.weights.get(arm)
        report, now, announcer = ledger.to_announce(), self.context.clock(), self.context.announcer
        if report is None:
            relays = None if known is None else frozenset(known.relays)
            is_late = now - self._announced_at.get(arm, now) >= RELAYS_AGAIN_S
            self._announced_at.setdefault(arm, now)
            if not is_late or relays == frozenset(announcer.relays().addresses):
                return
            report = ledger.latest
        if report is None:
            return
        message = await announcer.weights(ArmWeights, report, policy=arm)
        self.observe(message)
        self._announced_at[arm] = now
        ledger.observe_announcement(message)
        log.info("weights of an arm announced", arm=arm, version=str(report.version))
