"""Puts records on the steps topic, together with the offsets that lag displays show. Knows no policy.

Invariant a_newer_trainer_is_never_fenced_blindly: before a transactional id is opened again, the lineage is checked.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

import structlog

from streamrl.bus.port import Bus, Outgoing, TopicPartition, TransactionalPublisher
from streamrl.bus.waiting import wait_for_tasks
from streamrl.schemas.errors import BusUnavailable, DeliveryUnknown, Superseded

log = structlog.get_logger()

ATTEMPTS = 70  # pauses of 0.2 + 0.4 + ... + 6.4 + 63 x 10 s = 643 s
"""With the pauses between them, more than ten minutes in which a broker may come back."""
FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 10.0
"""Pauses double from the first to the longest: a leader election takes about a second, a broker's restart minutes."""

Check = Callable[[], Awaitable[None]]
"""Raises ``Superseded`` if a newer lineage exists."""
Offsets = Mapping[TopicPartition, int]


async def no_check() -> None:
    """The check before a lineage is claimed: it always passes."""


@dataclass
class StepAnnouncer:
    """Puts records on the steps topic, each time in one short transaction.

    ``fence``: the publisher whose opening fenced older trainers.
    """

    bus: Bus
    transactional_id: str
    group_id: str
    fence: TransactionalPublisher
    check: Check = field(default=no_check)
    elsewhere: Check = field(default=no_check)
    pause: Callable[[float], Awaitable[None]] = asyncio.sleep
    _is_open: bool = True
    _was_fenced: bool = False

    def guard_with(self, check: Check, elsewhere: Check = no_check) -> None:
        """From now on, check before each risky act that the lineage just claimed is still the newest.

        ``check`` asks the storage where it was claimed; ``elsewhere`` the topics, shared with trainers of other
        directories.
        """
        self.check, self.elsewhere = check, elsewhere

    async def announce(self, records: Sequence[Outgoing], offsets: Offsets) -> None:
        """Return once the broker has the records, in order. Readers ignore repeats of a version.

        After an unknown outcome the same records go into a new transaction.

        Raises:
            Superseded: a newer trainer has taken over.
            DeliveryUnknown: no attempt was answered in time.
            BusUnavailable: the broker was away for too long.
            BusError: the broker does not accept them.
        """
        failures = 0
        while True:
            try:
                await self._reopened()
                if await self._commit(records, offsets):
                    return
            except (DeliveryUnknown, BusUnavailable) as error:
                failures += 1
                if failures == ATTEMPTS:
                    raise
                log.warning("announcement unanswered, trying again", attempt=failures, error=str(error))
                # A producer must not be used after an unknown outcome. A new one under the same transactional id aborts
                # the transaction that may still be open. This also fences the id's present holder, so the lineage is
                # checked before.
                await self._discard()
                await self.pause(min(FIRST_PAUSE_S * 2 ** (failures - 1), LONGEST_PAUSE_S))

    async def _commit(self, records: Sequence[Outgoing], offsets: Offsets) -> bool:
        """Commit once; false if the id must be opened again first."""
        try:
            await self.fence.commit(records, offsets=offsets, group_id=self.group_id)
        except Superseded as error:
            await self._settle_fencing(error)
            return False
        return True

    async def _reopened(self) -> None:
        if not self._is_open:
            # Opening the id fences its present holder, which may be a newer trainer by now.
            await self.check()
            await self.elsewhere()
            self.fence = await self.bus.transactional(self.transactional_id)
            self._is_open = True  # only now: if no broker answers, the next attempt must still open it

    async def _settle_fencing(self, error: Superseded) -> None:
        """Raise if superseded. Otherwise an older, replaced trainer fenced us: open the id again, but only once."""
        await self.check()
        if self._was_fenced:
            raise error
        self._was_fenced = True
        log.warning("fenced while holding the newest lineage, opening again", error=str(error))
        await self._discard()

    async def _discard(self) -> None:
        if self._is_open:
            self._is_open = (
                False  # first: if the close fails or is cancelled, the dead publisher must not be used again
            )
            await self.fence.close()

    async def close(self) -> None:
        """Close the publisher."""
        await self._discard()


async def open_announcer(bus: Bus, run_name: str, algorithm: str) -> StepAnnouncer:
    """An announcer of a run's algorithm. Opening it fences the algorithm's older trainers.

    Raises:
        BusUnavailable: no broker answers.
    """
    name = f"{run_name}.{algorithm}.trainer"
    return StepAnnouncer(bus, name, f"{run_name}.{algorithm}", await bus.transactional(name))


@dataclass
class Announcements:
    """Announces in the background while the trainer gathers; at most one at a time, so that their order never changes.

    The records may still have to be made. So weights are exported before they are announced, one set at a time.
    ``done`` is called after each announcement; ``under_way``: the task of the present one.
    """

    announcer: StepAnnouncer
    done: Callable[[], None]
    under_way: "asyncio.Task[None] | None" = None
    _is_made: asyncio.Event = field(default_factory=asyncio.Event)

    async def post(self, make: Callable[[], Awaitable[Sequence[Outgoing]]], offsets: Offsets) -> None:
        """Wait for the previous announcement, then start to make these records and announce them in the background.

        If making them fails, nothing is announced, and the next wait raises the error.

        Raises:
            Superseded: see ``StepAnnouncer``, for the previous announcement.
            BusError: see ``StepAnnouncer``, for the previous announcement.
        """
        await self.settled()
        self._is_made.clear()
        self.under_way = asyncio.create_task(self._announce(make, offsets))

    async def _announce(self, make: Callable[[], Awaitable[Sequence[Outgoing]]], offsets: Offsets) -> None:
        try:
            records = await make()
        finally:
            self._is_made.set()
        await self.announcer.announce(records, offsets)
        self.done()

    async def made(self) -> None:
        """Wait until the records of the present announcement are made, not until they are announced.

        Raises:
            Superseded: see ``StepAnnouncer``.
            BusError: see ``StepAnnouncer``.
        """
        if self.under_way is None:
            return
        await self._is_made.wait()
        if self.under_way.done():
            await self.settled()

    async def settled(self) -> None:
        """Wait for the present announcement, if there is one.

        Raises:
            Superseded: see ``StepAnnouncer``.
            BusError: see ``StepAnnouncer``.
        """
        if self.under_way is not None:
            # ``wait`` instead of ``await``: cancelling this caller must not cancel the announcement.
            await asyncio.wait({self.under_way})
            finished, self.under_way = self.under_way, None
            finished.result()

    async def close(self) -> None:
        """Cancel the present announcement, if there is one, and close the announcer."""
        try:
            if (left := self.under_way) is not None:
                left.cancel()
                await wait_for_tasks([left])
                self.under_way = None
                if not left.cancelled() and (error := left.exception()) is not None:
                    log.error("announcement failed", error=str(error))
        finally:
            await self.announcer.close()
