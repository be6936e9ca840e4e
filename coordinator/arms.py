"""Keeps a split: deals workers to its arms as they come and go, and announces the weights of each arm.

What is wanted is on the control topic (``PolicySplit``), so a coordinator that is killed leaves it to its successor.

Invariants:
- an_arm_that_is_gone_gives_its_share_back: once its instance is detached, has taken its last step or is served itself;
- an_arm_s_weights_only_grow: by (lineage, number), as those of the served policy do.
"""

import asyncio
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import structlog

from streamrl.bus.port import Bus, Subscription, message_of
from streamrl.bus.waiting import happens_within
from streamrl.coordinator.announcer import ControlAnnouncer
from streamrl.coordinator.splitting import deal_workers, decide_split, may_be_arm
from streamrl.coordinator.state import CoordinatorState, VersionLedger
from streamrl.schemas.control import OperatorCommand
from streamrl.schemas.errors import BusUnavailable
from streamrl.schemas.identifiers import scope_of
from streamrl.schemas.reports import StepReport
from streamrl.schemas.topics import STEPS

log = structlog.get_logger()

POLL_S = 0.5
RETRY_S = 1.0
"""Until an instance's topics are looked for again."""
RELAYS_AGAIN_S = 5.0
"""Between two announcements of the same weights at other relays."""


@dataclass
class SplitKeeper:
    """``_ledgers``: of the arms whose steps are read; ``_announced_at``: when each one's weights were named, on the
    coordinator's clock.
    """

    bus: Bus
    run: str
    client_id: str
    state: CoordinatorState
    announcer: ControlAnnouncer
    clock: Callable[[], float]
    _ledgers: dict[str, VersionLedger] = field(default_factory=dict)
    _announced_at: dict[str, float] = field(default_factory=dict)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def shares(self) -> dict[str, float]:
        """By arm; none without a split."""
        return {} if self.state.split is None else self.state.split.shares

    async def order(self, command: OperatorCommand, offset: int, workers: Collection[str]) -> None:
        """Carry out an operator's command. ``workers``: those that can be dealt to an arm."""
        state = self.state
        wanted = decide_split(command, state.instances, state.policy, self.shares)
        if wanted is None or state.finished:
            log.warning("command changes nothing", action=command.action, shares=dict(self.shares))
            return
        for arm in wanted.shares.keys() - self.shares.keys():
            self._ledgers.pop(arm, None)  # it may have ended in an earlier split, and goes on now
        await self._announce(wanted.shares, workers, wanted.reason, offset)

    async def settle(self, workers: Collection[str]) -> None:
        """Give back the shares of arms that are gone, and deal the workers that are there now."""
        split = self.state.split
        if split is None or not split.arms:
            return
        shares = {arm: share for arm, share in split.shares.items() if self._is_there(arm)}
        if shares != split.shares or deal_workers(shares, workers, split.workers) != split.workers:
            await self._announce(shares, workers, split.reason)

    def _is_there(self, arm: str) -> bool:
        ledger = self._ledgers.get(arm)
        has_ended = ledger is not None and ledger.latest is not None and ledger.latest.finished
        return not has_ended and may_be_arm(arm, self.state.instances, self.state.policy)

    async def _announce(
        self, shares: Mapping[str, float], workers: Collection[str], reason: str, command_offset: int = -1
    ) -> None:
        split = self.state.split
        dealt = deal_workers(shares, workers, {} if split is None else split.workers)
        self.state.split = await self.announcer.split(shares, dealt, reason, command_offset)
        self._changed.set()
        log.info("groups are split", shares=dict(shares), workers=dealt)

    async def arms_loop(self, stop: asyncio.Event) -> None:
        """Announce the weights of the arms.

        Consumes: steps of each arm's policy, from the beginning. Produces: control (arm weights).
        Waits for: a split; then the trainers of its arms.
        On failure: topics that are not there are looked for again; raises to ``run`` otherwise.
        On stop: returns within one poll.
        """
        while not stop.is_set():
            self._changed.clear()
            if arms := tuple(sorted(self.shares)):
                await self._follow(arms, stop)
            else:
                await happens_within(self._changed, POLL_S)

    async def _follow(self, arms: tuple[str, ...], stop: asyncio.Event) -> None:
        """As long as these are the arms."""
        topics = {STEPS.full_name(scope_of(self.run, arm)): arm for arm in arms}
        try:
            steps = await self.bus.subscribe(list(topics), client_id=f"{self.client_id}-arms", start="earliest")
        except BusUnavailable as error:
            log.warning("steps of an arm cannot be read", arms=arms, error=str(error))
            await asyncio.sleep(RETRY_S)
            return
        self._ledgers.clear()  # all that is there is read again
        try:
            await self._read(steps, topics, stop)
        finally:
            await steps.close()

    def _ledger_of(self, arm: str) -> VersionLedger:
        if (found := self._ledgers.get(arm)) is None:
            known = self.state.arm_weights.get(arm)
            found = self._ledgers[arm] = VersionLedger(announced=None if known is None else known.version)
        return found

    async def _read(self, steps: Subscription, topics: Mapping[str, str], stop: asyncio.Event) -> None:
        arms, ends = set(topics.values()), await steps.end_offsets()
        while not stop.is_set() and set(self.shares) == arms:
            for record in await steps.poll(timeout_s=POLL_S):
                report = message_of(record, warn=True)
                # What it exported while it was served lies in the run's own store, under served versions.
                if isinstance(report, StepReport) and report.served_as is None:
                    self._ledger_of(topics[record.topic]).observe_report(report)
            # Of all that was there only the newest is announced.
            if all(at >= ends[tp] for tp, at in (await steps.positions()).items()):
                for arm in sorted(arms & set(self.shares)):
                    await self._announce_weights(arm)

    async def _announce_weights(self, arm: str) -> None:
        ledger, known = self._ledger_of(arm), self.state.arm_weights.get(arm)
        report, now = ledger.to_announce(), self.clock()
        if report is None:
            relays = None if known is None else frozenset(known.relays)
            is_late = now - self._announced_at.get(arm, now) >= RELAYS_AGAIN_S
            self._announced_at.setdefault(arm, now)
            if not is_late or relays == frozenset(self.announcer.relays().addresses):
                return
            report = ledger.latest
        if report is None:
            return
        message = await self.announcer.arm_weights(arm, report)
        self.state.arm_weights[arm], self._announced_at[arm] = message, now
        ledger.observe_announcement(message)
        log.info("weights of an arm announced", arm=arm, version=str(report.version))
