"""The coordinator's answers if several policies share its stream; see ``coordinator/policies.py``.

All state is on the control topic: which instances of the trainer are attached (``InstanceState``), which policy is
served (``Served``, and the ``Promotion`` in announced weights) and the split (``PolicySplit``; see ``arms``).
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import structlog

from streamrl.coordinator.policies import CoordinatorContext, Followed
from streamrl.policies.arms import SplitKeeper
from streamrl.schemas.control import Control, InstanceState, OperatorCommand, Promotion, Served, WeightsReady
from streamrl.schemas.identifiers import SERVED_POLICY, PolicyVersion
from streamrl.schemas.reports import StepReport

log = structlog.get_logger()

InstanceMode = Literal["run", "pause", "detached"]
_MODE_AFTER: dict[str, InstanceMode] = {
    "attach": "run",
    "detach": "detached",
    "pause_instance": "pause",
    "resume_instance": "run",
}


@dataclass
class SeveralPolicyControl:
    """``PolicyControl`` for several policies.

    ``instances``: the trainers besides the run's own, by name. ``served``: the promotion of the served policy; None: it
    is the run's own. ``promotion``: from the first announcement of the promoted policy's weights; None before.
    """

    context: CoordinatorContext
    instances: dict[str, InstanceState] = field(default_factory=dict)
    served: Served | None = None
    promotion: Promotion | None = None
    splits: SplitKeeper = field(init=False)

    def __post_init__(self) -> None:
        self.splits = SplitKeeper(self.context, self.instances, lambda: self.followed.policy)

    @property
    def followed(self) -> Followed:
        """See ``PolicyControl``."""
        return Followed() if self.served is None else Followed(self.served.policy, self.served.sequence)

    def observe(self, message: Control) -> None:
        """See ``PolicyControl``."""
        match message:
            case InstanceState():
                self.instances[message.policy] = message
            case Served():
                self.served = message
                # An announcement of the policy served before does not apply to this one.
                is_same = self.promotion is not None and self.promotion.since == message.since
                self.promotion = self.promotion if is_same else None
            case WeightsReady():
                self.promotion = message.promotion
            case _:
                self.splits.observe(message)

    def as_announced(self, report: StepReport) -> StepReport | None:
        """See ``PolicyControl``: for a promoted policy, only reports with a later served version count."""
        if self.served is None:
            return report
        version = report.served_as
        return report.replace(version=version) if version is not None and version > self.served.since else None

    def about_weights(self, report: StepReport) -> Mapping[str, Any]:
        """See ``PolicyControl``."""
        if (served := self.served) is None:
            return {}
        version, first = report.version, self.promotion
        promotion = Promotion(
            policy=served.policy,
            since=served.since,
            lineage=version.lineage if first is None else first.lineage,
            shift=version.number - report.step,
        )
        return {"promotion": promotion}

    async def carry_out(self, command: OperatorCommand, offset: int) -> None:
        """See ``PolicyControl``."""
        match command.action:
            case "split":
                await self.splits.order(command, offset)
            case "promote":
                await self._promote(command, offset)
            case _:
                await self._carry_out_for_instance(command, offset)

    async def deal_workers(self) -> None:
        """See ``PolicyControl``."""
        await self.splits.settle()

    async def run(self, stop: asyncio.Event) -> None:
        """Announce the weights of the arms of a split: see ``SplitKeeper.arms_loop``.

        Consumes: steps of each arm's policy. Produces: control (arm weights).
        Waits for: a split; then the trainers of its arms.
        On failure: raises to ``Coordinator.run``. On stop: returns within one poll.
        """
        await self.splits.arms_loop(stop)

    async def _promote(self, command: OperatorCommand, offset: int) -> None:
        context, state = self.context, self.context.state
        # The lock: no weights may be announced between reading the newest version and announcing the promotion.
        async with context.announcing:
            since = state.ledger.announced
            policy = decide_promotion(command, self.instances, self.followed.policy, since)
            # After its last step the trainer of the served policy is gone, and the run is about to end.
            latest = state.ledger.latest
            is_last = state.finished or (latest is not None and latest.finished)
            if policy is None or since is None or is_last:
                log.warning("command changes nothing", action=command.action, policy=command.policy)
                return
            fields = {"policy": policy, "since": since, "reason": command.reason, "command_offset": offset}
            self.observe(await context.announcer.announce(Served, **fields))
            state.ledger.forget_reports()
        log.info("another policy is served", policy=policy, since=str(since))

    async def _carry_out_for_instance(self, command: OperatorCommand, offset: int) -> None:
        policy, known = command.policy or "", self.instances
        mode = decide_instance(command, known, self.followed.policy)
        if mode is None:
            log.warning("command changes nothing", action=command.action, instance=policy)
            return
        # Only `attach` names the algorithm.
        algorithm = (command.algorithm or "") if command.action == "attach" else known[policy].algorithm
        fields = {"policy": policy, "algorithm": algorithm, "mode": mode, "reason": command.reason}
        self.observe(await self.context.announcer.announce(InstanceState, **fields, command_offset=offset))
        log.info("instance", policy=policy, mode=mode)


def decide_promotion(
    command: OperatorCommand, known: Mapping[str, InstanceState], served: str, announced: PolicyVersion | None
) -> str | None:
    """The policy to serve from now on.

    None if it is served already, not attached or paused, or if no weights were announced yet.
    """
    policy, instance = command.policy or "", known.get(command.policy or "")
    is_there = policy == SERVED_POLICY or (instance is not None and instance.mode == "run")
    return policy if is_there and policy != served and announced is not None else None


def decide_instance(
    command: OperatorCommand, known: Mapping[str, InstanceState], served: str = SERVED_POLICY
) -> InstanceMode | None:
    """The new mode of the instance that a command names; None if nothing changes or the instance is unknown.

    The served policy cannot be paused or detached: workers would wait for its weights. A paused instance that is
    attached again stays paused: an operator's wish survives a restart.
    """
    mode, now = _MODE_AFTER[command.action], known.get(command.policy or "")
    if not command.policy:
        return None
    if command.action == "attach":
        return mode if now is None or now.mode == "detached" else None
    if now is None or now.mode in (mode, "detached") or (command.policy == served and mode != "run"):
        return None
    return mode
