"""Which release of Kafka the brokers are, from the features that they say they support (KIP-584)."""

from io import BytesIO
from typing import Any, NamedTuple

from aiokafka import AIOKafkaProducer
from aiokafka.errors import ProducerFenced
from aiokafka.producer.sender import InitPIDHandler
from aiokafka.protocol.api import Request, RequestStruct, Response, ResponseHeader_v0
from aiokafka.protocol.types import CompactArray, CompactString, Int16, Int32, Int64, Schema, TaggedFields

# Who the holder of a transactional id is. Knows neither records nor transactions. A holder is a producer id and an
# epoch. Whoever opens the id for the first time fences every other holder. Whoever opens it again says which holder
# it was, so that the broker refuses it if there is a newer one meanwhile (KIP-360); aiokafka cannot say so, and would
# fence the newer holder instead.

_INVALID_PRODUCER_EPOCH, _PRODUCER_FENCED = 47, 90


class Holder(NamedTuple):
    """A producer id and its epoch."""

    producer_id: int
    epoch: int


NOBODY = Holder(-1, -1)


class _ProducerIdAnswer(Response):  # type: ignore[misc]
    API_KEY = 22
    API_VERSION = 3
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        ("error_code", Int16),
        ("producer_id", Int64),
        ("producer_epoch", Int16),
        ("tags", TaggedFields),
    )


class _ProducerIdQuestion(RequestStruct):  # type: ignore[misc]
    API_KEY = 22
    API_VERSION = 3
    FLEXIBLE_VERSION = True
    RESPONSE_TYPE = _ProducerIdAnswer
    SCHEMA = Schema(
        ("transactional_id", CompactString("utf-8")),
        ("transaction_timeout_ms", Int32),
        ("producer_id", Int64),
        ("producer_epoch", Int16),
        ("tags", TaggedFields),
    )


class _Open(Request[_ProducerIdQuestion]):  # type: ignore[misc]
    API_KEY = 22

    def __init__(self, transactional_id: str, timeout_ms: int, holder: Holder) -> None:
        self._fields: tuple[object, ...] = (transactional_id, timeout_ms, *holder, {})

    def build(self, request_struct_class: type[_ProducerIdQuestion]) -> _ProducerIdQuestion:
        return request_struct_class(*self._fields)


class _Opening(InitPIDHandler):  # type: ignore[misc]
    """aiokafka's own opening, with the holder that we were."""

    holder = NOBODY

    def create_request(self) -> _Open:
        manager = self._sender._txn_manager  # noqa: SLF001
        return _Open(manager.transactional_id, manager.transaction_timeout_ms, self.holder)

    def handle_response(self, answer: _ProducerIdAnswer) -> float | None:
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


LEVELS = (
    (1, "3.3"),
    (8, "3.4"),
    (9, "3.5"),
    (12, "3.6"),
    (15, "3.7"),
    (20, "3.8"),
    (21, "3.9"),
    (22, "4.0"),
    (26, "4.1"),
    (28, "4.2"),
    (30, "4.3"),
)
"""First level of the feature ``metadata.version`` in each release."""
_FEATURE = "metadata.version"
_SUPPORTED = 0
"""Tag of the supported features in the answer."""


_FEATURES = CompactArray(
    ("name", CompactString("utf-8")), ("lowest", Int16), ("highest", Int16), ("tags", TaggedFields)
)


class _Answer(Response):  # type: ignore[misc]
    API_KEY = 18
    API_VERSION = 3
    SCHEMA = Schema(
        ("error_code", Int16),
        ("api_versions", CompactArray(("key", Int16), ("lowest", Int16), ("highest", Int16), ("tags", TaggedFields))),
        ("throttle_time_ms", Int32),
        ("tags", TaggedFields),
    )


class _Question(RequestStruct):  # type: ignore[misc]
    API_KEY = 18
    API_VERSION = 3
    FLEXIBLE_VERSION = True
    RESPONSE_TYPE = _Answer
    SCHEMA = Schema(("name", CompactString("utf-8")), ("version", CompactString("utf-8")), ("tags", TaggedFields))

    def parse_response_header(self, read_buffer: BytesIO | bytes) -> Any:
        """The answer to this question alone has the old header, so that any client can read it."""
        return ResponseHeader_v0.decode(read_buffer)


class _Features(Request[_Question]):  # type: ignore[misc]
    API_KEY = 18

    def build(self, request_struct_class: type[_Question]) -> _Question:
        return request_struct_class("streamrl", "1", {})


async def release_of(client: Any, node_id: int) -> str | None:
    """Release of a broker, such as ``4.1``; None: it is older than 3.3, or not Apache Kafka, and does not tell."""
    answer = await client.send(node_id, _Features())
    return release_at(_highest_level(answer.tags.get(_SUPPORTED)))


def release_at(level: int) -> str | None:
    """The release that has this level as its highest, as far as we know releases."""
    known = [name for first, name in LEVELS if first <= level]
    return known[-1] if known else None


def _highest_level(features: bytes | None) -> int:
    if not features:
        return 0
    return next((highest for name, _, highest, _ in _FEATURES.decode(BytesIO(features)) if name == _FEATURE), 0)
