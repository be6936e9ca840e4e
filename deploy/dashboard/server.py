"""The dashboard's web server: one page, a stream of updates, and a few answers in JSON. Knows no broker."""

import asyncio
from collections.abc import Callable
from pathlib import Path

from aiohttp import web
from aiohttp.client_exceptions import ClientConnectionError
from aiohttp.typedefs import Handler, Middleware

from deploy.bus.client.outage import advised
from deploy.dashboard.guard import HEADERS, is_our_host, may_write
from deploy.dashboard.inspector import inspect
from deploy.dashboard.letters import newest_letters, retry_letter
from deploy.dashboard.room import Room
from deploy.dashboard.stream import Stream
from deploy.live.pace import OFTEN_S
from deploy.live.snapshot import snapshot
from schemas.errors import StreamRLError, UserError

PAGE = Path(__file__).parent / "page"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
MAX_BODY = 4096

ROOM = web.AppKey("room", Room)
STREAM = web.AppKey("stream", Stream)
STOP = web.AppKey("stop", asyncio.Event)


def build_app(
    room: Room, stop: asyncio.Event, host: str = "localhost", pace_s: Callable[[], float] = lambda: OFTEN_S
) -> web.Application:
    """The application; streams end when ``stop`` is set. ``host``: the name it is served under."""
    app = web.Application(middlewares=[_guarded(host), _told], client_max_size=MAX_BODY)
    app[ROOM], app[STREAM], app[STOP] = room, Stream(room.state, pace_s=pace_s), stop
    app.router.add_get("/", _index)
    app.router.add_get("/page/{name}", _asset)
    app.router.add_get("/api/updates", _updates)
    app.router.add_get("/api/snapshot", _snapshot)
    app.router.add_get("/api/trajectory", _trajectory)
    app.router.add_get("/api/dead-letters", _letters)
    app.router.add_post("/api/dead-letters/{offset:[0-9]{1,18}}/retry", _retry)
    return app


def _guarded(host: str) -> Middleware:
    @web.middleware
    async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
        if not is_our_host(request.headers.get("Host", ""), host):
            return _refusal(421, "this address is served under its own name only")
        if request.method not in ("GET", "HEAD") and not may_write(request.headers):
            return _refusal(403, "only the dashboard's own page may do this")
        try:
            response = await handler(request)
        except web.HTTPException as error:
            error.headers.update(HEADERS)
            raise
        if not response.prepared:
            response.headers.update(HEADERS)
        return response

    return guarded


@web.middleware
async def _told(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Errors of ours become one line of JSON."""
    try:
        return await handler(request)
    except UserError as error:
        return _refusal(404, str(error))
    except StreamRLError as error:
        return _refusal(503, advised(error, request.app[ROOM].advice))


def _refusal(status: int, text: str) -> web.Response:
    return web.json_response({"error": text}, status=status, headers=HEADERS)


async def _index(_request: web.Request) -> web.StreamResponse:
    return web.Response(body=(PAGE / "index.html").read_bytes(), content_type="text/html", charset="utf-8")


async def _asset(request: web.Request) -> web.StreamResponse:
    path = PAGE / request.match_info["name"]
    if path.parent != PAGE or path.suffix not in TYPES or not path.is_file():
        raise web.HTTPNotFound
    return web.Response(body=path.read_bytes(), content_type=TYPES[path.suffix], charset="utf-8")


async def _updates(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={**HEADERS, "Content-Type": "text/event-stream"})
    await response.prepare(request)
    try:
        async for event in request.app[STREAM].updates(request.app[STOP]):
            await response.write(event.encode())
    except (ClientConnectionError, ConnectionResetError):
        pass
    return response


async def _snapshot(request: web.Request) -> web.StreamResponse:
    stream = request.app[STREAM]
    return web.json_response(snapshot(stream.state, stream.state.moment(stream.clock())))


async def _trajectory(request: web.Request) -> web.StreamResponse:
    return web.json_response(await inspect(request.app[ROOM], request.query.get("id", "")[:300]))


async def _letters(request: web.Request) -> web.StreamResponse:
    return web.json_response(await newest_letters(request.app[ROOM]))


async def _retry(request: web.Request) -> web.StreamResponse:
    return web.json_response(await retry_letter(request.app[ROOM], int(request.match_info["offset"])))
