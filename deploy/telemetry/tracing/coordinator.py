"""The coordinator's story: the weights of a step are announced, in the step's trace."""

import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from deploy.telemetry.context import Context, span_id_of
from deploy.telemetry.memory import Memory
from deploy.telemetry.spans import Record, Span, messaging
from deploy.telemetry.tracing.bus import Passage, Stored
from schemas.identifiers import PolicyVersion
from schemas.messages.control import WeightsReady
from schemas.messages.reports import StepReport
from schemas.ports import bus
from schemas.wire.codec import decode
from schemas.wire.topics import CONTROL, STEPS


class _Heard(NamedTuple):
    context: Context
    at_s: float


class CoordinatorStory:
    """Remembers the steps reported; each version is announced at most once."""

    def __init__(self, run: str, record: Record, clock: Callable[[], float] = time.time) -> None:
        self.writes = frozenset({CONTROL.full_name(run)})
        self.reads = frozenset({STEPS.full_name(run)})
        self._record, self._clock = record, clock
        self._reports: Memory[PolicyVersion, _Heard] = Memory(1024)

    def read(self, record: bus.Record, context: Context) -> None:
        """A step report."""
        if isinstance(report := record.message(), StepReport):
            self._reports.put(report.version, _Heard(context, self._clock()))

    def sending(self, record: bus.Outgoing) -> Passage | None:
        """A control message."""
        message = decode(record.value, record.headers)
        if not isinstance(message, WeightsReady) or (heard := self._reports.get(message.version)) is None:
            return None
        context = Context(heard.context.trace_id, span_id_of(heard.context.trace_id, "announce", message.sequence))
        return Passage(context, partial(self._announced, message, heard, context))

    def _announced(self, message: WeightsReady, heard: _Heard, context: Context, stored: Stored) -> None:
        attributes = messaging("send", stored.topic, stored.partition, stored.offset, None) | {
            "streamrl.step": message.step,
            "streamrl.policy.version": str(message.version),
        }
        self._record(
            Span("announce weights", context, heard.context, heard.at_s, stored.ended_s, "producer", attributes)
        )
