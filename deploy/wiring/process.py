"""Runs one role as a process: logging, signals, what observes the role, and the watchdog over its loops.

Invariant a_stuck_process_ends: when the event loop does not turn, or a loop that ticked does not tick any more, for
longer than the limit, all stacks go to standard error and the process exits, so that its supervisor starts it anew.
"""

import asyncio
import contextlib
import faulthandler
import logging
import os
import signal
import socket
import sys
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import structlog
import uvloop

from streamrl.bus.kafka.bus import KafkaBus
from streamrl.consumers.training.identity import refuse_other_run
from streamrl.consumers.training.identity_store import IdentityFile
from streamrl.deploy.wiring.broker import broker_of_others
from streamrl.inspection.process import tune_garbage_collector
from streamrl.observability.background import BackgroundTask, background
from streamrl.observability.interceptor import BusObserver, observed
from streamrl.observability.log_lines import LibraryLines, forget_unwritten, line_printer, printable
from streamrl.observability.metrics.exporting import Metering, open_metering
from streamrl.observability.metrics.tracking import Tracker
from streamrl.observability.role_context import ProcessContext, Role, StandbyRole
from streamrl.observability.tracing.context import LoggedTraces
from streamrl.observability.tracing.role_tracers import Tracing, open_tracing
from streamrl.schemas import stopping
from streamrl.schemas.errors import SettingsError
from streamrl.schemas.identifiers import SERVED_POLICY, is_plain_name, scope_of
from streamrl.settings.features import awaited, feature_role, features
from streamrl.settings.run_directory import RunDirectory, require_name
from streamrl.settings.tree import Settings

log = structlog.get_logger()

TAKE_OVER = signal.SIGURG
"""What a supervisor sends to a standby when the leader died. By default it is ignored, also by one that is starting."""
LEADING = ("coordinator", "dispatcher")
"""Roles of the core that would fence or lead those of another run of the same name. A worker learns whose run it is
from the control topic, which it follows; a relay takes no part, and the trainer holds the run."""
EXIT_CODE = 70
"""Of a process that its watchdog ended: EX_SOFTWARE of sysexits.h."""


def run_role(role: str, settings: Settings, worker_id: str, *, adopt: bool = False) -> int:
    """Run a role until it ends, SIGTERM or Ctrl-C, on a broker that is there. ``adopt``: see ``ProcessContext``.

    The exit code is 0 if it came to its end by itself, else that of the signal: whoever starts processes would take
    one that somebody else ended for one that is done.

    Raises:
        UserError: something the user can mend.
    """
    require_name(settings, role)
    require_served(settings, role)
    name, scope = process_name(role, worker_id), scope_of(settings.run.name, settings.run.instance)
    if scope != settings.run.name:
        name = f"{role}-{settings.run.instance}"
    logged = LoggedTraces()
    names = {"run": settings.run.name, "process": name} | ({"worker": name} if role == "worker" else {})
    log_file = RunDirectory(settings.run.path).logs / f"{name}.log" if settings.run.log_files else None
    configure_logging(names, logged, log_file)
    address = broker_of_others(settings.kafka.bootstrap_servers, print)
    # Settings are frozen, so the address that was found goes into a copy; all below see only that.
    settings = settings.model_copy(update={"kafka": settings.kafka.model_copy(update={"bootstrap_servers": address})})
    from streamrl.deploy.wiring.build import (
        build_role,  # what roles need takes long to import; `--help` and logging do not
    )

    watchdog = Watchdog(settings.run.watchdog_s)
    # observers are opened before the role, which is built with them, and closed after it, with its last records
    with ExitStack() as stack:
        run = settings.run
        # Before the first thread: what trackers import may be broken by chance beside a thread that imports as well.
        if (tracker := _tracking(role, settings)) is not None:
            stack.callback(tracker.close)
        own = feature_role(role)
        kind = (own.observed_as if own is not None else "") or role
        open_tracer = None if own is None else own.tracer
        tracing = stack.enter_context(
            open_tracing(kind, name, scope, settings.telemetry, run.path, logged, open_tracer)
        )
        mine = [feature for feature in features() if own in feature.processes.roles]
        families = tuple(family for feature in mine for family in feature.families())
        metering = stack.enter_context(
            open_metering(kind, name, scope, settings.metrics, settings.kafka, run.directory, families)
        )
        context = replace(process_context(name, settings, watchdog, tracing, metering), adopt=adopt)
        built = build_role(role, settings, context)
        # After the imports and the building, since it takes what lives by now for permanent.
        tune_garbage_collector()
        tasks = [*(metering.tasks if metering is not None else ()), *([] if tracker is None else [tracker.run])]
        leads = role in LEADING or (own is not None and own.leads)
        joins = partial(refuse_other_run, context.bus, run.name, IdentityFile(run.path)) if leads else None
        # The relay's is asyncio's own loop: uvloop has no sendfile, by which the kernel sends files by itself.
        run_loop = asyncio.run if role == "relay" else uvloop.run
        asked = run_loop(_until_stopped(built, watchdog, tasks, joins))
    forget_unwritten()
    return stopping.exit_code() if asked else 0


def require_served(settings: Settings, role: str) -> None:
    """Make sure that only a trainer goes by the name of an instance: all else there is once a run.

    Raises:
        SettingsError: another role was given one.
    """
    if settings.run.instance != SERVED_POLICY and role != "trainer":
        raise SettingsError(
            f"expected run.instance to be {SERVED_POLICY!r} for a {role}, got {settings.run.instance!r}: instances "
            "beside the run's own trainer are started with `streamrl attach`"
        )


