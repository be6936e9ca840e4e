"""Publishing of one worker: finished trajectories are delivered for certain, and only while the worker holds its id.

``Outbox`` re-sends a trajectory under the same id until the broker has it, and says when the broker is behind. Below it
every record of the worker passes the ``FencedPublisher``, which keeps a worker that was superseded from publishing.

Invariant a_zombie_publishes_nothing: once superseded nothing is handed to the broker any more; and a process that was
suspended for longer than ``fencing_timeout_s`` hands over nothing before it has read control up to its present end.
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
"""Doubled from the first to the longest; long, so that a broker that comes back is not met by every worker at once."""
MAX_REFUSALS = 5
"""A broker that is there and says no to the same bytes so often will go on to: a setting is wrong."""


@dataclass
class Outbox:
    """Holds at most what its callers hold: each waits for its own record. ``undelivered`` counts them."""

    publisher: Publisher
    max_undelivered: int
    undelivered: int = 0

    @property
    def is_full(self) -> bool:
        """Whether the broker is so far behind that nothing new should be started."""
        return self.undelivered >= self.max_undelivered

    async def deliver(self, record: Outgoing) -> None:
        """Publish; while the outcome is unknown or no broker answers, again and again, however long that takes.

        Raises:
            BusError: the broker refused the record ``MAX_REFUSALS`` times over.
        """
        persistently = AsyncRetrying(
            sleep=asyncio.sleep,
            retry=retry_if_exception_type(BusError),
            stop=_is_refused_for_good,
            wait=wait_exponential(multiplier=FIRST_PAUSE_S, max=LONGEST_PAUSE_S),
            before_sleep=_log_undelivered,
            # Without reraise callers would get tenacity's RetryError in place of the BusError.
            reraise=True,
        )
        # Counted also while the first attempt runs: a broker that is slow to answer is behind, too.
        self.undelivered += 1
        try:
            await persistently(self.publisher.publish, record)
        finally:
            self.undelivered -= 1


def _is_refused_for_good(attempt: RetryCallState) -> bool:
    # No answer is no refusal, however often: an outage may last for hours, and the trajectory was paid for.
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
    """``control_was_read`` says that control was read to its end; ``claimed`` what a claim of our id means.

    Of two incarnations the coordinator names the newest by first heartbeat. A claim of another one that comes before
    our own may have been overtaken by our first heartbeat; one after it, or one that is repeated, ends us.
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
        """Whether nobody looked at control for longer than ``timeout_s``."""
        return self.clock() - self._control_read_at > self.timeout_s

    def control_was_read(self) -> None:
        """Control was just read to its end."""
        self._control_read_at = self.clock()
        self._control_read.set()

    def claimed(self, incarnation: str) -> None:
        """The coordinator says which incarnation holds our id.

        Raises:
            Superseded: not this one.
        """
        # Another's claim ends us once ours was seen, or when it comes again; a first one before ours may be outdated.
        if incarnation != self.incarnation and self._claims_seen & {self.incarnation, incarnation}:
            self.superseded = Superseded(
                f"worker {self.worker_id} ({self.incarnation}) was superseded by incarnation {incarnation}: another "
                "process has the same id; if both are wanted, give each an id of its own with --id"
            )
            # Wakes whoever waits at the fence: the loop that reads control ends with this error, and nobody else would.
            self._control_read.set()
            raise self.superseded
        self._claims_seen.add(incarnation)

    async def wait_until_passed(self) -> None:
        """Return when it is known that we are not superseded.

        Raises:
            Superseded: we are.
        """
        # A loop: by the time we wake, the process may have been suspended once more.
        while self.superseded is None and self.was_suspended:
            # Cleared first: the event may still be set by a look at control from before the suspension.
            self._control_read.clear()
            await self._control_read.wait()
        if self.superseded is not None:
            raise self.superseded


@dataclass(frozen=True)
class FencedPublisher:
    """A publisher behind the fence; its methods raise ``Superseded`` once the worker is."""

    publisher: Publisher
    fence: Fence

    async def submit(self, record: Outgoing) -> "asyncio.Future[Position]":
        """See the port."""
        await self.fence.wait_until_passed()
        return await self.publisher.submit(record)

    async def publish(self, record: Outgoing) -> Position:
        """See the port."""
        # Every attempt passes the fence anew: the worker may have been superseded since the last one.
        await self.fence.wait_until_passed()
        return await self.publisher.publish(record)

    async def flush(self) -> None:
        """See the port."""
        # Past the fence already: what is waited for here was handed over by the methods above.
        await self.publisher.flush()

    async def close(self) -> None:
        """See the port."""
        await self.publisher.close()
