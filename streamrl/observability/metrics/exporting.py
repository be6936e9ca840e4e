"""Exports the metrics of one process: its meters, the endpoint, and the tasks that measure at intervals.

Invariant measuring_never_ends_a_role: a failure here is logged, and the role goes on.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import structlog

from streamrl.bus.kafka.bus import KafkaBus
from streamrl.bus.kafka.cluster import GroupOffsets, Offsets
from streamrl.bus.kafka.settings import KafkaSettings
from streamrl.bus.port import Subscription, TopicPartition
from streamrl.bus.waiting import wait_for_event
from streamrl.observability.background import BackgroundTask
from streamrl.observability.metrics.endpoint import endpoint
from streamrl.observability.metrics.families import CORE_FAMILIES, Family, Meters
from streamrl.observability.metrics.metering import Collector, MeteringObserver, meter_usage, metering_of
from streamrl.observability.metrics.settings import MetricsSettings
from streamrl.schemas.errors import BusError
from streamrl.schemas.topics import TRAJECTORIES

log = structlog.get_logger()

COLLECT_EVERY_S = 2.0
"""Less than Prometheus's usual 15 s between scrapes, and rare enough to cost nothing."""
LAG_INTERVAL_S = 10.0
"""Seconds between two requests to the broker for consumer lag: less than Prometheus' usual interval of 15 s."""
TARGETS = ".prometheus"
"""Folder where Prometheus finds the processes of all runs; one folder, since it takes wildcards only for files."""


@dataclass
class Metering:
    """What sets the meters of a process: an observer of its bus, collectors that ask its role, and background tasks."""

    meters: Meters
    observer: MeteringObserver
    collectors: list[Collector]
    tasks: list[BackgroundTask] = field(default_factory=list)

    def collect(self, setting: Callable[[Meters], None]) -> None:
        """Call ``setting`` every few seconds, to set metrics that no record carries."""
        self.collectors.append(lambda: setting(self.meters))

    def count_response(self, status: int, weight_bytes: int) -> None:
        """Count an answer that the relay starts.

        Bytes of an interrupted transfer may count twice, since the client continues with a range.
        """
        self.meters.count("relay_requests", str(status))
        if weight_bytes:
            self.meters.count("weight_transfer_bytes", by=weight_bytes)


@contextmanager
def open_metering(
    role: str,
    process: str,
    run_name: str,
    settings: MetricsSettings,
    kafka: KafkaSettings,
    directory: Path,
    families: tuple[Family, ...] = (),
) -> Iterator[Metering | None]:
    """Serve the metrics of this process during the block; gives None without ``metrics.port``.

    Args:
        role: the process's role.
        process: the process's name; a worker's id.
        run_name: the ``run`` label of all metrics.
        settings: where to serve.
        kafka: the broker that the coordinator asks for consumer lag.
        directory: the folder of all runs; a file below it tells Prometheus the address.
        families: further metrics, which the role's feature exports.

    Raises:
        UserError: no port is free.
    """
    if not settings.port:
        yield None
        return
    meters = Meters(run_name, CORE_FAMILIES + families)
    observer, collectors = metering_of(role, meters)
    metering = Metering(meters, observer, collectors)
    metering.collect(meter_usage)
    meters.set(1, "build_info", metadata.version("streamrl"), process, role)
    metering.tasks.append(Collecting(meters, collectors).run)
    # one process of a run asks for the lag: the coordinator, since there is only one
    if role == "coordinator":
        metering.tasks.append(LagSampler(meters, kafka).run)
    target = directory / TARGETS / f"{run_name}-{process}.json"
    with endpoint(meters.registry, settings.host, settings.port, process, target):
        yield metering


@dataclass
class Collecting:
    """Calls the collectors every two seconds, and measures how late the event loop calls it."""

    meters: Meters
    collectors: list[Collector]

    async def run(self, stop: asyncio.Event) -> None:
        """Collect until stopped.

        Consumes: the role's state. Produces: gauges. Waits for: the interval.
        On failure: logs the error and drops the collector. On stop: returns at once.
        """
        clock = asyncio.get_running_loop().time
        while True:
            due = clock() + COLLECT_EVERY_S
            if await wait_for_event(stop, COLLECT_EVERY_S):
                return
            # how late the timer's callback came: a delay of the loop delayed the role as well
            self.meters.set(max(0.0, clock() - due), "event_loop_lag_seconds")
            for collect in tuple(self.collectors):  # a copy, since a failed collector is removed
                try:
                    collect()
                except Exception:
                    log.exception("a collector of metrics failed and is dropped")
                    self.collectors.remove(collect)


@dataclass
class LagSampler:
    """Measures consumer lag from the offsets committed at the broker, so that it works while the trainer is down."""

    meters: Meters
    kafka: KafkaSettings
    interval_s: float = LAG_INTERVAL_S

    async def run(self, stop: asyncio.Event) -> None:
        """Ask the broker until stopped, over connections that stay open.

        Consumes: nothing. Produces: gauges. Waits for: the interval, the broker.
        On failure: removes the gauges, and asks the broker again. On stop: returns within one request.
        """
        # both keep their connections: opening one would cost more than the request
        groups, subscription = GroupOffsets(self.kafka, {self._topic}), None
        try:
            while not await wait_for_event(stop, self.interval_s):
                try:
                    if subscription is None:
                        subscription = await self._subscribe()
                    # arguments are evaluated from left to right, so the ends are newer: no lag below zero
                    self._set(await groups.ask(), await subscription.end_offsets())
                except BusError as error:
                    log.warning("consumer lag not known", error=str(error))
                    self.meters.forget("consumer_lag_records")  # a stale lag would look like a current one
        finally:
            await groups.close()
            if subscription is not None:
                await subscription.close()

    @property
    def _topic(self) -> str:
        return TRAJECTORIES.full_name(self.meters.run)

    async def _subscribe(self) -> Subscription:
        """A subscription for its end offsets only. It reads nothing, so it does not prefetch."""
        subscription = await KafkaBus(self.kafka, prefetch=False).subscribe([self._topic], client_id="streamrl-lag")
        subscription.pause(subscription.partitions())
        return subscription

    def _set(self, committed: Mapping[str, Offsets], ends: Mapping[TopicPartition, int]) -> None:
        for group, offsets in committed.items():
            for tp, end in ends.items():
                # the ends are read after the commits, but the two answers may come from different brokers
                lag = max(0, end - offsets.get(tp, 0))
                self.meters.set(lag, "consumer_lag_records", TRAJECTORIES.name, str(tp.partition), group)
