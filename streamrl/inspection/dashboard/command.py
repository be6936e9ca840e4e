"""`streamrl ui`: connects, serves, opens a browser, and ends with a code."""

import asyncio
import sys
import webbrowser
from pathlib import Path

import uvloop
from aiohttp import web

from streamrl.bus.serving import OpenRequests
from streamrl.bus.waiting import in_thread, until_ended
from streamrl.inspection.dashboard.records import CLIENT_ID, PLAIN, DashboardContext
from streamrl.inspection.dashboard.server import build_app
from streamrl.inspection.diagnostics.connect import RunConnection
from streamrl.inspection.diagnostics.feed import feed_of
from streamrl.inspection.opening import open_index
from streamrl.inspection.process import give_way_when, tune_garbage_collector
from streamrl.inspection.replay.show import Piece, pieces_of
from streamrl.observability.record_index.following import FOLLOW_EVERY_S
from streamrl.observability.run_state.pace import Pace
from streamrl.observability.run_state.state import RunState
from streamrl.schemas import stopping
from streamrl.schemas.errors import UserError

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def serve(connection: RunConnection, where: Path | None, host: str, port: int, *, open_browser: bool) -> int:
    """Serve until interrupted; the exit code.

    Raises:
        UserError: no such run, no broker, or the port is taken.
    """
    if host not in LOOPBACK:
        print(f"note: served at {host}: whoever reaches it sees the run and may retry dead letters", file=sys.stderr)
    uvloop.run(_serve(connection, where, host, port, open_browser=open_browser))
    return stopping.exit_code(after_ctrl_c=0)


async def _serve(connection: RunConnection, where: Path | None, host: str, port: int, *, open_browser: bool) -> None:
    connection = await connection.with_run()
    stop = asyncio.Event()
    with stopping.until_asked(lambda _: stop.set()):
        await _serve_until(stop, connection, where, host, port, open_browser=open_browser)


async def _serve_until(
    stop: asyncio.Event, connection: RunConnection, where: Path | None, host: str, port: int, *, open_browser: bool
) -> None:
    state, pace = RunState(connection.run, connection.reward_weights), Pace()
    context = DashboardContext(
        connection.bus,
        state,
        str(where or connection.run),
        lambda: _pieces(connection),
        lambda: connection.bus.availability.explanation,
        open_index(connection.directory, connection.address, connection.run),
        connection.bus.for_single_records(),
    )
    # As seldom as everything else that this process does beside a busy run.
    context.follower.every_s = lambda: FOLLOW_EVERY_S * pace.seconds()
    app = build_app(context, stop, host, pace.seconds)
    requests, runner = OpenRequests(app), web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        address = await listen(runner, host, port)
        print(f"{connection.run} at {address}  (Ctrl-C ends it)", flush=True)
        if open_browser:
            await in_thread(webbrowser.open, address)
        tune_garbage_collector()
        feed = await feed_of(connection, state, CLIENT_ID, pace.seconds)
        tasks = [
            asyncio.create_task(context.follower.run(stop)),
            asyncio.create_task(give_way_when(lambda: bool(feed.positions))),
        ]
        try:
            await feed.run(stop)
        finally:
            for task in tasks:
                task.cancel()
            await until_ended(tasks)
    finally:
        stop.set()
        try:
            await requests.end(runner)
            await context.follower.history.close()
        finally:
            context.index.close()


async def listen(runner: web.AppRunner, host: str, port: int) -> str:
    """Bind; the page's address. Port 0 takes any.

    Raises:
        UserError: the port is taken, or the address is not ours.
    """
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError as error:
        raise UserError(
            f"expected to listen at {host}:{port}, got: {error.strerror or error}; choose another --port, 0 takes any"
        ) from error
    bound = runner.addresses[0][1]
    return f"http://{f'[{host}]' if ':' in host else host}:{bound}/"


def _pieces(connection: RunConnection) -> Piece:
    return PLAIN if connection.settings is None else pieces_of(connection.settings.model.path)
