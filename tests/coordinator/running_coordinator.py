"""A coordinator on the in-memory bus, and what it wrote."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from streamrl.bus.memory import MemoryBus
from streamrl.coordinator.coordinator import (
    FINISH_TIMEOUT_S,
    Coordinator,
    CoordinatorTimeouts,
    FleetScaling,
    LastEvaluation,
)
from streamrl.coordinator.policies import CoordinatorContext, OnePolicyControl, PolicyControl
from streamrl.schemas.control import Control
from streamrl.schemas.messages import Message
from streamrl.schemas.topics import CONTROL, Topic
from tests.fakes.topics import create_topics, messages_of, send

RELAYS = ("http://relay:1",)


def new_bus() -> MemoryBus:
    return create_topics(MemoryBus(), "r", 4)


async def publish(bus: MemoryBus, topic: Topic, message: Message) -> None:
    await send(bus, "r", topic, message, "k")


def controls(bus: MemoryBus) -> list[Control]:
    return messages_of(bus, "r", CONTROL, Control)


@asynccontextmanager
async def running(
    bus: MemoryBus,
    clock: Callable[[], float] = time.time,
    scaling: FleetScaling | None = None,
    evaluation: LastEvaluation | None = None,
    heartbeat_timeout_s: float = 8.0,
    policies: Callable[[CoordinatorContext], PolicyControl] = OnePolicyControl,
    finish_timeout_s: float = FINISH_TIMEOUT_S,
) -> AsyncIterator["asyncio.Task[None]"]:
    """A coordinator that is ready; at the end it is stopped, and fails the test if it failed."""
    stop = asyncio.Event()
    timeouts = CoordinatorTimeouts(heartbeat_timeout_s, finish_timeout_s)
    coordinator = Coordinator(bus, "r", RELAYS, clock, timeouts, policies, scaling=scaling, evaluation=evaluation)
    task = asyncio.create_task(coordinator.run(stop))
    await asyncio.sleep(0.05)
    try:
        yield task
    finally:
        stop.set()
        if not task.done():
            await task