def process_name(role: str, worker_id: str) -> str:
    """The role; of a kind of which there are several, such as workers, the id. Without one it makes one up.

    Raises:
        SettingsError: the id is not a plain name.
    """
    own = feature_role(role)
    if role != "worker" and not (own is not None and own.has_id):
        return role
    # The host's name makes it readable; six hex digits keep workers of one host apart.
    name = worker_id or f"{socket.gethostname().lower().split('.')[0][:32]}-{uuid.uuid4().hex[:6]}"
    if not is_plain_name(name):
        raise SettingsError(f"expected an id of 1 to 64 of a-z, 0-9, '.', '_' and '-', got {name!r}")
    return name


def process_context(
    name: str, settings: Settings, watchdog: "Watchdog", tracing: Tracing | None, metering: Metering | None
) -> ProcessContext:
    """What the process hands to its role: nothing is wrapped that nobody observes."""
    observers: list[BusObserver] = [part.observer for part in (tracing, metering) if part is not None]
    context = ProcessContext(name, observed(KafkaBus(settings.kafka), *observers), watchdog.tick)
    if tracing is not None:
        context = replace(context, around_engine=tracing.around, tracer=tracing.tracer)
    if metering is not None:
        context = replace(
            context, meters=metering.meters, collect=metering.collect, on_response=metering.count_response
        )
    return context


def _tracking(role: str, settings: Settings) -> Tracker | None:
    """What tracks the run beside the coordinator, of which there is one, opened; nothing beside other roles.

    Raises:
        SettingsError: a tracker that the settings name cannot be opened.
    """
    if role != "coordinator" or not settings.tracking.to:
        return None
    tracker = Tracker(
        KafkaBus(settings.kafka),
        settings.run.name,
        settings.tracking,
        settings.run.path / "tracking",
        settings.model_dump(mode="json", exclude={"kafka"}),  # which may hold a password
        awaited(settings) is not None,
    )
    tracker.open()
    return tracker


async def _until_stopped(
    role: Role,
    watchdog: "Watchdog",
    tasks: Sequence[BackgroundTask],
    joins: Callable[[], Awaitable[None]] | None = None,
) -> bool:
    """Whether it was asked to end."""
    stop = asyncio.Event()

    def ask(number: signal.Signals) -> None:
        stopping.said_by_itself()
        log.info("asked to end", signal=number.name)
        stop.set()

    if isinstance(role, StandbyRole):
        asyncio.get_running_loop().add_signal_handler(TAKE_OVER, role.take_over)
    watching = asyncio.create_task(watchdog.watch())  # over the start of the role as well, which may hang too
    try:
        with stopping.until_asked(ask):
            if joins is not None:
                await joins()
            async with background(tasks):
                await role.run(stop)
    finally:
        watching.cancel()
        await asyncio.wait({watching})
    return stop.is_set()


def _exit() -> NoReturn:
    # Threads first, then tasks, whose stacks no thread's traceback shows while they wait.
    faulthandler.dump_traceback(sys.stderr, all_threads=True)
    for task in asyncio.all_tasks():
        task.print_stack(file=sys.stderr)
    sys.stderr.flush()
    # Not ``sys.exit``: ending the loop cleanly would wait for the very task that is stuck.
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
        # an eighth: a stuck loop is found at most that much later than the limit says
        interval, checked_at = self.limit_s / 8, self.clock()
        try:
            while True:
                # Each call replaces the one before: if the loop stops turning, the last one runs out.
                faulthandler.dump_traceback_later(self.limit_s, exit=True)
                await asyncio.sleep(interval)
                self.check(self.clock() - checked_at - interval)
                checked_at = self.clock()
        finally:
            faulthandler.cancel_dump_traceback_later()

    def check(self, late_s: float) -> None:
        """End the process if a loop was silent for longer than the limit.

        ``late_s``: how late this check comes. So long the whole process stood still (it was stopped, or the machine was
        busy), which is no fault of any loop and does not count as its silence.
        """
        for name, turned_at in self._turned_at.items():
            silent_s = self.clock() - turned_at
            self._turned_at[name] += max(0.0, late_s)
            if silent_s - max(0.0, late_s) > self.limit_s:
                log.critical("no progress, ending this process", loop=name, silent_for_s=round(silent_s, 1))
                self.end()


def configure_logging(
    names: Mapping[str, str] | None = None,
    traces: structlog.typing.Processor | None = None,
    copy: Path | None = None,
) -> None:
    """Structured lines on standard output, coloured for a terminal; of libraries what is a warning or worse, throttled.

    ``names`` stand in every line, of whatever thread or task, unless the line itself has another value for them.
    ``traces`` adds the trace of what a line is about. ``copy``: a file that gets every line as well.
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
            printable,
            renderer,
        ],
        logger_factory=line_printer(copy),
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        cache_logger_on_first_use=True,
    )
    logging.basicConfig(level=logging.WARNING, handlers=[LibraryLines()])
    # A group's coordinator is looked up before the broker has one; the client tries again by itself.
    logging.getLogger("aiokafka.consumer.group_coordinator").setLevel(logging.CRITICAL)


def _with_names(names: Mapping[str, str]) -> structlog.typing.Processor:
    def add(_logger: Any, _method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        for name, value in names.items():
            event.setdefault(name, value)
        return event

    return add
