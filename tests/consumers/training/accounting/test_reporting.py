import asyncio

import pytest

from consumers.training.accounting.reporting import ATTEMPTS, StepReporter
from schemas.errors import BusError, DeliveryUnknown
from schemas.identifiers import PolicyVersion
from schemas.messages.reports import StepReport
from schemas.ports.bus import Outgoing, Position

REPORT = StepReport(
    algorithm="grpo",
    step=1,
    version=PolicyVersion(1, 1),
    manifest_sha256="0" * 64,
    group_ids=(),
    micro_batches=(),
    metrics={},
    sent_at=0.0,
)


class Unanswering:
    """A publisher whose first sends end in an error."""

    def __init__(self, failures: int, error: BusError) -> None:
        self.failures, self.error = failures, error
        self.sent: list[Outgoing] = []

    async def publish(self, record: Outgoing) -> Position:
        self.sent.append(record)
        if len(self.sent) <= self.failures:
            raise self.error
        return Position(record.topic, 0, len(self.sent))

    async def submit(self, record: Outgoing) -> "asyncio.Future[Position]":
        raise AssertionError("a report is waited for")

    async def flush(self) -> None:
        return None

    async def close(self) -> None:
        return None


async def test_a_report_that_may_be_lost_is_sent_again_as_it_was() -> None:
    publisher = Unanswering(2, DeliveryUnknown("late"))
    await StepReporter(publisher, "r", lambda: 0.0).publish(REPORT)
    assert len(publisher.sent) == 3
    assert {(record.topic, record.value) for record in publisher.sent} == {("r.steps", publisher.sent[0].value)}


async def test_a_report_that_stays_unanswered_stops_the_trainer() -> None:
    publisher = Unanswering(99, DeliveryUnknown("late"))
    with pytest.raises(DeliveryUnknown):
        await StepReporter(publisher, "r", lambda: 0.0).publish(REPORT)
    assert len(publisher.sent) == ATTEMPTS


async def test_a_refused_report_is_not_sent_again() -> None:
    publisher = Unanswering(1, BusError("too large"))
    with pytest.raises(BusError, match="too large"):
        await StepReporter(publisher, "r", lambda: 0.0).publish(REPORT)
    assert len(publisher.sent) == 1
