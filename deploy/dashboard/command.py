"""What `streamrl ui` does: attaches, serves, opens a browser, and ends with a code."""

import asyncio
import signal
import sys
import webbrowser
from collections.abc import Mapping
from pathlib import Path

import uvloop
from aiohttp import web

from deploy.bus.cluster.groups import committed_offsets
from deploy.dashboard.room import CLIENT_ID, PLAIN, Room
from deploy.dashboard.server import build_app
from deploy.inspection.bus_history import BusHistory
from deploy.inspection.replays.show import Piece, pieces_of
from deploy.live.feed import Committed, LiveFeed
from deploy.live.state import LiveState
from deploy.surveys.attachment import Attachment
from deploy.surveys.standing.standing import last_metrics, shards_of
from schemas.errors import UserError
from schemas.ports.bus import TopicPartition
from schemas.wire.topics import TRAJECTORIES

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def serve(attachment: Attachment, where: Path | None, host: str, port: int, *, open_browser: bool) -> int:
    """Serve until interrupted; the exit code.

    Raises:
        UserError: no such run, no broker, or the port is taken.
    """
    if host not in LOOPBACK:
        print(f"note: served at {host}: whoever reaches it sees the run and may retry dead letters", file=sys.stderr)
    uvloop.run(_serve(attachment, where, host, port, open_browser=open_browser))
    return 0


async def _serve(attachment: Attachment, where: Path | None, host: str, port: int, *, open_browser: bool) -> None:
    attached = await attachment.with_run()
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    state = LiveState(attached.run)
    room = Room(attached.bus, state, str(where or attached.run), lambda: _pieces(attached))
    runner = web.AppRunner(build_app(room, stop, host), access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        address = await listen(runner, host, port)
        print(f"{attached.run} at {address}  (Ctrl-C ends it)", flush=True)
        if open_browser:
            await asyncio.to_thread(webbrowser.open, address)
        feed = LiveFeed(attached.bus, state, await _shards(attached), _committed(attached), CLIENT_ID)
        await feed.run(stop)
    finally:
        stop.set()
        await runner.cleanup()


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


async def _shards(attached: Attachment) -> int | None:
    partitions = len(await BusHistory(attached.bus, CLIENT_ID).extents(attached.name_of(TRAJECTORIES)))
    metrics = {} if attached.settings is not None else await last_metrics(attached)
    return shards_of(attached, partitions, metrics)


def _committed(attached: Attachment) -> Committed:
    topic = attached.name_of(TRAJECTORIES)

    async def committed() -> Mapping[TopicPartition, int]:
        groups = await committed_offsets(attached.kafka, {topic})
        ours = [offsets for group, offsets in groups.items() if group.startswith(f"{attached.run}.")]
        return ours[0] if ours else {}

    return committed


def _pieces(attached: Attachment) -> Piece:
    return PLAIN if attached.settings is None else pieces_of(attached.settings.model.path)
