"""The dashboard (`streamrl ui`) and its web server: one page, a stream of updates, and a few answers in JSON.

Invariants, each with a test of its name:
- a_foreign_page_cannot_read_or_write: a host name that is not ours is refused (DNS rebinding), and a write needs our
  own origin and a body that a form cannot send;
- a_foreign_page_starts_no_work: a browser names the site that sends a request. Another site can only open the page
  itself;
- expensive_requests_are_limited: only a fixed number of update streams and of reads of the topics run at once, and
  further requests get an error;
- the_page_loads_nothing_from_elsewhere: its content security policy forbids it;
- the_state_is_rendered_once_for_all_browsers: the state is rendered as JSON once for all browsers, and not at all
  without any.
"""

import asyncio
import json
import sys
import time
import webbrowser
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import uvloop
from aiohttp import web
from aiohttp.client_exceptions import ClientConnectionError
from aiohttp.typedefs import Handler, Middleware

from streamrl.bus.kafka.connection import with_advice
from streamrl.bus.serving import OpenRequests, listen
from streamrl.bus.waiting import in_thread, wait_for_tasks
from streamrl.inspection.charts import assets
from streamrl.inspection.dashboard.records import (
    CLIENT_ID,
    PLAIN,
    DashboardContext,
    NotIndexedYet,
    inspect,
    newest_dead_letters,
    retry_dead_letter,
)
from streamrl.inspection.diagnostics.connect import RunConnection
from streamrl.inspection.diagnostics.feed import feed_of
from streamrl.inspection.opening import open_index
from streamrl.inspection.process import give_way_when, normal_priority, tune_garbage_collector
from streamrl.inspection.replay.show import Piece, pieces_of
from streamrl.observability.record_index.following import FOLLOW_EVERY_S
from streamrl.observability.run_state.pace import OFTEN_S, Pace
from streamrl.observability.run_state.snapshot import sections_of, snapshot
from streamrl.observability.run_state.state import RunState
from streamrl.schemas import stopping
from streamrl.schemas.errors import StreamRLError, UserError
from streamrl.schemas.hosts import is_own_host

JSON = "application/json"
# No inline script, no form and no frame around the page: markup smuggled in by a completion could do nothing.
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def may_write(headers: Mapping[str, str]) -> bool:
    """Whether a request comes from our own page: same origin, and JSON, which no form of another page can send."""
    origin, host = headers.get("Origin", ""), headers.get("Host", "")
    own = origin in (f"http://{host}", f"https://{host}")
    # A page cannot forge this header. For browsers that do not send it, the origin decides.
    site = headers.get("Sec-Fetch-Site", "same-origin")
    return bool(host) and own and site == "same-origin" and headers.get("Content-Type", "").split(";")[0] == JSON


def may_read(headers: Mapping[str, str], path: str) -> bool:
    """Whether no page of another site sent the request. Another port of this machine is another site."""
    # A page cannot forge this header, and today's browsers send it with every page's request.
    if headers.get("Sec-Fetch-Site", "none") in ("same-origin", "none"):
        return True
    # Any page may link to the dashboard. The opened page then loads the rest itself.
    return path == "/" and (headers.get("Sec-Fetch-Mode"), headers.get("Sec-Fetch-Dest")) == ("navigate", "document")


SLOW = {"curves": 2, "timeline": 2, "lengths": 2, "staleness": 2, "split": 2}
"""Ticks between two renderings of a section that is large and changes slowly."""


@dataclass
class UpdateStream:
    """Server-sent events with only the changed sections of the state, at a given pace.

    ``pace_s``: seconds between two updates. ``clock``: seconds since the epoch.
    """

    state: RunState
    clock: Callable[[], float] = time.time
    pace_s: Callable[[], float] = lambda: OFTEN_S
    _rendered: dict[str, str] = field(default_factory=dict)
    _revisions: dict[str, int] = field(default_factory=dict)
    _tick: int = 0
    _refreshed_at: float = -1.0

    async def updates(self, stop: asyncio.Event) -> AsyncGenerator[str, None]:
        """Events for one browser until ``stop``: first all sections, then the changed ones."""
        sent: dict[str, int] = {}
        while not stop.is_set():
            self._refresh()
            # The sections that a browser has are remembered as revisions, not as texts.
            due = [name for name, revision in self._revisions.items() if sent.get(name) != revision]
            sent |= {name: self._revisions[name] for name in due}
            pace_s = self.pace_s()
            head = f'"now":{self.clock():.3f},"pace":{pace_s:.3f}'
            parts = [head, *(f'"{name}":{self._rendered[name]}' for name in due)]
            yield "data: {" + ",".join(parts) + "}\n\n"
            await asyncio.sleep(pace_s)

    def _refresh(self) -> None:
        """Render the sections that may have changed as JSON, at most once a second for all browsers."""
        now = self.clock()
        # A little below the pace, because the timers of several browsers are not aligned.
        # A negative age means that the clock was set back. Then refresh at once.
        if 0 <= now - self._refreshed_at < OFTEN_S * 0.8:
            return
        self._refreshed_at = now
        moment = self.state.known_until(now)
        self.state.tick(moment)
        for name, section in sections_of(self.state).items():
            if name in self._rendered and self._tick % SLOW.get(name, 1):
                continue
            rendered = json.dumps(section(moment), separators=(",", ":"), allow_nan=False)
            if rendered != self._rendered.get(name):
                self._rendered[name] = rendered
                self._revisions[name] = self._revisions.get(name, 0) + 1
        self._tick += 1


