"""Step reports on the steps topic. A report that may not have arrived is sent again under the same version."""

from collections.abc import Callable
from dataclasses import dataclass

import structlog

from schemas.errors import DeliveryUnknown
from schemas.messages.reports import StepReport
from schemas.ports.bus import Outgoing, Publisher
from schemas.wire.topics import STEPS

log = structlog.get_logger()

ATTEMPTS = 5


@dataclass(frozen=True)
class StepReporter:
    """Publishes the reports of one trainer."""

    publisher: Publisher
    run_name: str
    clock: Callable[[], float]

    async def publish(self, report: StepReport) -> None:
        """Return once the broker has the report. Readers ignore repeats of a version.

        Raises:
            DeliveryUnknown: no attempt was answered in time.
            BusError: the broker refused it.
        """
        record = Outgoing.of(STEPS.full_name(self.run_name), report, key=report.algorithm)
        for attempt in range(1, ATTEMPTS + 1):
            try:
                await self.publisher.publish(record)
            except DeliveryUnknown as error:
                if attempt == ATTEMPTS:
                    raise
                log.warning("step report unanswered, sending it again", step=report.step, error=str(error))
            else:
                return
