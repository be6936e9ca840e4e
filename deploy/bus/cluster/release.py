"""Which release of Kafka the brokers are, from the features that they say they support (KIP-584)."""

from io import BytesIO
from typing import Any

from aiokafka.protocol.api import Request, RequestStruct, Response, ResponseHeader_v0
from aiokafka.protocol.types import CompactArray, CompactString, Int16, Int32, Schema, TaggedFields

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
