"""What the coordinator asks about the policies that share its stream; and the answers of one policy.

With one policy every step report is announced as it is, and every worker follows those weights. ``streamrl/policies``
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
    """What the parts of one process of the coordinator share.

    ``announcing``: held while it is decided and said which weights are the newest, and whose. ``workers``: those that
    take orders now. ``clock``: monotonic, in seconds.
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

    ``since``: number of the control message that said so; -1: the run began with it.
    """

    policy: str = SERVED_POLICY
    since: int = -1


class PolicyControl(Protocol):
    """The coordinator's questions about policies. Nothing is kept but on the control topic."""

    @property
    def followed(self) -> Followed:
        """Which policy is followed. Once it changes, its steps are read from their beginning."""
        ...

    def observe(self, message: Control) -> None:
        """Take one message of the control topic into account: of the past, or one that was just announced."""
        ...

    def as_announced(self, report: StepReport) -> StepReport | None:
        """A report of the followed policy, with the version under which workers know its weights.

        None: it is of a time when another policy was followed.
        """
        ...

    def about_weights(self, report: StepReport) -> Mapping[str, Any]:
        """Further fields of the message that announces the weights of this report."""
        ...

    async def carry_out(self, command: OperatorCommand, offset: int) -> None:
        """Carry out a command of an operator that is none of the coordinator's own; ``offset``: where it stands."""
        ...

    async def deal_workers(self) -> None:
        """Say whose weights the workers follow that are there now; asked after each look at heartbeats."""
        ...

    async def run(self, stop: asyncio.Event) -> None:
        """What goes on beside the coordinator's own loops, until it is stopped."""
        ...


class OnePolicyControl:
    """The answers for a run with one policy."""

    followed = Followed()

    def __init__(self, context: CoordinatorContext) -> None:
        pass

    def observe(self, message: Control) -> None:
        """See ``PolicyControl``: nothing is said of policies."""

    def as_announced(self, report: StepReport) -> StepReport | None:
        """See ``PolicyControl``: the report itself."""
        return report

    def about_weights(self, report: StepReport) -> Mapping[str, Any]:
        """See ``PolicyControl``: there are none."""
        return {}

    async def carry_out(self, command: OperatorCommand, offset: int) -> None:
        """See ``PolicyControl``: such a command asks for another policy, and there is none."""
        log.warning("command changes nothing", action=command.action, policy=command.policy)

    async def deal_workers(self) -> None:
        """See ``PolicyControl``: all follow the one policy."""

    async def run(self, stop: asyncio.Event) -> None:
        """Do nothing.

        Consumes: nothing. Produces: nothing. Waits for: nothing.
        On failure: cannot fail. On stop: has returned before.
        """
