"""`streamrl top`: connects, shows the screen or prints lines, and ends with a code."""

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
from streamrl.bus.kafka.connection import advised
from streamrl.bus.waiting import happens_within
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
from streamrl.schemas.plain_text import plain_text
from streamrl.schemas.topics import TRAJECTORIES
from streamrl.schemas.trajectories import Trajectory
from streamrl.settings.features import feature_sections, run_parts

CLIENT_ID = "streamrl-top"
CATCHING_UP_S = 0.05
JSON_SECTIONS = ("loop", "lag", "workers", *feature_sections(), "split", "staleness", "lengths")


@dataclass(frozen=True)
class LineOptions:
    """How lines are printed. ``once``: one line, then the end."""

    interval_s: float = 2.0
    as_json: bool = False
    once: bool = False


def show_top(connection: RunConnection, where: Path | None, options: LineOptions, *, on_screen: bool) -> int:
    """Show the run until asked to leave; the exit code.

    Raises:
        UserError: no such run, or no broker.
        StreamRLError: the broker refuses.
    """
    try:
        # Textual sets CPython's factory of eager tasks, which up to 3.13.2 refuses an argument that uvloop gives it.
        run_loop = asyncio.run if on_screen else uvloop.run
        return run_loop(_show(connection, str(where) if where else "", options, on_screen=on_screen))
    except BrokenPipeError:  # whoever read our output has seen enough
        # Python flushes standard output once more on leaving, which would raise again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _state_of(connection: RunConnection) -> RunState:
    return RunState(connection.run, connection.reward_weights, run_parts(connection.run))


async def _show(connection: RunConnection, where: str, options: LineOptions, *, on_screen: bool) -> int:
    connection = await connection.with_run()
    stop = asyncio.Event()
    pace_s = Pace().seconds if on_screen else lambda: options.interval_s
    feed = await feed_of(connection, _state_of(connection), CLIENT_ID, pace_s)
    reading = asyncio.create_task(feed.run(stop))
    shown = _on_screen(connection, feed, where or connection.run, stop) if on_screen else _in_lines(feed, options, stop)
    showing = asyncio.create_task(shown)
    # A single line is soon over.
    yielding = asyncio.create_task(give_way_when(lambda: bool(feed.positions) and not options.once))
    try:
        await asyncio.wait({reading, showing}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stop.set()
        yielding.cancel()
        # A feed that ended by itself has failed: the screen would show a past for ever.
        if reading.done() and not showing.done():
            showing.cancel()
        results = await asyncio.gather(reading, showing, yielding, return_exceptions=True)
    # The first problem is the one that ended the other task.
    for problem in results:
        if isinstance(problem, Exception):
            raise problem
    return 0 if showing.cancelled() else showing.result()


async def _in_lines(feed: RunFeed, options: LineOptions, stop: asyncio.Event) -> int:
    # By the loop: a signal then ends it between two lines, never within one.
    with stopping.until_asked(lambda _: stop.set()):
        await print_lines(feed, options, stop)
    return stopping.exit_code(after_ctrl_c=0)


async def _on_screen(connection: RunConnection, feed: RunFeed, run_path: str, stop: asyncio.Event) -> int:
    from streamrl.inspection.terminal.app import TopApp

    async def read(place: str) -> Trajectory:
        try:
            return await read_trajectory(connection, place)
        except BusUnavailable as error:
            raise BusUnavailable(advised(error, connection.bus.availability.explanation)) from error

    tell_in_events(feed.state)
    app = TopApp(feed.state, read, run_path, pace_s=feed.pace_s)
    # Through the application, which puts the terminal back as it was; SIGHUP: its window was closed.
    with stopping.until_asked(lambda _: app.exit()):
        tune_garbage_collector()
        await app.run_async()
    stop.set()
    return app.return_code or stopping.exit_code(after_ctrl_c=0)


async def read_trajectory(connection: RunConnection, place: str) -> Trajectory:
    """The record at ``partition@offset``.

    Raises:
        UserError: it is gone, or does not decode.
        BusUnavailable: no broker answers.
    """
    partition, offset = map(int, place.split("@"))
    topic = connection.name_of(TRAJECTORIES)
    found = await BusHistory(connection.bus, CLIENT_ID).fetch(topic, [(partition, offset)])
    message = found[partition, offset].message() if found else None
    if not isinstance(message, Trajectory):
        raise UserError(f"expected a trajectory at {place} of {topic}, found none: retention may have deleted it")
    return message


def tell_in_events(state: RunState) -> None:
    """Warnings go to the event log, because whatever is printed would stand across the screen."""

    def note(_logger: object, method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        told = " ".join(str(event[name]) for name in ("event", "error") if name in event)
        state.log.add(time.time(), "warn" if method == "warning" else "bad", told[:400])
        raise structlog.DropEvent

    structlog.configure(processors=[note], wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    # Libraries log by the standard module, past structlog.
    logging.getLogger().handlers[:] = [_Noted(state)]


class _Noted(logging.Handler):
    """Of libraries."""

    def __init__(self, state: RunState) -> None:
        super().__init__(logging.WARNING)
        self.state = state

    def emit(self, record: logging.LogRecord) -> None:
        self.state.log.add(record.created, "warn", f"{record.name}: {record.getMessage()}"[:200])


async def print_lines(feed: RunFeed, options: LineOptions, stop: asyncio.Event) -> None:
    """Print what the feed's state says.

    Consumes: the state, which the feed updates. Produces: text on standard output.
    Waits for: the feed's past, then for each interval.
    On failure: raises. On stop: prints nothing more; a finished run ends it after its last line.
    """
    await _caught_up(feed, stop)
    told = 0
    while not stop.is_set():
        now = feed.state.known_until(time.time())
        feed.state.tick(now)
        if options.as_json:
            print(json.dumps(object_of(feed.state, now, told), separators=(",", ":"), allow_nan=False), flush=True)
            # Events are printed once; the next object begins behind them.
            told = feed.state.log.numbered
        else:
            print(line_of(feed.state, now), flush=True)  # into a pipe, Python would hold lines back
        if options.once or feed.state.progress.finished:
            return
        await happens_within(stop, options.interval_s)


async def _caught_up(feed: RunFeed, stop: asyncio.Event) -> None:
    # A feed has positions only when it has read the past: a line before that would tell of an empty run.
    while not feed.positions and not stop.is_set():
        await happens_within(stop, CATCHING_UP_S)


def line_of(state: RunState, now: float) -> str:
    """Health, step, reward, rates, staleness, lag per bucket, weights per worker."""
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


def object_of(state: RunState, now: float, told: int) -> dict[str, Any]:
    """The same and more as plain data; ``told``: the number of the last event that was printed before."""
    found = snapshot(state, now)
    return {
        "at": round(now, 3),
        "run": state.run,
        **{name: found[name] for name in JSON_SECTIONS if name in found},
        "events": newest_events(found["events"], told),
    }


def newest_events(events: Sequence[Sequence[Any]], after: int) -> list[dict[str, Any]]:
    """Events with a higher number."""
    names = ("number", "at", "level", "text", "times")
    return [dict(zip(names, event, strict=True)) for event in events if event[0] > after]
