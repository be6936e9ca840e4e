"""Puts tracing on a role: a bus, and for a worker an engine, around its own. Without ``telemetry.traces`` nothing."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

from bus.port import Bus
from observability.tracing.context import LoggedTraces
from observability.tracing.engine import TracedEngine
from observability.tracing.interceptor import Story, Teller, TracedBus
from observability.tracing.role_tracers import CoordinatorStory, DispatcherStory, TrainerStory, WorkerStory
from observability.tracing.spans import Record
from producers.generation.engines.port import Engine
from settings.tree import Settings

TRACED = frozenset({"dispatcher", "worker", "trainer", "coordinator"})


@runtime_checkable
class OnBus(Protocol):
    """A role that reads and writes topics."""

    bus: Bus


@runtime_checkable
class WithEngine(Protocol):
    """A role that generates."""

    engine: Engine


@contextmanager
def traced(role: str, process: str, loop: Any, settings: Settings, logged: LoggedTraces) -> Iterator[None]:
    """While the block runs, what the role does is told; at its end, in bounded time, the last spans are exported."""
    if settings.telemetry.traces == "off" or role not in TRACED:
        yield
        return
    from observability.tracing.exporting import open_exporting

    exporting = open_exporting(settings.telemetry, settings.run.path, role, process)
    try:
        trace(role, process, loop, settings, exporting.record, logged)
        yield
    finally:
        exporting.close()


def trace(role: str, process: str, loop: Any, settings: Settings, record: Record, logged: LoggedTraces) -> None:
    """Wrap what the role meets the world through."""
    run = settings.run.name
    story: Story
    match role:
        case "dispatcher":
            story = DispatcherStory(run, settings.telemetry.sample_ratio, record, logged)
        case "trainer":
            story = TrainerStory(run, record, logged)
        case "coordinator":
            story = CoordinatorStory(run, record)
        case _:
            story = worker = WorkerStory(run, process, record, logged)
            if isinstance(loop, WithEngine):
                loop.engine = TracedEngine(loop.engine, worker)
    if isinstance(loop, OnBus):
        loop.bus = TracedBus(loop.bus, Teller(story))
