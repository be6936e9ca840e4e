"""Runs one role as a process: logging, signals, and the loop that the role's build function returns."""

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import structlog
import uvloop

from deploy.metrics.companions import Companion, beside
from deploy.metrics.measuring.exporting import exported
from deploy.metrics.tracking.tracker import tracking_of
from deploy.settings.tree import Settings
from deploy.telemetry.logged import LoggedTraces
from deploy.telemetry.tracing.roles import traced
from deploy.wiring.broker import broker_of_others
from deploy.wiring.collector import settle_collector
from deploy.wiring.watchdog import Watchdog
from schemas.errors import UserError


class Loop(Protocol):
    """What every role is, once built."""

    async def run(self, stop: asyncio.Event) -> None:
        """Work until stopped."""
        ...


@runtime_checkable
class Watched(Protocol):
    """A role that tells, by name, of every turn of its loops."""

    alive: Callable[[str], None]


@runtime_checkable
class Worker(Protocol):
    """A role of which there are several."""

    worker_id: str


Build = Callable[[Settings, str], Loop]


def run_role(role: str, settings: Settings, worker_id: str) -> None:
    """Run a role until it ends, SIGTERM or Ctrl-C, on a broker that is there.

    Raises:
        UserError: something the user can mend.
    """
    names = {"run": settings.run.name, "process": worker_id or role}
    logged = LoggedTraces()
    configure_logging(names, logged)
    address = broker_of_others(settings.kafka.bootstrap_servers, print)
    named = settings.model_copy(update={"kafka": settings.kafka.model_copy(update={"bootstrap_servers": address})})
    built = _builder(role)(named, worker_id)
    if isinstance(built, Worker):
        names["process"] = names["worker"] = built.worker_id
    watchdog = Watchdog(settings.run.watchdog_s)
    process = names["process"]
    with traced(role, process, built, named, logged), exported(role, process, built, named) as (loop, companions):
        if isinstance(loop, Watched):
            loop.alive = watchdog.alive
        settle_collector()
        uvloop.run(_until_stopped(loop, watchdog, [*companions, *tracking_of(role, named)]))


async def _until_stopped(loop: Loop, watchdog: Watchdog, companions: Sequence[Companion]) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, _ask_to_stop, stop)
    watching = asyncio.create_task(watchdog.watch())
    try:
        async with beside(companions):
            await loop.run(stop)
    finally:
        watching.cancel()
        await asyncio.wait({watching})


def _ask_to_stop(stop: asyncio.Event) -> None:
    """The first signal asks; a second one ends the process at once."""
    if stop.is_set():
        os._exit(130)
    stop.set()


def _builder(role: str) -> Build:
    match role:
        case "worker":
            from deploy.wiring.worker import build_worker

            return build_worker
        case "trainer":
            from deploy.wiring.trainer import build_trainer

            return build_trainer
        case "dispatcher":
            from deploy.wiring.dispatcher import build_dispatcher

            return build_dispatcher
        case "ranker":
            from deploy.wiring.dispatcher import build_ranker

            return build_ranker
        case "coordinator" | "relay":
            from deploy.wiring.coordinator import build_coordinator, build_relay

            return build_coordinator if role == "coordinator" else build_relay
        case _:
            raise UserError(f"expected one of worker, trainer, dispatcher, ranker, coordinator, relay, got {role!r}")


def configure_logging(names: Mapping[str, str] | None = None, traces: structlog.typing.Processor | None = None) -> None:
    """Structured lines on standard output: coloured for a terminal, logfmt otherwise; libraries from WARNING on.

    ``names`` stand in every line, of whatever thread or task, unless the line itself has another value for them.
    ``traces`` adds the trace of what a line is about.
    """
    with contextlib.suppress(AttributeError):
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer()
        if sys.stdout.isatty()
        else structlog.processors.LogfmtRenderer(key_order=["timestamp", "level", "event"])
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            _with_names(names or {}),
            *([] if traces is None else [traces]),
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        cache_logger_on_first_use=True,
    )
    logging.basicConfig(level=logging.WARNING, format="timestamp=%(asctime)s level=%(levelname)s event=%(message)r")
    # A group's coordinator is looked up before the broker has one; the client tries again by itself.
    logging.getLogger("aiokafka.consumer.group_coordinator").setLevel(logging.CRITICAL)


def _with_names(names: Mapping[str, str]) -> structlog.typing.Processor:
    def add(_logger: Any, _method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        for name, value in names.items():
            event.setdefault(name, value)
        return event

    return add
