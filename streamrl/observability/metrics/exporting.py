"""Exports the figures of one process: its meters, the endpoint, and what is looked at beside its work.

Invariant measuring_ends_nothing: whatever fails here is logged; the role goes on.
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
from streamrl.bus.waiting import happens_within
from streamrl.observability.background import BackgroundTask
from streamrl.observability.metrics.endpoint import endpoint
from streamrl.observability.metrics.families import CORE_FAMILIES, Family, Meters
from streamrl.observability.metrics.metering import Collector, MeteringObserver, metering_of
from streamrl.observability.metrics.settings import MetricsSettings
from streamrl.schemas.errors import BusError
from streamrl.schemas.topics import TRAJECTORIES

log = structlog.get_logger()

COLLECT_EVERY_S = 2.0
"""Under Prometheus's usual 15 s between scrapes, and rare enough to cost nothing."""
TARGETS = ".prometheus"
"""Where Prometheus finds the processes of all runs: it takes a wildcard for files only."""


@dataclass
class Metering:
    """How the meters of a process get their figures: at its bus, by asking its role, and beside its work."""

    meters: Meters
    observer: MeteringObserver
    collectors: list[Collector]
    tasks: list[BackgroundTask] = field(default_factory=list)

    def collect(self, setting: Callable[[Meters], None]) -> None:
        """Call this every few seconds, to set figures that no record carries."""
        self.collectors.append(lambda: setting(self.meters))

    def count_response(self, status: int, weight_bytes: int) -> None:
        """The relay begins an answer.

        A transfer that breaks off and goes on with a range counts twice in part.
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
    """While the block runs, the figures of this process are served; None without ``metrics.port``.

    Args:
        role: what this process is.
        process: its name; workers have their ids.
        run_name: the label of all its figures.
        settings: where to serve.
        kafka: whom the coordinator asks for consumer lag.
        directory: of all runs; a file below it tells Prometheus the address.
        families: besides those of the core, which the role's feature exports.

    Raises:
        UserError: no port is free.
    """
    if not settings.port:
        yield None
        return
    meters = Meters(run_name, CORE_FAMILIES + families)
    observer, collectors = metering_of(role, meters)
    metering = Metering(meters, observer, collectors)
    meters.set(1, "build_info", metadata.version("streamrl"), process, role)
    metering.tasks.append(Collecting(meters, collectors).run)
    # one process of a run asks for the lag, and there is one coordinator
    if role == "coordinator":
        metering.tasks.append(LagSampler(meters, kafka, settings.lag_interval_s).run)
    target = directory / TARGETS / f"{run_name}-{process}.json"
    with endpoint(meters.registry, settings.host, settings.port, process, target):
        yield metering


@dataclass
class Collecting:
    """Collects every two seconds, and notes how late it comes to do so."""

    meters: Meters
    collectors: list[Collector]

    async def run(self, stop: asyncio.Event) -> None:
        """Collect until stopped.

        Consumes: what the role knows. Produces: gauges. Waits for: the interval.
        On failure: logs it once for each collector, and asks that one no more. On stop: returns at once.
        """
        clock = asyncio.get_running_loop().time
        while True:
            due = clock() + COLLECT_EVERY_S
            if await happens_within(stop, COLLECT_EVERY_S):
                return
            # how long after its time the timer's callback came: whatever held up the loop held up the role as well
            self.meters.set(max(0.0, clock() - due), "event_loop_lag_seconds")
            for collect in tuple(self.collectors):  # a copy, since one that fails leaves the list
                try:
                    collect()
                except Exception:
                    log.exception("a collector of metrics failed and is left out")
                    self.collectors.remove(collect)


@dataclass
class LagSampler:
    """Consumer lag as the broker knows it, from committed offsets: also while the trainer is away."""

    meters: Meters
    kafka: KafkaSettings
    interval_s: float

    async def run(self, stop: asyncio.Event) -> None:
        """Ask until stopped, over connections that are kept.

        Consumes: nothing. Produces: gauges. Waits for: the interval, the broker.
        On failure: the gauges go, and the broker is asked again. On stop: returns within one question.
        """
        # both keep their connections: a new one for every question would cost more than the question
        groups, subscription = GroupOffsets(self.kafka, {self._topic}), None
        try:
            while not await happens_within(stop, self.interval_s):
                try:
                    if subscription is None:
                        subscription = await self._subscribed()
                    # arguments are evaluated from left to right, so the ends are the younger ones: no lag below zero
                    self._set(await groups.ask(), await subscription.end_offsets())
                except BusError as error:
                    log.warning("consumer lag not known", error=str(error))
                    self.meters.forget("consumer_lag_records")  # a stale lag would look like one that holds
        finally:
            await groups.close()
            if subscription is not None:
                await subscription.close()

    @property
    def _topic(self) -> str:
        return TRAJECTORIES.full_name(self.meters.run)

    async def _subscribed(self) -> Subscription:
        """Only its ends are asked: it reads nothing, so nothing is to be fetched ahead."""
        subscription = await KafkaBus(self.kafka, prefetch=False).subscribe([self._topic], client_id="streamrl-lag")
        subscription.pause(subscription.partitions())
        return subscription

    def _set(self, committed: Mapping[str, Offsets], ends: Mapping[TopicPartition, int]) -> None:
        for group, offsets in committed.items():
            for tp, end in ends.items():
                # the ends are asked after the commits, yet both may be of different brokers
                lag = max(0, end - offsets.get(tp, 0))
                self.meters.set(lag, "consumer_lag_records", TRAJECTORIES.name, str(tp.partition), group)