PAGE = Path(__file__).parent / "page"
FOLDERS = {"page": PAGE, "charts": assets.PAGE, "uplot": assets.UPLOT}
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
MAX_BODY = 4096
UPDATES = "/api/updates"
MAX_STREAMS, MAX_LOOKS = 32, 4
"""Most update streams, and most requests that read the topics, at once."""
ANSWER_TIMEOUT_S = 45.0
"""Time-out of a read that a page waits for: longer than those of a connect, a subscription and a request together."""

CONTEXT = web.AppKey("context", DashboardContext)
STREAM = web.AppKey("stream", UpdateStream)
STOP = web.AppKey("stop", asyncio.Event)


@dataclass
class RequestLimit:
    """Allows at most ``most`` requests of a kind at once."""

    most: int
    kind: str
    running: int = 0

    @contextmanager
    def slot(self) -> Iterator[None]:
        """Counts a request while the block runs. Raises _LimitReached."""
        if self.running >= self.most:
            raise _LimitReached(f"expected at most {self.most} {self.kind} at once, got one more; ask again soon")
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1


class _LimitReached(Exception):
    """Too many requests of a kind are running."""


STREAMS, TOPIC_READS = web.AppKey("streams", RequestLimit), web.AppKey("looks", RequestLimit)


def build_app(
    context: DashboardContext,
    stop: asyncio.Event,
    host: str = "localhost",
    pace_s: Callable[[], float] = lambda: OFTEN_S,
) -> web.Application:
    """The application. Streams end when ``stop`` is set. ``host``: the name under which it is served."""
    # The first is the outermost: refused requests reach nothing else, and error answers also get the headers.
    app = web.Application(middlewares=[_guarded(host), _errors_as_json], client_max_size=MAX_BODY)
    app[CONTEXT], app[STREAM], app[STOP] = context, UpdateStream(context.state, pace_s=pace_s), stop
    app[STREAMS] = RequestLimit(MAX_STREAMS, "open pages")
    app[TOPIC_READS] = RequestLimit(MAX_LOOKS, "reads of the topics")
    app.router.add_get("/", _index)
    app.router.add_get("/{folder:page|charts|uplot}/{name}", _asset)
    app.router.add_get(UPDATES, _updates)
    app.router.add_get("/api/snapshot", _snapshot)
    app.router.add_get("/api/trajectory", _trajectory)
    app.router.add_get("/api/dead-letters", _dead_letters)
    # 18 digits always fit an offset, which is a signed number of 64 bits.
    app.router.add_post("/api/dead-letters/{offset:[0-9]{1,18}}/retry", _retry)
    return app


