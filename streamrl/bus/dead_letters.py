"""A record that nobody can make use of, as it is kept: its bytes unchanged, where it stood and why in the headers."""

from streamrl.bus.port import Outgoing, Record
from streamrl.schemas.codec import Headers
from streamrl.schemas.trajectories import Trajectory

DETAIL_LIMIT = 1000
"""Characters of an explanation: enough for a message, while a row stays small whatever a reward function printed."""
KEY_LIMIT = 256
HEADERS_LIMIT = 32 << 10
"""Bytes of a bad record's own headers that are kept: with the reason added, Kafka must still take the record."""


def dead_letter(record: Record, topic: str, error_class: str, error: str, *, now: float) -> Outgoing:
    """The record as it goes onto the dead-letters topic.

    Only what is larger than any frame may be, and so cannot be written again, is cut; a header says so.

    Args:
        record: what was refused.
        topic: full name of the dead-letters topic.
        error_class: by which dead letters are counted.
        error: why it was refused.
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
    """Text cut to a length, and free of what UTF-8 cannot carry."""
    # A str may hold lone surrogates, which strict UTF-8 refuses; an explanation must not fail for its spelling.
    return text[:limit].encode(errors="replace").decode()
