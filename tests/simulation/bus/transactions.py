"""A transactional publisher on the simulated bus: all or nothing, one holder of an id, outcomes at times unknown."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from streamrl.bus.port import Outgoing, TopicPartition
from streamrl.schemas.errors import BusError, BusUnavailable, DeliveryUnknown, Superseded
from tests.simulation.bus.broker import Fate, Transaction, partition_of
from tests.simulation.bus.network import calling_role, coordinator_of
from tests.simulation.processes import OUTSIDE

if TYPE_CHECKING:
    from tests.simulation.bus.sim_bus import SimBus


@dataclass(eq=False)
class SimTransactionalPublisher:
    """``bus.port.TransactionalPublisher``. ``unresolved``: a transaction whose end is not known here."""

    bus: "SimBus"
    name: str
    transactional_id: str
    epoch: int
    closed: bool = False
    unresolved: Transaction | None = None

    async def commit(
        self,
        records: Sequence[Outgoing],
        *,
        offsets: Mapping[TopicPartition, int] | None = None,
        group_id: str | None = None,
    ) -> None:
        """One transaction."""
        self._check_open()
        chances = self.bus.chances
        await self.bus.connected("a transaction", coordinator_of(self.transactional_id))
        self._check_holder()
        if self.unresolved is not None:
            self.epoch, self.unresolved = self.bus.broker.fence(self.transactional_id), None
        if chances.happens(chances.rates.txn_refused):
            raise BusUnavailable("the coordinator of the transaction is moving: commit the same records again")
        placed = [(self._place(record), record) for record in records]
        transaction = self.bus.broker.begin(self.transactional_id, self.epoch)
        self._abort_in_time(transaction)
        for tp, record in placed:
            await self._write(transaction, tp, record)
        if offsets and group_id is not None:
            transaction.offsets.update({(group_id, tp): offset for tp, offset in offsets.items()})
        await self._end(transaction)

    def _place(self, record: Outgoing) -> TopicPartition:
        logs = self.bus.broker.logs(record.topic)
        number = partition_of(record.key, len(logs)) if record.partition is None else record.partition
        if not 0 <= number < len(logs):
            raise BusError(f"expected a partition below {len(logs)} of {record.topic}, got {number}")
        return TopicPartition(record.topic, number)

    async def _write(self, transaction: Transaction, tp: TopicPartition, record: Outgoing) -> None:
        if not self.bus.is_perfect:
            await asyncio.sleep(self.bus.chances.latency() + self.bus.network.append_s(tp))
        self._check_holder(transaction)
        if not self.bus.broker.is_up or not self.bus.network.reaches_leader(calling_role(), tp):
            self.unresolved = transaction
            raise BusUnavailable("the broker went away before the transaction was written; nothing of it will be read")
        offset = self.bus.broker.append(tp, record, transaction, self.bus.stamp())
        self.bus.events.add("append in transaction", self.name, *tp, offset)

    async def _end(self, transaction: Transaction) -> None:
        if self.bus.is_perfect:
            self.bus.broker.end(transaction, Fate.COMMITTED)
            return
        chances, loop = self.bus.chances, asyncio.get_running_loop()
        unanswered = chances.happens(chances.rates.txn_unanswered)
        # A request that is cut off never arrives; of one that arrives the answer may be lost.
        if not self.bus.network.reaches(calling_role(), coordinator_of(self.transactional_id)):
            await self._unanswered(transaction)
        if not unanswered or chances.happens(0.5):
            loop.call_later(chances.latency(), self._end_arrives, transaction, context=OUTSIDE)
        if unanswered:
            await self._unanswered(transaction)
        transaction.ended = loop.create_future()
        await asyncio.wait([transaction.ended], timeout=chances.rates.delivery_timeout_s)
        await asyncio.sleep(chances.latency())
        if transaction.fate is Fate.OPEN:
            self.unresolved = transaction
            raise DeliveryUnknown("the end of the transaction was not answered: commit the same records again")
        if transaction.fate is Fate.ABORTED:
            self._check_holder()
            raise BusError("the broker ended the transaction, which took too long; nothing of it will be read")
        self.bus.events.add("transaction committed", self.name)

    async def _unanswered(self, transaction: Transaction) -> NoReturn:
        await asyncio.sleep(self.bus.chances.rates.delivery_timeout_s)
        self.unresolved = transaction
        self._check_holder()
        self.bus.events.add("transaction unknown", self.name, transaction.fate.value)
        raise DeliveryUnknown("the end of the transaction was not answered: commit the same records again")

    def _end_arrives(self, transaction: Transaction) -> None:
        """Runs at the broker: the end counts only under the present epoch."""
        broker = self.bus.broker
        if broker.is_up and broker.epochs[self.transactional_id] == transaction.epoch:
            broker.end(transaction, Fate.COMMITTED)

    def _abort_in_time(self, transaction: Transaction) -> None:
        if not self.bus.is_perfect:
            asyncio.get_running_loop().call_later(
                self.bus.chances.rates.txn_timeout_s,
                self.bus.broker.end,
                transaction,
                Fate.ABORTED,
                context=OUTSIDE,
            )

    def _check_holder(self, transaction: Transaction | None = None) -> None:
        if self.bus.broker.epochs[self.transactional_id] > self.epoch:
            raise Superseded(
                f"expected to be the newest holder of {self.transactional_id}, found a newer one: let it go on"
            )
        if transaction is not None and transaction.fate is Fate.ABORTED:
            raise BusError("the broker ended the transaction, which took too long; nothing of it will be read")

    def _check_open(self) -> None:
        self.bus.check_caller()
        if self.closed:
            raise BusError(f"publisher {self.name} is closed; open a new one")

    async def close(self) -> None:
        """Refuse further records; an open transaction is aborted by the next holder or in time."""
        self.closed = True
