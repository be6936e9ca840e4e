"""Puts meters on a role: a counting bus around its own, and a look at what it knows of itself now and then."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from aiohttp import web

from bus.port import Bus
from coordinator.relay import Relay
from observability.metrics.families import Meters
from observability.metrics.interceptor import MeasuredBus, Sight, of_message
from observability.metrics.messages import CoordinatorMessages, TrainerMessages, WorkerMessages
from schemas.topics import CONTROL, DEAD_LETTERS, HEARTBEATS, SKIPS, STEPS

# A relay that counts what it serves.


@dataclass
class MeasuredRelay(Relay):
    """Bytes count when an answer begins; a transfer that breaks off and goes on with a range counts twice in part."""

    meters: Meters

    def application(self) -> web.Application:
        """The routes, with a meter on every answer."""
        app = super().application()
        app.on_response_prepare.append(self._count)
        return app

    async def _count(self, request: web.Request, response: web.StreamResponse) -> None:
        self.meters.count("relay_requests", str(response.status))
        if isinstance(response, web.FileResponse) and request.method == "GET" and response.content_length is not None:
            self.meters.count("weight_transfer_bytes", by=response.content_length)


Look = Callable[[], None]
"""Called every few seconds on the event loop."""
SILENT_S = 10.0


@runtime_checkable
class OnBus(Protocol):
    """A role that reads and writes topics."""

    bus: Bus


@runtime_checkable
class HasStatus(Protocol):
    """A role that says what is under way."""

    def status(self) -> Any:
        """A snapshot."""
        ...


def measure(role: str, loop: Any, meters: Meters) -> tuple[Any, list[Look]]:
    """The role with its meters on, and what to look at every few seconds."""
    looks: list[Look] = []
    if isinstance(loop, OnBus):
        sight = Sight(meters)
        looks += _observe(role, sight)
        loop.bus = MeasuredBus(loop.bus, sight)
    elif role == "relay":
        loop = MeasuredRelay(loop.store, loop.settings, meters)
    if role == "dispatcher" and isinstance(loop, HasStatus):
        asked = loop
        looks.append(lambda: look_at_dispatcher(asked.status(), meters))
    return loop, looks


def _observe(role: str, sight: Sight) -> list[Look]:
    run, meters = sight.meters.run, sight.meters
    match role:
        case "trainer":
            trainer = TrainerMessages(meters)
            for topic in (STEPS, SKIPS):
                sight.published[topic.full_name(run)] = of_message(trainer.take)
            sight.published[DEAD_LETTERS.full_name(run)] = trainer.take_dead_letter
        case "worker":
            sight.published[HEARTBEATS.full_name(run)] = of_message(WorkerMessages(meters).take)
        case "coordinator":
            coordinator = CoordinatorMessages(meters)
            sight.published[CONTROL.full_name(run)] = of_message(coordinator.take)
            sight.consumed[HEARTBEATS.full_name(run)] = of_message(coordinator.hear)
            sight.consumed[CONTROL.full_name(run)] = of_message(coordinator.recall)
            return [lambda: coordinator.look(time.time(), SILENT_S)]
    return []


def look_at_dispatcher(status: Any, meters: Meters) -> None:
    """What the dispatcher has under way."""
    meters.set(status.in_flight, "dispatcher_groups_in_flight")
    meters.set(status.missing, "dispatcher_samples_missing")
    meters.set(status.workers_ready, "dispatcher_workers_ready")
    meters.set(status.cursor, "dispatcher_prompt_cursor")
    meters.count_to(status.admitted, "dispatcher_admitted_groups")
    meters.count_to(status.reordered, "dispatcher_reordered_groups")
    meters.count_to(status.given_up, "dispatcher_given_up_groups")
    if (error := status.lengths.mean_abs_error) is not None:
        meters.set(error, "length_prediction_error_tokens")
    if (coverage := status.lengths.coverage) is not None:
        meters.set(coverage, "length_prediction_coverage_ratio")
