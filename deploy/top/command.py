"""What `streamrl top` does: attaches, shows the screen or prints lines, and ends with a code."""

import asyncio
import logging
import os
import signal
import sys
import time
from pathlib import Path

import structlog
import uvloop

from deploy.bus.client.outage import advised
from deploy.inspection.bus_history import BusHistory
from deploy.live.attaching import feed_of
from deploy.live.feed import LiveFeed
from deploy.live.pace import Pace
from deploy.live.state import LiveState
from deploy.surveys.attachment import Attachment
from deploy.top.printing import Manner, print_lines
from deploy.wiring.collector import settle_collector
from schemas.errors import BusUnavailable, UserError
from schemas.messages.trajectories import Trajectory
from schemas.wire.topics import TRAJECTORIES

CLIENT_ID = "streamrl-top"


def show(attachment: Attachment, where: Path | None, manner: Manner, *, on_screen: bool) -> int:
    """Show the run until asked to leave; the exit code.

    Raises:
        UserError: no such run, or no broker.
        StreamRLError: the broker refuses.
    """
    try:
        return uvloop.run(_show(attachment, str(where) if where else "", manner, on_screen=on_screen))
    except BrokenPipeError:  # whoever read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


async def _show(attachment: Attachment, where: str, manner: Manner, *, on_screen: bool) -> int:
    attached = await attachment.with_run()
    stop = asyncio.Event()
    pace_s = Pace().seconds if on_screen else lambda: manner.interval_s
    feed = await feed_of(attached, LiveState(attached.run), CLIENT_ID, pace_s)
    reading = asyncio.create_task(feed.run(stop))
    shown = _on_screen(attached, feed, where or attached.run, stop) if on_screen else _in_lines(feed, manner, stop)
    showing = asyncio.create_task(shown)
    try:
        await asyncio.wait({reading, showing}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stop.set()
        if reading.done() and not showing.done():
            showing.cancel()
        results = await asyncio.gather(reading, showing, return_exceptions=True)
    for problem in results:
        if isinstance(problem, Exception):
            raise problem
    return 0 if showing.cancelled() else showing.result()


async def _in_lines(feed: LiveFeed, manner: Manner, stop: asyncio.Event) -> int:
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await print_lines(feed, manner, stop)
    return 0


async def _on_screen(attached: Attachment, feed: LiveFeed, run_path: str, stop: asyncio.Event) -> int:
    from deploy.top.view.screen import TopApp

    async def read(place: str) -> Trajectory:
        try:
            return await read_trajectory(attached, place)
        except BusUnavailable as error:
            raise BusUnavailable(advised(error, attached.advice)) from error

    tell_in_events(feed.state)
    app = TopApp(feed.state, read, run_path, pace_s=feed.pace_s)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, app.exit)
    settle_collector()
    await app.run_async()
    stop.set()
    return app.return_code or 0


async def read_trajectory(attached: Attachment, place: str) -> Trajectory:
    """The record at ``partition@offset``.

    Raises:
        UserError: it is gone, or does not decode.
        BusUnavailable: no broker answers.
    """
    partition, offset = map(int, place.split("@"))
    topic = attached.name_of(TRAJECTORIES)
    found = await BusHistory(attached.bus, CLIENT_ID).fetch(topic, [(partition, offset)])
    message = found[partition, offset].message() if found else None
    if not isinstance(message, Trajectory):
        raise UserError(f"expected a trajectory at {place} of {topic}, found none: retention may have deleted it")
    return message


def tell_in_events(state: LiveState) -> None:
    """Warnings go to the event log, because whatever is printed would stand across the screen."""

    def note(_logger: object, method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        told = " ".join(str(event[name]) for name in ("event", "error") if name in event)
        state.log.add(time.time(), "warn" if method == "warning" else "bad", told[:400])
        raise structlog.DropEvent

    structlog.configure(processors=[note], wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    logging.getLogger().handlers[:] = [_Noted(state)]


class _Noted(logging.Handler):
    """Of libraries."""

    def __init__(self, state: LiveState) -> None:
        super().__init__(logging.WARNING)
        self.state = state

    def emit(self, record: logging.LogRecord) -> None:
        self.state.log.add(record.created, "warn", f"{record.name}: {record.getMessage()}"[:200])
