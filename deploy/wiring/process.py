"""Runs one role as a process, with logging, signals, observers and a watchdog over the role's loops.

Invariant a_stuck_process_ends: a process exits if its event loop is blocked, or if one of its loops stops ticking, for
longer than the limit. It first prints all stacks to standard error; its supervisor then restarts it.
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
from streamrl.deploy.wiring.broker import existing_broker
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
"""Signal from a supervisor to a standby when the leader has died. By default, also during the start, it is ignored."""
LEADING = ("coordinator", "dispatcher")
"""Roles of the core that must check the run's identity first, since they would fence or lead processes of another run
with the same name. A worker learns the run's identity from the control topic, a relay is not involved, and the trainer
claims the run."""
WATCHDOG_S = 600.0
"""Seconds without progress after which a process exits and is restarted. A trainer's micro-batch of a large model on a
busy machine may take minutes."""
EXIT_CODE = 70
"""Exit code of a process that its watchdog ended: EX_SOFTWARE of sysexits.h."""


def run_role(role: str, settings: Settings, worker_id: str, *, adopt: bool = False) -> int:
    """Run a role on an existing broker until it ends, or until SIGTERM or Ctrl-C. ``adopt``: see ``ProcessContext``.

    The exit code is 0 if the role has finished its work, else that of the signal. With 0 for a signal, a supervisor
    would take a process that was stopped for one that has finished.

    Raises:
        UserError: an error that the user can correct.
    """
    require_name(settings, role)
    require_run_role(settings, role)
    name, scope = process_name(role, worker_id), scope_of(settings.run.name, settings.run.instance)
    if scope != settings.run.name:
        name = f"{role}-{settings.run.instance}"
    logged = LoggedTraces()
    names = {"run": settings.run.name, "process": name} | ({"worker": name} if role == "worker" else {})
    log_file = RunDirectory(settings.run.path).logs / f"{name}.log" if settings.run.log_files else None
    configure_logging(names, logged, log_file)
    address = existing_broker(settings, print)
    # Settings are frozen, so the address goes into a copy, which everything below uses.
    settings = settings.model_copy(update={"kafka": settings.kafka.model_copy(update={"bootstrap_servers": address})})
    # Imported here, because it loads slowly, and `--help` and logging do not need it.
    from streamrl.deploy.wiring.build import build_role

    watchdog = Watchdog(WATCHDOG_S)
    # Observers open before the role, which is built with them, and close after it, so that they see its last records.
    with ExitStack() as stack:
        run = settings.run
        # Before the first thread starts: the imports of trackers may fail at random while another thread imports.
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
        # After imports and building, because it treats all objects that exist now as permanent.
        tune_garbage_collector()
        tasks = [*(metering.tasks if metering is not None else ()), *([] if tracker is None else [tracker.run])]
        leads = role in LEADING or (own is not None and own.leads)
        joins = partial(refuse_other_run, context.bus, run.name, IdentityFile(run.path)) if leads else None
        # The relay uses asyncio's own loop, because uvloop lacks sendfile, with which the kernel sends files itself.
        run_loop = asyncio.run if role == "relay" else uvloop.run
        asked = run_loop(_until_stopped(built, watchdog, tasks, joins))
    forget_unwritten()
    return stopping.exit_code() if asked else 0


def require_run_role(settings: Settings, role: str) -> None:
    """Check that only a trainer has an instance's name: all other roles belong to the run itself.

    Raises:
        SettingsError: another role was given an instance's name.
    """
    if settings.run.instance != SERVED_POLICY and role != "trainer":
        raise SettingsError(
            f"expected run.instance to be {SERVED_POLICY!r} for a {role}, got {settings.run.instance!r}; to train "
            "another policy on the run's stream, use `streamrl attach`"
        )


def process_name(role: str, worker_id: str) -> str:
    """A process's name: the role, or the id for roles with several processes such as workers; "" makes up an id.

    Raises:
        SettingsError: the id is not a plain name.
    """
    own = feature_role(role)
    if role != "worker" and not (own is not None and own.has_id):
        return role
    # The host's name makes the id readable; six hex digits distinguish workers of one host.
    name = worker_id or f"{socket.gethostname().lower().split('.')[0][:32]}-{uuid.uuid4().hex[:6]}"
    if not is_plain_name(name):
        raise SettingsError(f"expected an id of 1 to 64 of a-z, 0-9, '.', '_' and '-', got {name!r}")
    return name


def process_context(
    name: str, settings: Settings, watchdog: "Watchdog", tracing: Tracing | None, metering: Metering | None
) -> ProcessContext:
    """The context that the process gives its role; the bus is wrapped only if it is observed."""
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
    """The opened tracker of the run, for the coordinator; None for other roles, since a run has one coordinator.

    Raises:
        SettingsError: a configured tracker cannot be opened.
    """
    if role != "coordinator" or not settings.tracking.to:
        return None
    tracker = Tracker(
        KafkaBus(settings.kafka),
        settings.run.name,
        settings.tracking,
        settings.run.path / "tracking",
        settings.model_dump(mode="json", exclude={"kafka"}),  # that section may hold a password
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
    """Run the role; returns whether it was asked to stop."""
    stop = asyncio.Event()

    def ask(number: signal.Signals) -> None:
        stopping.mark_stop_reported()
        log.info("asked to stop", signal=number.name)
        stop.set()

    if isinstance(role, StandbyRole):
        asyncio.get_running_loop().add_signal_handler(TAKE_OVER, role.take_over)
    watching = asyncio.create_task(watchdog.watch())  # covers the start of the role, which may hang, too
    try:
        with stopping.stop_requests_handled_by(ask):
            if joins is not None:
                await joins()
            async with background(tasks):
                await role.run(stop)
    finally:
        watching.cancel()
        await asyncio.wait({watching})
    return stop.is_set()


def _exit() -> NoReturn:
    # Threads first, then tasks: a waiting task's stack is in no thread's traceback.
    faulthandler.dump_traceback(sys.stderr, all_threads=True)
    for task in asyncio.all_tasks():
        task.print_stack(file=sys.stderr)
    sys.stderr.flush()
    # Not ``sys.exit``, because ending the loop cleanly would wait for the stuck task.
    os._exit(EXIT_CODE)


@dataclass
class Watchdog:
    """Ends the process if a loop stops ticking, or if the event loop is blocked, for longer than ``limit_s``.

    Each loop calls ``tick`` with its name in every iteration; a bounded wait also counts as an iteration. The event
    loop itself is watched by a thread of faulthandler, which does not need the interpreter lock.
    """

    limit_s: float
    end: Callable[[], None] = _exit
    clock: Callable[[], float] = time.monotonic
    _ticked_at: dict[str, float] = field(default_factory=dict)

    def tick(self, name: str) -> None:
        """Record an iteration of a loop."""
        self._ticked_at[name] = self.clock()

    async def watch(self) -> None:
        """Watch until cancelled."""
        # A stuck loop is found at most this eighth of the limit late.
        interval, checked_at = self.limit_s / 8, self.clock()
        try:
            while True:
                # Each call replaces the timer of the one before; if the event loop is blocked, the last timer expires.
                faulthandler.dump_traceback_later(self.limit_s, exit=True)
                await asyncio.sleep(interval)
                self.check(self.clock() - checked_at - interval)
                checked_at = self.clock()
        finally:
            faulthandler.cancel_dump_traceback_later()

    def check(self, late_s: float) -> None:
        """End the process if a loop was silent for longer than the limit.

        ``late_s``: seconds by which this check is late. The whole process was paused that long (stopped, or on a busy
        machine), so the time does not count as silence of a loop.
        """
        for name, ticked_at in self._ticked_at.items():
            silent_s = self.clock() - ticked_at
            self._ticked_at[name] += max(0.0, late_s)
            if silent_s - max(0.0, late_s) > self.limit_s:
                log.critical("no progress, ending this process", loop=name, silent_for_s=round(silent_s, 1))
                self.end()


def configure_logging(
    names: Mapping[str, str] | None = None,
    traces: structlog.typing.Processor | None = None,
    copy: Path | None = None,
) -> None:
    """Set up structured log lines on standard output, coloured on a terminal; libraries' warnings and errors throttled.

    ``names`` are added to every line of all threads and tasks, unless the line has its own values for them. ``traces``
    adds the trace that a line belongs to. ``copy``: a file that also gets every line.
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
    # A consumer group's coordinator is looked up before the broker has one; the client retries on its own.
    logging.getLogger("aiokafka.consumer.group_coordinator").setLevel(logging.CRITICAL)


def _with_names(names: Mapping[str, str]) -> structlog.typing.Processor:
    def add(_logger: Any, _method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        for name, value in names.items():
            event.setdefault(name, value)
        return event

    return add
