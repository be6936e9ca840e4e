"""The coordinator's questions about the policies that share its stream, and the answers for one policy.

With one policy, every step report is announced unchanged, and every worker follows those weights. ``streamrl/policies``
has the answers for several.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import structlog

from streamrl.bus.port import Bus
from streamrl.coordinator.announcer import ControlAnnouncer
from streamrl.coordinator.state import CoordinatorState
from streamrl.schemas.control import Control, OperatorCommand
from streamrl.schemas.identifiers import SERVED_POLICY
from streamrl.schemas.reports import StepReport

log = structlog.get_logger()


@dataclass(frozen=True)
class CoordinatorContext:
    """What the parts of one coordinator process share.

    ``announcing``: the lock to hold from the decision which weights are newest until they are announced. ``workers``:
    gives the workers that take orders now. ``clock``: monotonic, in seconds.
    """

    bus: Bus
    run: str
    state: CoordinatorState
    announcer: ControlAnnouncer
    workers: Callable[[], list[str]]
    clock: Callable[[], float]
    announcing: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass(frozen=True)
class Followed:
    """The policy whose steps are read and whose weights are announced.

    ``since``: number of the control message that set it; -1: the run started with it.
    """

    policy: str = SERVED_POLICY
    since: int = -1


class PolicyControl(Protocol):
    """The coordinator's questions about policies. All state is on the control topic."""

    @property
    def followed(self) -> Followed:
        """The followed policy. When it changes, the new policy's steps are read from their beginning."""
        ...

    def observe(self, message: Control) -> None:
        """Take one message of the control topic into account: a replayed one, or one just announced."""
        ...

    def as_announced(self, report: StepReport) -> StepReport | None:
        """A report of the followed policy, with the version under which workers know its weights.

        None: the report is from a time when another policy was followed.
        """
        ...

    def about_weights(self, report: StepReport) -> Mapping[str, Any]:
        """Further fields of the message that announces the weights of this report."""
        ...

    async def carry_out(self, command: OperatorCommand, offset: int) -> None:
        """Carry out an operator's command about policies. ``offset``: the command's place on its topic."""
        ...

    async def deal_workers(self) -> None:
        """Decide which policy's weights each living worker follows. Called after each look at heartbeats."""
        ...

    async def run(self, stop: asyncio.Event) -> None:
        """Work next to the coordinator's own loops until stopped."""
        ...


class OnePolicyControl:
    """The answers for a run with one policy."""

    followed = Followed()

    def __init__(self, context: CoordinatorContext) -> None:
        pass

    def observe(self, message: Control) -> None:
        """See ``PolicyControl``: does nothing."""

    def as_announced(self, report: StepReport) -> StepReport | None:
        """See ``PolicyControl``: the report itself."""
        return report

    def about_weights(self, report: StepReport) -> Mapping[str, Any]:
        """See ``PolicyControl``: there are none."""
        return {}

    async def carry_out(self, command: OperatorCommand, offset: int) -> None:
        """See ``PolicyControl``: the command is about another policy, and there is none."""
        log.warning("command changes nothing", action=command.action, policy=command.policy)

    async def deal_workers(self) -> None:
        """See ``PolicyControl``: all follow the one policy."""

    async def run(self, stop: asyncio.Event) -> None:
        """Do nothing.

        Consumes: nothing. Produces: nothing. Waits for: nothing.
        On failure: cannot fail. On stop: has returned before.
        """
