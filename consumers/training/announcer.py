"""Puts records on the steps topic, together with the offsets that lag displays show. Knows no policy.

Invariant a_newer_trainer_is_never_fenced_blindly: before a transactional id is opened again, the lineage is checked.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import structlog

from streamrl.bus.port import Bus, Outgoing, Publisher, TopicPartition, TransactionalPublisher
from streamrl.bus.waiting import until_ended
from streamrl.schemas.errors import BusUnavailable, DeliveryUnknown, Superseded

log = structlog.get_logger()

ATTEMPTS = 70  # pauses of 0.2 + 0.4 + ... + 6.4 + 63 x 10 s = 643 s
"""With the pauses between them, more than ten minutes in which a broker may come back."""
SENDS = 10
"""Of one record without a transaction; each waits for its own deadline."""
FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 10.0
"""Pauses double from the one to the other: a leader election takes about a second, a restart of a broker minutes."""

Check = Callable[[], Awaitable[None]]
"""Raises ``Superseded`` if a newer lineage exists."""
Offsets = Mapping[TopicPartition, int]


async def nobody_else() -> None:
    """The check before a lineage is claimed."""


class StepAnnouncer(Protocol):
    """One way to announce."""

    def guard_with(self, check: Check, elsewhere: Check = nobody_else) -> None:
        """Ask from now on, before anything is risked, whether the lineage just claimed is still the newest.

        ``check`` asks where it was claimed; ``elsewhere`` asks the topics, which trainers of other directories share.
        """
        ...

    async def announce(self, records: Sequence[Outgoing], offsets: Offsets) -> None:
        """Return once the broker has the records, in order. Readers ignore repeats of a version.

        Raises:
            Superseded: a newer trainer has taken over.
            DeliveryUnknown: no attempt was answered in time.
            BusUnavailable: the broker was away for too long.
            BusError: the broker does not take them.
        """
        ...

    async def close(self) -> None:
        """Release."""
        ...


@dataclass
class TransactionalAnnouncer:
    """One short transaction per announcement. ``fence``: the publisher whose opening fenced older trainers."""

    bus: Bus
    transactional_id: str
    group_id: str
    fence: TransactionalPublisher
    check: Check = field(default=nobody_else)
    elsewhere: Check = field(default=nobody_else)
    pause: Callable[[float], Awaitable[None]] = asyncio.sleep
    _is_open: bool = True
    _was_fenced: bool = False

    def guard_with(self, check: Check, elsewhere: Check = nobody_else) -> None:
        """See ``StepAnnouncer``."""
        self.check, self.elsewhere = check, elsewhere

    async def announce(self, records: Sequence[Outgoing], offsets: Offsets) -> None:
        """See ``StepAnnouncer``. After an unknown outcome the same records go into a new transaction."""
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
                # The producer may not go on after an unknown outcome: only a new one, under the same transactional id,
                # aborts what may still be open. That fences whoever holds the id, so the lineage is checked before.
                await self._discard()
                await self.pause(min(FIRST_PAUSE_S * 2 ** (failures - 1), LONGEST_PAUSE_S))

    async def _commit(self, records: Sequence[Outgoing], offsets: Offsets) -> bool:
        """False if the id is to be opened again first."""
        try:
            await self.fence.commit(records, offsets=offsets, group_id=self.group_id)
        except Superseded as error:
            await self._settle_fencing(error)
            return False
        return True

    async def _reopened(self) -> None:
        if not self._is_open:
            # Right before the id is opened again, which fences whoever holds it: another may have taken over by now.
            await self.check()
            await self.elsewhere()
            self.fence = await self.bus.transactional(self.transactional_id)
            self._is_open = True  # only now: if no broker answers, the next attempt has to open it still

    async def _settle_fencing(self, error: Superseded) -> None:
        """Fenced, and yet the newest lineage: once, that is an older trainer that was just being replaced."""
        await self.check()
        if self._was_fenced:
            raise error
        self._was_fenced = True
        log.warning("fenced while holding the newest lineage, opening again", error=str(error))
        await self._discard()

    async def _discard(self) -> None:
        if self._is_open:
            self._is_open = False  # first: a close that fails or is cancelled must not leave the dead one in use
            await self.fence.close()

    async def close(self) -> None:
        """Release."""
        await self._discard()


@dataclass
class PlainAnnouncer:
    """Single records without a transaction; only the lineage tells an older trainer to stop. Commits no offsets."""

    publisher: Publisher
    check: Check = field(default=nobody_else)

    def guard_with(self, check: Check, elsewhere: Check = nobody_else) -> None:
        """See ``StepAnnouncer``. The topics are not asked: that would take longer than the announcement itself."""
        self.check = check

    async def announce(self, records: Sequence[Outgoing], offsets: Offsets) -> None:
        """See ``StepAnnouncer``."""
        # No transaction fences an older trainer here: what it sends after this look is told by its lineage alone.
        await self.check()
        for record in records:
            await self._publish(record)

    async def _publish(self, record: Outgoing) -> None:
        for attempt in range(1, SENDS + 1):
            try:
                await self.publisher.publish(record)
            except DeliveryUnknown as error:
                if attempt == SENDS:
                    raise
                log.warning("announcement unanswered, sending it again", attempt=attempt, error=str(error))
                await self.check()
            else:
                return

    async def close(self) -> None:
        """Release."""
        await self.publisher.close()


async def open_announcer(
    bus: Bus, kind: Literal["transaction", "plain"], run_name: str, algorithm: str
) -> StepAnnouncer:
    """An announcer of a run's algorithm. In transactions, this fences older trainers of it.

    Raises:
        BusUnavailable: no broker answers.
    """
    name = f"{run_name}.{algorithm}.trainer"
    if kind == "plain":
        return PlainAnnouncer(await bus.publisher(name))
    return TransactionalAnnouncer(bus, name, f"{run_name}.{algorithm}", await bus.transactional(name))


# Announcements under way while the trainer goes on gathering: at most one, so that their order never changes. What is
# announced may still have to be made: then weights are exported before anybody is told of them, and one set at a time.


@dataclass
class Announcements:
    """``done`` is called after each one."""

    announcer: StepAnnouncer
    done: Callable[[], None]
    under_way: "asyncio.Task[None] | None" = None
    _is_made: asyncio.Event = field(default_factory=asyncio.Event)

    async def post(self, make: Callable[[], Awaitable[Sequence[Outgoing]]], offsets: Offsets) -> None:
        """Make records and announce them, once the one before is settled; returns while this one is under way.

        What fails in the making ends the announcement.

        Raises:
            Superseded: see ``StepAnnouncer``, for the one before.
            BusError: see ``StepAnnouncer``, for the one before.
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
        """Wait until the records of the one under way are made, if not until they are announced.

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
        """Wait for the one under way.

        Raises:
            Superseded: see ``StepAnnouncer``.
            BusError: see ``StepAnnouncer``.
        """
        if self.under_way is not None:
            # ``wait`` and not ``await``: whoever is cancelled here does not cancel the announcement with it.
            await asyncio.wait({self.under_way})
            finished, self.under_way = self.under_way, None
            finished.result()

    async def close(self) -> None:
        """Give up the one under way, if any, and release."""
        try:
            if (left := self.under_way) is not None:
                left.cancel()
                await until_ended([left])
                self.under_way = None
                if not left.cancelled() and (error := left.exception()) is not None:
                    log.error("announcement failed", error=str(error))
        finally:
            await self.announcer.close()
