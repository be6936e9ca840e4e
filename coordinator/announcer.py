"""The single writer of the control topic; numbers every message.

Invariant a_zombie_announces_nothing: all messages are written in transactions with one id, whose newest holder fences
all older ones. So a stalled coordinator that was replaced cannot announce older weights after newer ones.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import structlog
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, wait_exponential

from streamrl.bus.port import Outgoing, TransactionalPublisher
from streamrl.coordinator.state import CoordinatorState
from streamrl.schemas.control import (
    AnnouncedWeights,
    Control,
    DrainWorker,
    FleetTarget,
    FlowControl,
    RunFinished,
    WorkerClaimed,
    control_key,
)
from streamrl.schemas.errors import BusUnavailable, DeliveryUnknown
from streamrl.schemas.reports import StepReport
from streamrl.schemas.topics import CONTROL

log = structlog.get_logger()

Kind = TypeVar("Kind", bound=Control)
Weights = TypeVar("Weights", bound=AnnouncedWeights)
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0
"""Seconds between attempts, doubled from the first to the longest; short, since every worker waits for weights."""


@dataclass(frozen=True)
class AnnouncedRelays:
    """Addresses of relays. ``hosts``: the hosts of the first of them, in the same order."""

    addresses: tuple[str, ...]
    hosts: tuple[str, ...] = ()


@dataclass
class ControlAnnouncer:
    """Publishes control messages. ``state`` gives their numbers, and learns each message once the broker has it.

    While the broker is down, the announcer tries again with the same message and number, so that a repeat changes
    nothing for readers. ``on_tick`` is called at each attempt. Every method raises ``Superseded`` once a newer
    announcer has taken over.
    """

    publisher: TransactionalPublisher
    run: str
    state: CoordinatorState
    relays: Callable[[], "AnnouncedRelays"]
    time_of_day: Callable[[], float]
    on_tick: Callable[[], None] = lambda: None
    _one_at_a_time: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def announce(self, kind: type[Kind], **fields: Any) -> Kind:
        """Publish a message of this kind under the next number; returns it once the broker has it."""
        message = self._numbered(kind, **fields)
        await self._commit(message)
        return message

    async def weights(self, kind: type[Weights], report: StepReport, **fields: Any) -> Weights:
        """Announce the weights of a step at the living relays; ``fields``: further fields of this kind of message."""
        relays = self.relays()
        weights = {"version": report.version, "step": report.step, "manifest_sha256": report.manifest_sha256}
        return await self.announce(kind, **weights, relays=relays.addresses, relay_hosts=relays.hosts, **fields)

    async def flow(self, mode: str, reason: str, command_offset: int) -> None:
        """Let all workers run, pause or drain."""
        await self.announce(FlowControl, mode=mode, reason=reason, command_offset=command_offset)

    async def drain_worker(self, worker_id: str, reason: str, command_offset: int) -> None:
        """Let one worker finish and leave."""
        await self.announce(DrainWorker, worker_id=worker_id, reason=reason, command_offset=command_offset)

    async def fleet_target(self, workers: int, reason: str) -> None:
        """Announce how many workers are wanted."""
        await self.announce(FleetTarget, workers=workers, reason=reason)

    async def workers_claimed(self, holders: Mapping[str, str]) -> None:
        """Announce which incarnation holds each of these worker ids."""
        await self._commit(
            *(self._numbered(WorkerClaimed, worker_id=worker, incarnation=holder) for worker, holder in holders.items())
        )

    async def run_finished(self, step: int, reason: str) -> None:
        """Announce that the trainer has taken its last step."""
        await self.announce(RunFinished, step=step, reason=reason)

    def _numbered(self, kind: type[Kind], **fields: Any) -> Kind:
        return kind(sequence=self.state.take_number(), sent_at=self.time_of_day(), **fields)

    async def _commit(self, *messages: Control) -> None:
        topic = CONTROL.full_name(self.run)
        records = [Outgoing.of(topic, message, key=control_key(message)) for message in messages]
        persistently = AsyncRetrying(
            sleep=asyncio.sleep,
            retry=retry_if_exception_type((DeliveryUnknown, BusUnavailable)),
            wait=wait_exponential(multiplier=FIRST_PAUSE_S, max=LONGEST_PAUSE_S),
            before=lambda attempt: self.on_tick(),  # for the watchdog: waiting for a broker is no hang
            before_sleep=_log_unconfirmed,
        )
        # Nothing is awaited between numbering and this line, and asyncio's lock is fair: messages of two loops get onto
        # the topic in the order of their numbers.
        async with self._one_at_a_time:
            await persistently(self.publisher.commit, records)
        # Only after the commit: an announcer killed before it leaves these messages to its successor.
        for message in messages:
            self.state.apply(message)


def _log_unconfirmed(attempt: RetryCallState) -> None:
    error = attempt.outcome.exception() if attempt.outcome else None
    log.warning("announcement not confirmed, sending it again", attempt=attempt.attempt_number, error=str(error))
