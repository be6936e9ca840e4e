"""A coordinator on the in-memory bus, and what it wrote."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from streamrl.bus.memory import MemoryBus
from streamrl.bus.port import Outgoing
from streamrl.coordinator.coordinator import Coordinator, FleetScaling, LastEvaluation
from streamrl.coordinator.policies import CoordinatorContext, OnePolicyControl, PolicyControl
from streamrl.coordinator.settings import CoordinatorSettings
from streamrl.schemas.control import Control
from streamrl.schemas.messages import Message
from streamrl.schemas.topics import CATALOGUE, CONTROL, Topic

RELAYS = ("http://relay:1",)


def new_bus() -> MemoryBus:
    bus = MemoryBus()
    for topic in CATALOGUE:
        bus.create_topic(topic.full_name("r"), topic.partition_count(4))
    return bus


async def publish(bus: MemoryBus, topic: Topic, message: Message) -> None:
    await (await bus.publisher("test")).publish(Outgoing.of(topic.full_name("r"), message, key="k"))


def controls(bus: MemoryBus) -> list[Control]:
    messages = [record.message() for record in bus.log(CONTROL.full_name("r")).partitions[0]]
    return [message for message in messages if isinstance(message, Control)]


@asynccontextmanager
async def running(
    bus: MemoryBus,
    clock: Callable[[], float] = time.time,
    scaling: FleetScaling | None = None,
    evaluation: LastEvaluation | None = None,
    heartbeat_timeout_s: float = 8.0,
    policies: Callable[[CoordinatorContext], PolicyControl] = OnePolicyControl,
    **settings: float,
) -> AsyncIterator["asyncio.Task[None]"]:
    """A coordinator that is ready; at the end it is stopped, and fails the test if it failed."""
    stop = asyncio.Event()
    told = CoordinatorSettings(relays=RELAYS, **settings)
    coordinator = Coordinator(
        bus, "r", told, clock, heartbeat_timeout_s, policies, scaling=scaling, evaluation=evaluation
    )
    task = asyncio.create_task(coordinator.run(stop))
    await asyncio.sleep(0.05)
    try:
        yield task
    finally:
        stop.set()
        if not task.done():
            await task
