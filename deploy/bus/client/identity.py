"""Who the holder of a transactional id is. Knows neither records nor transactions.

A holder is a producer id and an epoch. Whoever opens the id for the first time fences every other holder. Whoever
opens it again says which holder it was, so that the broker refuses it if there is a newer one meanwhile (KIP-360);
aiokafka cannot say so, and would fence the newer holder instead.
"""

from typing import NamedTuple

from aiokafka import AIOKafkaProducer
from aiokafka.errors import ProducerFenced
from aiokafka.producer.sender import InitPIDHandler
from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.types import CompactString, Int16, Int32, Int64, Schema, TaggedFields

_INVALID_PRODUCER_EPOCH, _PRODUCER_FENCED = 47, 90


class Holder(NamedTuple):
    """A producer id and its epoch."""

    producer_id: int
    epoch: int


NOBODY = Holder(-1, -1)


class _Answer(Response):  # type: ignore[misc]
    API_KEY = 22
    API_VERSION = 3
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        ("error_code", Int16),
        ("producer_id", Int64),
        ("producer_epoch", Int16),
        ("tags", TaggedFields),
    )


class _Question(RequestStruct):  # type: ignore[misc]
    API_KEY = 22
    API_VERSION = 3
    FLEXIBLE_VERSION = True
    RESPONSE_TYPE = _Answer
    SCHEMA = Schema(
        ("transactional_id", CompactString("utf-8")),
        ("transaction_timeout_ms", Int32),
        ("producer_id", Int64),
        ("producer_epoch", Int16),
        ("tags", TaggedFields),
    )


class _Open(Request[_Question]):  # type: ignore[misc]
    API_KEY = 22

    def __init__(self, transactional_id: str, timeout_ms: int, holder: Holder) -> None:
        self._fields: tuple[object, ...] = (transactional_id, timeout_ms, *holder, {})

    def build(self, request_struct_class: type[_Question]) -> _Question:
        return request_struct_class(*self._fields)


class _Opening(InitPIDHandler):  # type: ignore[misc]
    """aiokafka's own opening, with the holder that we were."""

    holder = NOBODY

    def create_request(self) -> _Open:
        manager = self._sender._txn_manager  # noqa: SLF001
        return _Open(manager.transactional_id, manager.transaction_timeout_ms, self.holder)

    def handle_response(self, answer: _Answer) -> float | None:
        if answer.error_code in (_INVALID_PRODUCER_EPOCH, _PRODUCER_FENCED):
            raise ProducerFenced
        backoff: float | None = super().handle_response(answer)
        return backoff


def open_as(producer: AIOKafkaProducer, holder: Holder) -> None:
    """Have a producer that is not started yet open its transactional id as the holder that we were.

    ``start`` then raises ``ProducerFenced`` if there is a newer one.
    """
    sender = producer._sender  # noqa: SLF001

    async def open_at(node_id: int) -> bool:
        opening = _Opening(sender)
        opening.holder = holder
        return bool(await opening.do(node_id))

    sender._do_init_pid = open_at  # noqa: SLF001


def holder_of(producer: AIOKafkaProducer) -> Holder:
    """Who a started producer is."""
    manager = producer._txn_manager  # noqa: SLF001
    return Holder(manager.producer_id, manager.producer_epoch)