def _guarded(host: str) -> Middleware:
    @web.middleware
    async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
        if not is_own_host(request.headers.get("Host", ""), host):
            return _refusal(421, f"expected a request to this server's own name, {host}, got another")
        if not may_read(request.headers, request.path):
            return _refusal(403, "only the dashboard's own page may read this")
        if request.method not in ("GET", "HEAD") and not may_write(request.headers):
            return _refusal(403, "only the dashboard's own page may do this")
        try:
            response = await handler(request)
        except web.HTTPException as error:
            error.headers.update(HEADERS)
            raise
        # A stream has sent its headers already.
        if not response.prepared:
            response.headers.update(HEADERS)
        return response

    return guarded


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn our errors and time-outs into one line of JSON. The stream of updates has no time-out."""
    try:
        async with asyncio.timeout(None if request.path == UPDATES else ANSWER_TIMEOUT_S):
            return await handler(request)
    except _LimitReached as error:
        return _refusal(429, str(error), again=True)
    except TimeoutError:
        late = f"expected the broker to deliver the records within {ANSWER_TIMEOUT_S:.0f} s, it did not; ask again"
        return _refusal(503, late)
    except UserError as error:
        return _refusal(404, str(error))
    except NotIndexedYet as error:
        return _refusal(503, str(error), again=True)
    except StreamRLError as error:
        return _refusal(503, with_advice(error, request.app[CONTEXT].advice()))


def _refusal(status: int, text: str, *, again: bool = False) -> web.Response:
    """An error answer. ``again``: whether the same request may succeed soon."""
    headers = {**HEADERS, "Retry-After": "2"} if again else HEADERS
    return web.json_response({"error": text, "again": again}, status=status, headers=headers)


async def _index(_request: web.Request) -> web.StreamResponse:
    return web.Response(body=(PAGE / "index.html").read_bytes(), content_type="text/html", charset="utf-8")


async def _asset(request: web.Request) -> web.StreamResponse:
    folder = FOLDERS[request.match_info["folder"]]
    path = folder / request.match_info["name"]
    # An escaped slash is unescaped here, and could lead out of the folder.
    if path.parent != folder or path.suffix not in TYPES or not path.is_file():
        raise web.HTTPNotFound
    return web.Response(body=path.read_bytes(), content_type=TYPES[path.suffix], charset="utf-8")


async def _updates(request: web.Request) -> web.StreamResponse:
    with request.app[STREAMS].slot():
        response = web.StreamResponse(headers={**HEADERS, "Content-Type": "text/event-stream"})
        await response.prepare(request)
        try:
            async for event in request.app[STREAM].updates(request.app[STOP]):
                await response.write(event.encode())
        # A closed browser is no error.
        except (ClientConnectionError, ConnectionResetError):
            pass
        return response


async def _snapshot(request: web.Request) -> web.StreamResponse:
    stream = request.app[STREAM]
    return web.json_response(snapshot(stream.state, stream.state.known_until(stream.clock())))


async def _trajectory(request: web.Request) -> web.StreamResponse:
    with request.app[TOPIC_READS].slot(), normal_priority():
        return web.json_response(await inspect(request.app[CONTEXT], request.query.get("id", "")[:300]))


async def _dead_letters(request: web.Request) -> web.StreamResponse:
    with request.app[TOPIC_READS].slot():
        return web.json_response(await newest_dead_letters(request.app[CONTEXT]))


async def _retry(request: web.Request) -> web.StreamResponse:
    with request.app[TOPIC_READS].slot():
        return web.json_response(await retry_dead_letter(request.app[CONTEXT], int(request.match_info["offset"])))


LOOPBACK = ("127.0.0.1", "localhost", "::1")


def serve(connection: RunConnection, where: Path | None, host: str, port: int, *, open_browser: bool) -> int:
    """Serve until interrupted, and return the exit code.

    Raises:
        UserError: there is no such run, no broker, or the port is in use.
    """
    if host not in LOOPBACK:
        note = f"note: everyone who can reach {host} can see the run and retry its dead letters"
        print(note, file=sys.stderr)
    uvloop.run(_serve(connection, where, host, port, open_browser=open_browser))
    return stopping.exit_code(after_ctrl_c=0)


async def _serve(connection: RunConnection, where: Path | None, host: str, port: int, *, open_browser: bool) -> None:
    connection = await connection.with_run()
    stop = asyncio.Event()
    with stopping.stop_requests_handled_by(lambda _: stop.set()):
        await _serve_until(stop, connection, where, host, port, open_browser=open_browser)


async def _serve_until(
    stop: asyncio.Event, connection: RunConnection, where: Path | None, host: str, port: int, *, open_browser: bool
) -> None:
    state, pace = connection.new_state(), Pace()
    context = DashboardContext(
        connection.bus,
        state,
        str(where or connection.run),
        lambda: _pieces(connection),
        lambda: connection.bus.availability.explanation,
        open_index(connection.directory, connection.address, connection.run),
        connection.bus.for_single_records(),
    )
    # As rarely as all other work of this process next to a busy run.
    context.follower.every_s = lambda: FOLLOW_EVERY_S * pace.seconds()
    app = build_app(context, stop, host, pace.seconds)
    requests = OpenRequests(app, 1.0)
    await requests.runner.setup()
    try:
        address = await bind(requests.runner, host, port)
        print(f"{connection.run} at {address}  (Ctrl-C stops it)", flush=True)
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
            await wait_for_tasks(tasks)
    finally:
        stop.set()
        try:
            await requests.end()
            await context.follower.history.close()
        finally:
            context.index.close()


async def bind(runner: web.AppRunner, host: str, port: int) -> str:
    """Bind the server, and return the page's address. Port 0 means any free port.

    Raises:
        UserError: the port is in use, or the address is not one of this machine.
    """
    try:
        await listen(runner, host, port)
    except OSError as error:
        raise UserError(
            f"expected to listen at {host}:{port}, got: {error.strerror or error}; choose another --port (0: any free)"
        ) from error
    bound = runner.addresses[0][1]
    return f"http://{f'[{host}]' if ':' in host else host}:{bound}/"


def _pieces(connection: RunConnection) -> Piece:
    return PLAIN if connection.settings is None else pieces_of(connection.settings.model.path)
