"""Publishing of one worker: every finished trajectory is delivered, but only while the worker holds its id.

``Outbox`` sends a trajectory again under the same id until the broker has it, and reports when the broker is behind.
Below it every record of the worker passes the ``FencedPublisher``, which stops a superseded worker from publishing.

Invariant a_zombie_publishes_nothing: a superseded process publishes nothing. A process that was suspended for longer
than ``fencing_timeout_s`` publishes nothing until it has read control to its current end.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, wait_exponential

from streamrl.bus.port import Outgoing, Position, Publisher
from streamrl.schemas.errors import BusError, BusUnavailable, DeliveryUnknown, Superseded

log = structlog.get_logger()

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0
"""Pauses between attempts, doubled from first to longest; long, so that not all workers hit a restarted broker at once.
"""
MAX_REFUSALS = 5
"""Refusals of the same bytes by a broker that answers, after which an error is raised: a setting is probably wrong."""


@dataclass
class Outbox:
    """Delivers records. Each caller waits for its own record, so this holds only as many as there are callers.

    ``undelivered``: number of records that are not delivered yet.
    """

    publisher: Publisher
    max_undelivered: int
    undelivered: int = 0

    @property
    def is_full(self) -> bool:
        """Whether so many records are undelivered that no new sample should start."""
        return self.undelivered >= self.max_undelivered

    async def deliver(self, record: Outgoing) -> None:
        """Publish a record. While the outcome is unknown or no broker answers, it is sent again, without a time limit.

        Raises:
            BusError: the broker refused the record ``MAX_REFUSALS`` times.
        """
        persistently = AsyncRetrying(
            sleep=asyncio.sleep,
            retry=retry_if_exception_type(BusError),
            stop=_is_refused_for_good,
            wait=wait_exponential(multiplier=FIRST_PAUSE_S, max=LONGEST_PAUSE_S),
            before_sleep=_log_undelivered,
            # Without reraise, callers would get tenacity's RetryError instead of the BusError.
            reraise=True,
        )
        # Counted during the first attempt, too: a broker that answers slowly is behind.
        self.undelivered += 1
        try:
            await persistently(self.publisher.publish, record)
        finally:
            self.undelivered -= 1


def _is_refused_for_good(attempt: RetryCallState) -> bool:
    # A missing answer is never a refusal: an outage may last for hours, and the trajectory was expensive.
    return attempt.attempt_number >= MAX_REFUSALS and not isinstance(
        _error_of(attempt), DeliveryUnknown | BusUnavailable
    )


def _log_undelivered(attempt: RetryCallState) -> None:
    """Log attempts 1, 2, 4, 8, …: hundreds of trajectories may wait for the same broker."""
    number = attempt.attempt_number
    if number.bit_count() == 1:
        key = attempt.args[0].key
        log.warning(
            "trajectory not delivered, sending it again", key=key, attempt=number, error=str(_error_of(attempt))
        )


def _error_of(attempt: RetryCallState) -> BaseException | None:
    return attempt.outcome.exception() if attempt.outcome is not None else None


@dataclass
class Fence:
    """Decides whether this incarnation may publish, from claims of its worker id and the time of the last control read.

    The coordinator claims an id for the incarnation whose first heartbeat is newest. A claim for another incarnation
    that arrives before our own claim may be older than our first heartbeat. A claim that arrives after our own, or a
    second time, supersedes us.
    """

    worker_id: str
    incarnation: str
    timeout_s: float
    clock: Callable[[], float] = time.monotonic
    superseded: Superseded | None = None
    _control_read_at: float = field(init=False)
    _control_read: asyncio.Event = field(default_factory=asyncio.Event)
    _claims_seen: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._control_read_at = self.clock()

    @property
    def was_suspended(self) -> bool:
        """Whether control has not been read for longer than ``timeout_s``."""
        return self.clock() - self._control_read_at > self.timeout_s

    def note_control_read(self) -> None:
        """Note that control was just read to its end."""
        self._control_read_at = self.clock()
        self._control_read.set()

    def claimed(self, incarnation: str) -> None:
        """Process the coordinator's claim of our id for an incarnation.

        Raises:
            Superseded: another incarnation holds the id.
        """
        # A claim for another incarnation counts once our own was seen, or when it is repeated: the first may be old.
        if incarnation != self.incarnation and self._claims_seen & {self.incarnation, incarnation}:
            self.superseded = Superseded(
                f"worker {self.worker_id} ({self.incarnation}) was superseded by incarnation {incarnation}: another "
                "process has the same id; to run both, give each its own id with --id"
            )
            # Wakes the tasks that wait at the fence, since the control loop ends with this error.
            self._control_read.set()
            raise self.superseded
        self._claims_seen.add(incarnation)

    async def wait_until_passed(self) -> None:
        """Return when it is certain that this incarnation holds the id.

        Raises:
            Superseded: another incarnation holds it.
        """
        # A loop, since the process may have been suspended again before this task wakes.
        while self.superseded is None and self.was_suspended:
            # Cleared first: the event may still be set from before the suspension.
            self._control_read.clear()
            await self._control_read.wait()
        if self.superseded is not None:
            raise self.superseded


@dataclass(frozen=True)
class FencedPublisher:
    """A publisher behind the fence. Its methods raise ``Superseded`` when the worker is superseded."""

    publisher: Publisher
    fence: Fence

    async def submit(self, record: Outgoing) -> "asyncio.Future[Position]":
        """See the port."""
        await self.fence.wait_until_passed()
        return await self.publisher.submit(record)

    async def publish(self, record: Outgoing) -> Position:
        """See the port."""
        # Every attempt passes the fence again: the worker may have been superseded since the last one.
        await self.fence.wait_until_passed()
        return await self.publisher.publish(record)

    async def flush(self) -> None:
        """See the port."""
        # No fence here: the records that this waits for have passed it in the methods above.
        await self.publisher.flush()

    async def close(self) -> None:
        """See the port."""
        await self.publisher.close()
