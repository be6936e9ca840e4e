"""`streamrl top`: connects, shows the screen or prints lines, and returns an exit code."""

import asyncio
import json
import logging
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
import uvloop

from streamrl.bus.history import BusHistory
from streamrl.bus.kafka.connection import with_advice
from streamrl.bus.waiting import wait_for_event
from streamrl.inspection.diagnostics.connect import RunConnection
from streamrl.inspection.diagnostics.feed import feed_of
from streamrl.inspection.process import give_way_when, tune_garbage_collector
from streamrl.inspection.terminal.drawing import short
from streamrl.observability.run_state.feed import RunFeed
from streamrl.observability.run_state.pace import Pace
from streamrl.observability.run_state.snapshot import snapshot
from streamrl.observability.run_state.state import RunState
from streamrl.schemas import stopping
from streamrl.schemas.errors import BusUnavailable, UserError
from streamrl.schemas.extras import require_extra
from streamrl.schemas.plain_text import plain_text
from streamrl.schemas.topics import TRAJECTORIES
from streamrl.schemas.trajectories import Trajectory
from streamrl.settings.features import feature_sections

CLIENT_ID = "streamrl-top"
CATCHING_UP_S = 0.05
JSON_SECTIONS = ("loop", "lag", "workers", *feature_sections(), "split", "staleness", "lengths")


@dataclass(frozen=True)
class LineOptions:
    """How lines are printed. ``once``: print one line and exit."""

    interval_s: float = 2.0
    as_json: bool = False
    once: bool = False


def show_top(connection: RunConnection, where: Path | None, options: LineOptions, *, on_screen: bool) -> int:
    """Show the run until the user leaves, and return the exit code.

    Raises:
        UserError: there is no such run, or no broker, or the screen's package is not installed.
        StreamRLError: the broker refuses a request.
    """
    if on_screen:
        require_extra("inspect", "the live view", "textual")
    try:
        # Textual sets CPython's eager task factory, which up to 3.13.2 rejects an argument that uvloop passes.
        run_loop = asyncio.run if on_screen else uvloop.run
        return run_loop(_show(connection, str(where) if where else "", options, on_screen=on_screen))
    except BrokenPipeError:  # the reader of our output has closed it
        # Python flushes standard output again on exit, which would raise again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


