"""Runs one role as a process: logging, signals, and the loop that the role's build function returns."""

import asyncio
import contextlib
import faulthandler
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol, runtime_checkable

import structlog
import uvloop

from deploy.wiring.broker import broker_of_others
from inspection.host import settle_collector
from observability.metrics.exporting import Companion, beside, exported
from observability.metrics.tracking import tracking_of
from observability.tracing.context import LoggedTraces
from observability.tracing.roles import traced
from schemas.errors import UserError
from settings.tree import Settings

# Ends a process that makes no progress, so that its supervisor starts it anew. Knows nothing of what it does.
# Invariant a_stuck_process_ends: when the event loop does not turn, or a loop that told of itself does not turn any
# more, for longer than the limit, all stacks go to standard error and the process exits.

log = structlog.get_logger()

EXIT_CODE = 70


def _exit() -> NoReturn:
    faulthandler.dump_traceback(sys.stderr, all_threads=True)
    for task in asyncio.all_tasks():
        task.print_stack(file=sys.stderr)
    sys.stderr.flush()
    os._exit(EXIT_CODE)


@dataclass
class Watchdog:
    """``tick`` is called, by name, at every turn of a loop; waiting is a turn as well, as long as it is bounded.

    The event loop itself is watched from a thread of faulthandler's, which needs no interpreter lock.
    """

    limit_s: float
    end: Callable[[], None] = _exit
    clock: Callable[[], float] = time.monotonic
    _turned_at: dict[str, float] = field(default_factory=dict)

    def tick(self, name: str) -> None:
        """A loop turned."""
        self._turned_at[name] = self.clock()

    async def watch(self) -> None:
        """Watch until cancelled."""
        interval, looked_at = self.limit_s / 8, self.clock()
        try:
            while True:
                faulthandler.dump_traceback_later(self.limit_s, exit=True)
                await asyncio.sleep(interval)
                self.look(self.clock() - looked_at - interval)
                looked_at = self.clock()
        finally:
            faulthandler.cancel_dump_traceback_later()

    def look(self, late_s: float) -> None:
        """Whoever is late only because the whole process stood still is forgiven."""
        for name, turned_at in self._turned_at.items():
            silent_s = self.clock() - turned_at
            self._turned_at[name] += max(0.0, late_s)
            if silent_s - max(0.0, late_s) > self.limit_s:
                log.critical("no progress, ending this process", loop=name, silent_for_s=round(silent_s, 1))
                self.end()


class Loop(Protocol):
    """What every role is, once built."""

    async def run(self, stop: asyncio.Event) -> None:
        """Work until stopped."""
        ...


@runtime_checkable
class Watched(Protocol):
    """A role that tells, by name, of every turn of its loops."""

    on_tick: Callable[[str], None]


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
            loop.on_tick = watchdog.tick
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
            from deploy.wiring.build import build_worker

            return build_worker
        case "trainer":
            from deploy.wiring.trainer import build_trainer

            return build_trainer
        case "dispatcher":
            from deploy.wiring.build import build_dispatcher

            return build_dispatcher
        case "ranker":
            from deploy.wiring.build import build_ranker

            return build_ranker
        case "coordinator" | "relay":
            from deploy.wiring.build import build_coordinator, build_relay

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
