"""Dead letters: records that cannot be decoded, kept with unchanged bytes. Headers name their origin and the reason."""

from streamrl.bus.port import Outgoing, Record
from streamrl.schemas.codec import Headers
from streamrl.schemas.trajectories import Trajectory

DETAIL_LIMIT = 1000
"""Most characters of an explanation: enough for a message, and a reward function's long output is cut."""
KEY_LIMIT = 256
HEADERS_LIMIT = 32 << 10
"""Most bytes of a bad record's own headers that are kept. With the reason added, Kafka must still accept the record."""


def dead_letter(record: Record, topic: str, error_class: str, error: str, *, now: float) -> Outgoing:
    """The record to write to the dead-letters topic.

    A value is cut only if it is larger than any frame may be, because it could not be written again. A header then
    gives its size.

    Args:
        record: the refused record.
        topic: full name of the dead-letters topic.
        error_class: the class by which dead letters are counted.
        error: the reason for the refusal.
        now: seconds since the epoch.
    """
    reason: Headers = (
        ("dlq-error-class", error_class.encode()),
        ("dlq-error", printable(error, DETAIL_LIMIT).encode()),
        ("dlq-topic", record.topic.encode()),
        ("dlq-partition", str(record.partition).encode()),
        ("dlq-offset", str(record.offset).encode()),
        ("dlq-ts", f"{now:.3f}".encode()),
    )
    value = record.value
    if value is not None and len(value) > Trajectory.MAX_BYTES:
        reason += (("dlq-cut-from", str(len(value)).encode()),)
        value = value[: Trajectory.MAX_BYTES]
    written = sum(len(name) + len(content or b"") for name, content in record.headers)
    kept = record.headers if written <= HEADERS_LIMIT else ()
    key = record.key and printable(record.key, KEY_LIMIT)
    return Outgoing(topic, value, key, 0, (*kept, *reason))


def printable(text: str, limit: int) -> str:
    """The text cut to ``limit`` characters, without characters that UTF-8 cannot encode."""
    # A str may hold lone surrogates, which strict UTF-8 refuses. An explanation must not fail because of them.
    return text[:limit].encode(errors="replace").decode()
