"""A span, whole and ended, as it is handed to whatever exports it. Knows no library."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from observability.tracing.context import Context

Value = str | bool | int | float | Sequence[str]
Kind = Literal["internal", "producer", "consumer"]


@dataclass(frozen=True, slots=True)
class Span:
    """Times are in seconds since the epoch. ``problem``: why it failed; empty if it did not."""

    name: str
    context: Context
    parent: Context | None
    start_s: float
    end_s: float
    kind: Kind = "internal"
    attributes: Mapping[str, Value] = field(default_factory=dict)
    links: Sequence[Context] = ()
    problem: str = ""


Record = Callable[[Span], None]
"""Takes a span; never waits and never fails."""


def messaging(
    operation: Literal["send", "process"], topic: str, partition: int | None, offset: int | None, key: str | None
) -> dict[str, Value]:
    """What OpenTelemetry's conventions say of a Kafka record."""
    found: dict[str, Value] = {
        "messaging.system": "kafka",
        "messaging.operation.type": operation,
        "messaging.operation.name": operation,
        "messaging.destination.name": topic,
    }
    if partition is not None:
        found["messaging.destination.partition.id"] = str(partition)
    if offset is not None:
        found["messaging.kafka.offset"] = offset
    if key is not None:
        found["messaging.kafka.message.key"] = key
    return found