async def _show(connection: RunConnection, where: str, options: LineOptions, *, on_screen: bool) -> int:
    connection = await connection.with_run()
    stop = asyncio.Event()
    pace_s = Pace().seconds if on_screen else lambda: options.interval_s
    feed = await feed_of(connection, connection.new_state(), CLIENT_ID, pace_s)
    reading = asyncio.create_task(feed.run(stop))
    shown = _on_screen(connection, feed, where or connection.run, stop) if on_screen else _in_lines(feed, options, stop)
    showing = asyncio.create_task(shown)
    # With ``once`` the command ends too soon for this to matter.
    yielding = asyncio.create_task(give_way_when(lambda: bool(feed.positions) and not options.once))
    try:
        await asyncio.wait({reading, showing}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stop.set()
        yielding.cancel()
        # A feed ends early only on failure: the screen would show old data for ever.
        if reading.done() and not showing.done():
            showing.cancel()
        results = await asyncio.gather(reading, showing, yielding, return_exceptions=True)
    # Raise the first problem: it is the one that ended the other task.
    for problem in results:
        if isinstance(problem, Exception):
            raise problem
    return 0 if showing.cancelled() else showing.result()


async def _in_lines(feed: RunFeed, options: LineOptions, stop: asyncio.Event) -> int:
    # The loop checks ``stop``, so a signal ends it between two lines, never within one.
    with stopping.stop_requests_handled_by(lambda _: stop.set()):
        await print_lines(feed, options, stop)
    return stopping.exit_code(after_ctrl_c=0)


async def _on_screen(connection: RunConnection, feed: RunFeed, run_path: str, stop: asyncio.Event) -> int:
    from streamrl.inspection.terminal.app import TopApp

    async def read(place: str) -> Trajectory:
        try:
            return await read_trajectory(connection, place)
        except BusUnavailable as error:
            raise BusUnavailable(with_advice(error, connection.bus.availability.explanation)) from error

    log_to_event_list(feed.state)
    app = TopApp(feed.state, read, run_path, pace_s=feed.pace_s)
    # Through the application, which restores the terminal. SIGHUP means that its window was closed.
    with stopping.stop_requests_handled_by(lambda _: app.exit()):
        tune_garbage_collector()
        await app.run_async()
    stop.set()
    return app.return_code or stopping.exit_code(after_ctrl_c=0)


async def read_trajectory(connection: RunConnection, place: str) -> Trajectory:
    """The record at ``partition@offset``.

    Raises:
        UserError: there is no record any more, or it does not decode.
        BusUnavailable: no broker answers.
    """
    partition, offset = map(int, place.split("@"))
    topic = connection.name_of(TRAJECTORIES)
    found = await BusHistory(connection.bus, CLIENT_ID).fetch(topic, [(partition, offset)])
    message = found[partition, offset].message() if found else None
    if not isinstance(message, Trajectory):
        raise UserError(f"expected a trajectory at {place} of {topic}, found none: retention may have deleted it")
    return message


def log_to_event_list(state: RunState) -> None:
    """Send log warnings to the screen's event list. Printed, they would damage the screen."""

    def note(_logger: object, method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        text = " ".join(str(event[name]) for name in ("event", "error") if name in event)
        state.log.add(time.time(), "warn" if method == "warning" else "bad", text[:400])
        raise structlog.DropEvent

    structlog.configure(processors=[note], wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    # Libraries log with the standard module, not with structlog.
    logging.getLogger().handlers[:] = [_EventLogHandler(state)]


class _EventLogHandler(logging.Handler):
    """Adds the log records of libraries to the event list."""

    def __init__(self, state: RunState) -> None:
        super().__init__(logging.WARNING)
        self.state = state

    def emit(self, record: logging.LogRecord) -> None:
        self.state.log.add(record.created, "warn", f"{record.name}: {record.getMessage()}"[:200])


async def print_lines(feed: RunFeed, options: LineOptions, stop: asyncio.Event) -> None:
    """Print the feed's state at each interval.

    Consumes: the state, which the feed updates. Produces: text on standard output.
    Waits for: the feed to catch up, then for each interval.
    On failure: raises. On stop: prints nothing more. If the run is finished, it returns after the last line.
    """
    await _caught_up(feed, stop)
    printed_events = 0
    while not stop.is_set():
        now = feed.state.known_until(time.time())
        feed.state.tick(now)
        if options.as_json:
            found = object_of(feed.state, now, printed_events)
            print(json.dumps(found, separators=(",", ":"), allow_nan=False), flush=True)
            # Each event is printed once, so the next object starts after these.
            printed_events = feed.state.log.numbered
        else:
            print(line_of(feed.state, now), flush=True)  # Python would buffer lines into a pipe
        if options.once or feed.state.progress.finished:
            return
        await wait_for_event(stop, options.interval_s)


async def _caught_up(feed: RunFeed, stop: asyncio.Event) -> None:
    # A feed has positions only after it has caught up. A line before that would show an empty run.
    while not feed.positions and not stop.is_set():
        await wait_for_event(stop, CATCHING_UP_S)


def line_of(state: RunState, now: float) -> str:
    """One line with health, step, reward, rates, staleness, lag per bucket, and weights per worker."""
    found = snapshot(state, now)
    loop, lag = found["loop"], found["lag"]
    of = "" if loop["max_steps"] is None else f"/{loop['max_steps']}"
    behind = " ".join(f"b{bucket}:{count}" for bucket, count in zip(lag["buckets"], lag["lag"], strict=True))
    held = " ".join(
        f"{plain_text(each['id'])}@{each['version']}" for each in found["workers"] if each["state"] != "stopped"
    )
    skips = " ".join(f"{reason}:{count}" for reason, count in loop["skipped_by_reason"].items())
    parts = (
        f"{plain_text(state.run)} {loop['health']}",
        f"step {loop['step']}{of}",
        f"reward {short(loop['reward'])}",
        f"{short(loop['trajectories_per_s'])} traj/s",
        f"sampling {short(loop['sampled_per_s'])} traj/s {short(loop['sampled_tokens_per_s'])} tok/s",
        f"staleness {short(loop['staleness_mean'])} (max {short(loop['staleness_max'])})",
        f"lag {behind or '-'}",
        f"workers {held or '-'}",
        *([f"skipped {skips}"] if skips else []),
        *([plain_text(warning)] if (warning := state.warning(now)) else []),
    )
    return "  ".join(parts)


def object_of(state: RunState, now: float, last_event: int) -> dict[str, Any]:
    """The state as plain data, with more details than a line. ``last_event``: number of the last printed event."""
    found = snapshot(state, now)
    return {
        "at": round(now, 3),
        "run": state.run,
        **{name: found[name] for name in JSON_SECTIONS if name in found},
        "events": newest_events(found["events"], last_event),
    }


def newest_events(events: Sequence[Sequence[Any]], after: int) -> list[dict[str, Any]]:
    """The events whose number is above ``after``."""
    names = ("number", "at", "level", "text", "times")
    return [dict(zip(names, event, strict=True)) for event in events if event[0] > after]
