"""Puts meters on a role: a counting bus around its own, and a look at what it knows of itself now and then."""

import time
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from deploy.metrics.measuring.bus import MeasuredBus, Sight, of_message
from deploy.metrics.measuring.messages import CoordinatorMessages, TrainerMessages, WorkerMessages
from deploy.metrics.meters import Meters
from schemas.ports.bus import Bus
from schemas.wire.topics import CONTROL, DEAD_LETTERS, HEARTBEATS, SKIPS, STEPS

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
        from deploy.metrics.measuring.relay import MeasuredRelay

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
