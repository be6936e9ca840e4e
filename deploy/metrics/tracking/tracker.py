"""Brings step reports to the trackers, in order and each step once, also over restarts. Knows no tracker's library.

Invariants:
- a_step_is_written_once: the last step written stands in a file; what is at or below it is not written again, so that
  after a crash of the trainer the steps that it takes again keep their first values in the trackers;
- tracking_ends_nothing: a writer that fails is given up and told of; the run goes on.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from deploy.bus.kafka_bus import KafkaBus
from deploy.metrics.companions import Companion
from deploy.metrics.settings import TrackingSettings
from deploy.metrics.tracking.writers import Writer, open_writer
from deploy.settings.tree import Settings
from schemas.errors import BusError, WireError
from schemas.messages.reports import StepReport
from schemas.ports.bus import Bus, Record
from schemas.wire.topics import STEPS

log = structlog.get_logger()

POLL_S = 0.5
RETRY_S = 5.0


@dataclass
class Tracker:
    """``folder`` gets a sub-folder for each tracker, with ``last_step`` in it; ``config``: settings, to be shown."""

    bus: Bus
    run_name: str
    settings: TrackingSettings
    folder: Path
    config: Mapping[str, Any]
    _writers: dict[str, Writer] = field(default_factory=dict)
    _last: dict[str, int] = field(default_factory=dict)

    async def run(self, stop: asyncio.Event) -> None:
        """Track until stopped.

        Consumes: steps, from the beginning. Produces: the trackers' files. Waits for: the trainer.
        On failure: a tracker that cannot write is left out; without the broker it tries again.
        On stop: writes what is on the topic, closes the files, returns.
        """
        await asyncio.to_thread(self.open)
        try:
            while self._writers:
                try:
                    await self._follow(stop)
                    return
                except BusError as error:
                    log.warning("tracking waits for the broker", error=str(error))
                    await asyncio.sleep(RETRY_S)
        finally:
            await asyncio.to_thread(self.close)

    async def _follow(self, stop: asyncio.Event) -> None:
        subscription = await self.bus.subscribe([STEPS.full_name(self.run_name)], client_id="tracking")
        try:
            while self._writers:
                ending = stop.is_set()
                records = await subscription.poll(timeout_s=POLL_S)
                await asyncio.to_thread(self.write, records)
                if ending and not records:
                    return
        finally:
            await subscription.close()

    def open(self) -> None:
        """Open the writers that can be opened."""
        for name in self.settings.to:
            try:
                self._writers[name] = open_writer(
                    name, self.settings.project, self.run_name, self.folder / name, self.config
                )
            except Exception as error:
                log.error("a tracker is left out", tracker=name, error=str(error))
            else:
                self._last[name] = _read(self._note(name))

    def write(self, records: Sequence[Record]) -> None:
        """Write the steps among the records that were not written before."""
        for record in records:
            try:
                report = record.message()
            except WireError:
                continue
            if isinstance(report, StepReport) and report.micro_batches:
                for name in tuple(self._writers):
                    self._write(name, report)

    def _write(self, name: str, report: StepReport) -> None:
        if report.step <= self._last[name]:
            return
        try:
            self._writers[name].write(report.step, report.sent_at, report.metrics)
            self._note(name).write_text(f"{report.step}\n")
        except Exception as error:
            log.error("a tracker is given up", tracker=name, error=str(error))
            del self._writers[name]
        else:
            self._last[name] = report.step

    def close(self) -> None:
        """Close the writers."""
        for name, writer in self._writers.items():
            try:
                writer.close()
            except Exception as error:
                log.error("a tracker was not closed", tracker=name, error=str(error))

    def _note(self, name: str) -> Path:
        return self.folder / name / "last_step"


def tracking_of(role: str, settings: Settings) -> list[Companion]:
    """What tracks the run beside the coordinator, of which there is one; nothing beside other roles."""
    if role != "coordinator" or not settings.tracking.to:
        return []
    folder, config = settings.run.path / "tracking", settings.model_dump(mode="json", exclude={"kafka"})
    return [Tracker(KafkaBus(settings.kafka), settings.run.name, settings.tracking, folder, config).run]


def _read(note: Path) -> int:
    try:
        return int(note.read_text())
    except (OSError, ValueError):
        return -1
