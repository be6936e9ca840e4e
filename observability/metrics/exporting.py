"""Exports the figures of one process: its meters, the endpoint, and what is looked at beside its work.

Invariant measuring_ends_nothing: whatever fails here is logged; the role goes on.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import structlog

from bus.kafka.bus import KafkaBus
from bus.kafka.cluster import GroupOffsets, Offsets
from bus.port import Subscription, TopicPartition
from observability.metrics.endpoint import endpoint
from observability.metrics.families import Meters
from observability.metrics.roles import Look, measure
from schemas.errors import BusError
from schemas.topics import TRAJECTORIES
from settings.tree import Settings

# What runs beside a role without being part of it. Nothing that happens to a companion ends the role.

log = structlog.get_logger()

END_S = 10.0
Companion = Callable[[asyncio.Event], Awaitable[None]]
"""Runs until stopped."""


@asynccontextmanager
async def beside(companions: Sequence[Companion]) -> AsyncIterator[None]:
    """Run the companions while the block runs; then they have ten seconds to end."""
    over = asyncio.Event()
    tasks = [asyncio.create_task(_unharmed(companion, over)) for companion in companions]
    try:
        yield
    finally:
        over.set()
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=END_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)


async def _unharmed(companion: Companion, over: asyncio.Event) -> None:
    try:
        await companion(over)
    except Exception:
        log.exception("something beside the work of this process failed; the work goes on")


async def stopped_within(stop: asyncio.Event, seconds: float) -> bool:
    """Wait so long, or until stopped."""
    try:
        async with asyncio.timeout(seconds):
            await stop.wait()
    except TimeoutError:
        return False
    return True


LOOK_EVERY_S = 2.0
NOTES = ".prometheus"
"""Where Prometheus finds the processes of all runs: it takes a wildcard for files only."""


@contextmanager
def exported(role: str, process: str, loop: Any, settings: Settings) -> Iterator[tuple[Any, list[Companion]]]:
    """The role with its meters on, and what is to run beside it. Without ``metrics.port``: the role as it is.

    Raises:
        UserError: no port is free.
    """
    if not settings.metrics.port:
        yield loop, []
        return
    meters = Meters(settings.run.name)
    loop, looks = measure(role, loop, meters)
    meters.set(1, "build_info", metadata.version("streamrl"), process, role)
    companions: list[Companion] = [Looking(meters, looks).run]
    if role == "coordinator":
        companions.append(LagSampler(meters, settings).run)
    host, port = settings.metrics.host, settings.metrics.port
    note = settings.run.directory / NOTES / f"{settings.run.name}-{process}.json"
    with endpoint(meters.registry, host, port, process, note):
        yield loop, companions


@dataclass
class Looking:
    """Looks every two seconds, and notes how late it comes to do so."""

    meters: Meters
    looks: Sequence[Look]

    async def run(self, stop: asyncio.Event) -> None:
        """Look until stopped.

        Consumes: what the role knows. Produces: gauges. Waits for: the interval.
        On failure: logs it once for each look, and looks no more there. On stop: returns at once.
        """
        clock, looks = asyncio.get_running_loop().time, list(self.looks)
        while True:
            due = clock() + LOOK_EVERY_S
            if await stopped_within(stop, LOOK_EVERY_S):
                return
            self.meters.set(max(0.0, clock() - due), "event_loop_lag_seconds")
            for look in tuple(looks):
                try:
                    look()
                except Exception:
                    log.exception("a part of the metrics is given up")
                    looks.remove(look)


@dataclass
class LagSampler:
    """Consumer lag as the broker knows it, from committed offsets: also while the trainer is away."""

    meters: Meters
    settings: Settings

    async def run(self, stop: asyncio.Event) -> None:
        """Ask until stopped, over connections that are kept.

        Consumes: nothing. Produces: gauges. Waits for: the interval, the broker.
        On failure: the gauges go, and the broker is asked again. On stop: returns within one question.
        """
        groups, subscription = GroupOffsets(self.settings.kafka, {self._topic}), None
        try:
            while not await stopped_within(stop, self.settings.metrics.lag_interval_s):
                try:
                    if subscription is None:
                        subscription = await self._subscribed()
                    self._note(await groups.ask(), await subscription.end_offsets())
                except BusError as error:
                    log.warning("consumer lag not known", error=str(error))
                    self.meters.forget("consumer_lag_records")
        finally:
            await groups.close()
            if subscription is not None:
                await subscription.close()

    @property
    def _topic(self) -> str:
        return TRAJECTORIES.full_name(self.settings.run.name)

    async def _subscribed(self) -> Subscription:
        """Of which only the ends are asked; it reads nothing."""
        subscription = await KafkaBus(self.settings.kafka).unhurried.subscribe([self._topic], client_id="streamrl-lag")
        subscription.pause(subscription.partitions())
        return subscription

    def _note(self, committed: Mapping[str, Offsets], ends: Mapping[TopicPartition, int]) -> None:
        for group, offsets in committed.items():
            for tp, end in ends.items():
                lag = max(0, end - offsets.get(tp, 0))
                self.meters.set(lag, "consumer_lag_records", TRAJECTORIES.name, str(tp.partition), group)
