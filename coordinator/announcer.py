"""The single writer of the control topic; numbers every message.

Invariant a_zombie_announces_nothing: everything is written in transactions of one id, whose newest holder fences all
older ones. So a coordinator that stood still while another took over cannot put older weights over newer ones.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import structlog
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, wait_exponential

from streamrl.bus.port import Outgoing, TransactionalPublisher
from streamrl.schemas.control import (
    ArmShare,
    ArmWeights,
    Control,
    DrainWorker,
    FleetTarget,
    FlowControl,
    InstanceState,
    PolicySplit,
    Promotion,
    RunFinished,
    Served,
    WeightsReady,
    WorkerClaimed,
    control_key,
)
from streamrl.schemas.errors import BusUnavailable, DeliveryUnknown
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.reports import StepReport
from streamrl.schemas.topics import CONTROL

log = structlog.get_logger()

Kind = TypeVar("Kind", bound=Control)
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0
"""Doubled from the first to the longest; short, since every worker waits for weights meanwhile."""


@dataclass(frozen=True)
class AnnouncedRelays:
    """Addresses of relays, and the hosts of the first of them."""

    addresses: tuple[str, ...]
    hosts: tuple[str, ...] = ()


@dataclass
class ControlAnnouncer:
    """Publishes control messages; ``next_sequence`` goes on behind the largest one found on the topic.

    While no broker answers it tries again, the same message under the same number: a repeat changes nothing for
    readers; ``on_tick`` is called at each attempt. Every method raises ``Superseded`` once a newer one is there.
    """

    publisher: TransactionalPublisher
    run: str
    relays: Callable[[], "AnnouncedRelays"]
    time_of_day: Callable[[], float]
    next_sequence: int = 0
    on_tick: Callable[[], None] = lambda: None
    _one_at_a_time: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def weights_ready(self, report: StepReport, promotion: Promotion | None = None) -> WeightsReady:
        """Announce the weights of a step, at the relays that are there."""
        message = self._numbered(WeightsReady, **_described(report, self.relays()), promotion=promotion)
        await self._commit(message)
        return message

    async def arm_weights(self, policy: str, report: StepReport) -> ArmWeights:
        """The same of a policy that is an arm of the split, at the relays that pass them on."""
        message = self._numbered(ArmWeights, **_described(report, self.relays()), policy=policy)
        await self._commit(message)
        return message

    async def split(
        self, shares: Mapping[str, float], workers: Mapping[str, str], reason: str, command_offset: int
    ) -> PolicySplit:
        """Let policies beside the served one sample a share of the groups each, with these workers."""
        arms = tuple(ArmShare(policy=policy, share=share) for policy, share in shares.items())
        about = {"arms": arms, "workers": dict(workers), "reason": reason}
        message = self._numbered(PolicySplit, **about, command_offset=command_offset)
        await self._commit(message)
        return message

    async def served(self, policy: str, since: PolicyVersion, reason: str, command_offset: int) -> Served:
        """Let another policy's weights be those that workers follow."""
        about = {"policy": policy, "since": since, "reason": reason}
        message = self._numbered(Served, **about, command_offset=command_offset)
        await self._commit(message)
        return message

    async def flow(self, mode: str, reason: str, command_offset: int) -> None:
        """Let everyone run, pause or drain."""
        await self._commit(self._numbered(FlowControl, mode=mode, reason=reason, command_offset=command_offset))

    async def drain_worker(self, worker_id: str, reason: str, command_offset: int) -> None:
        """Let one worker finish and leave."""
        await self._commit(
            self._numbered(DrainWorker, worker_id=worker_id, reason=reason, command_offset=command_offset)
        )

    async def instance(self, policy: str, algorithm: str, mode: str, reason: str, command_offset: int) -> InstanceState:
        """Attach an instance of the trainer, or let it pause, go on or leave."""
        about = {"policy": policy, "algorithm": algorithm, "mode": mode}
        message = self._numbered(InstanceState, **about, reason=reason, command_offset=command_offset)
        await self._commit(message)
        return message

    async def fleet_target(self, workers: int, reason: str) -> None:
        """Say how many workers are wanted."""
        await self._commit(self._numbered(FleetTarget, workers=workers, reason=reason))

    async def workers_claimed(self, holders: Mapping[str, str]) -> None:
        """Say which incarnation holds each of these worker ids."""
        await self._commit(
            *(self._numbered(WorkerClaimed, worker_id=worker, incarnation=holder) for worker, holder in holders.items())
        )

    async def run_finished(self, step: int, reason: str) -> None:
        """Tell everyone that the trainer has taken its last step."""
        await self._commit(self._numbered(RunFinished, step=step, reason=reason))

    def _numbered(self, kind: type[Kind], **fields: Any) -> Kind:
        message = kind(sequence=self.next_sequence, sent_at=self.time_of_day(), **fields)
        self.next_sequence += 1
        return message

    async def _commit(self, *messages: Control) -> None:
        topic = CONTROL.full_name(self.run)
        records = [Outgoing.of(topic, message, key=control_key(message)) for message in messages]
        persistently = AsyncRetrying(
            sleep=asyncio.sleep,
            retry=retry_if_exception_type((DeliveryUnknown, BusUnavailable)),
            wait=wait_exponential(multiplier=FIRST_PAUSE_S, max=LONGEST_PAUSE_S),
            before=lambda attempt: self.on_tick(),  # for the watchdog: who waits for a broker does not hang
            before_sleep=_log_unconfirmed,
        )
        # Nothing is awaited between numbering and this line, and asyncio's lock is fair: what two loops announce gets
        # onto the topic in the order of its numbers.
        async with self._one_at_a_time:
            await persistently(self.publisher.commit, records)


def _described(report: StepReport, relays: AnnouncedRelays) -> dict[str, Any]:
    """What every announcement of weights says."""
    return {
        "version": report.version,
        "step": report.step,
        "manifest_sha256": report.manifest_sha256,
        "relays": relays.addresses,
        "relay_hosts": relays.hosts,
    }


def _log_unconfirmed(attempt: RetryCallState) -> None:
    error = attempt.outcome.exception() if attempt.outcome else None
    log.warning("announcement not confirmed, sending it again", attempt=attempt.attempt_number, error=str(error))
