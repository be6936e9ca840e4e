"""The dashboard (`streamrl ui`) and its web server: pages, a stream of updates, and a few answers in JSON.

The run that the command names is at `/`, the list of all runs of its directory at `/runs/`, and each of them at
`/runs/NAME/`.

Invariants, each with a test of its name:
- a_foreign_page_cannot_read_or_write: a host name that is not ours is refused (DNS rebinding), and a write needs our
  own origin and a body that a form cannot send;
- a_foreign_page_starts_no_work: a browser names the site that sends a request. Another site can only open the page
  itself;
- expensive_requests_are_limited: only a fixed number of update streams and of reads of the topics run at once, and
  further requests get an error;
- the_page_loads_nothing_from_elsewhere: its content security policy forbids it.
"""

import asyncio
import sys
import webbrowser
from asyncio import FIRST_COMPLETED
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop
from aiohttp import web
from aiohttp.client_exceptions import ClientConnectionError
from aiohttp.typedefs import Handler, Middleware

from streamrl.bus.kafka.connection import with_advice
from streamrl.bus.serving import OpenRequests, listen
from streamrl.bus.waiting import end_tasks, in_thread
from streamrl.inspection.charts import assets
from streamrl.inspection.dashboard.records import NotIndexedYet, inspect, newest_dead_letters, retry_dead_letter
from streamrl.inspection.dashboard.shown import ShownRun, ShownRuns, directory_of, opened
from streamrl.inspection.diagnostics.connect import RunConnection
from streamrl.inspection.process import normal_priority, tune_garbage_collector
from streamrl.inspection.source import RUNS as RUNS_DIRECTORY
from streamrl.inspection.source import PastRun
from streamrl.observability.run_state.pace import Pace
from streamrl.observability.run_state.snapshot import snapshot
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
    # Any page may link to the dashboard's pages. The opened page then loads the rest itself.
    return path.endswith("/") and (headers.get("Sec-Fetch-Mode"), headers.get("Sec-Fetch-Dest")) == (
        "navigate",
        "document",
    )


PAGE = Path(__file__).parent / "page"
FOLDERS = {"page": PAGE, "charts": assets.PAGE, "uplot": assets.UPLOT}
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
MAX_BODY = 4096
UPDATES = "/api/updates"
MAX_STREAMS, MAX_LOOKS = 32, 4
"""Most update streams, and most requests that read the topics, at once."""
ANSWER_TIMEOUT_S = 45.0
"""Time-out of a read that a page waits for: longer than those of a connect, a subscription and a request together."""

RUNS = web.AppKey("runs", ShownRuns)


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


def build_app(runs: ShownRuns, host: str = "localhost") -> web.Application:
    """The application. ``host``: the name under which it is served."""
    # The first is the outermost: refused requests reach nothing else, and error answers also get the headers.
    app = web.Application(middlewares=[_guarded(host), _errors_as_json], client_max_size=MAX_BODY)
    app[RUNS] = runs
    app[STREAMS] = RequestLimit(MAX_STREAMS, "open pages")
    app[TOPIC_READS] = RequestLimit(MAX_LOOKS, "reads of the topics")
    app.router.add_get("/{folder:page|charts|uplot}/{name}", _asset)
    app.router.add_get("/runs/", _list)
    app.router.add_get("/api/runs", _runs)
    for place in ("/", "/runs/{run}/"):
        app.router.add_get(place, _index)
        app.router.add_get(f"{place}api/updates", _updates)
        app.router.add_get(f"{place}api/snapshot", _snapshot)
        app.router.add_get(f"{place}api/trajectory", _trajectory)
        app.router.add_get(f"{place}api/dead-letters", _dead_letters)
        # 18 digits always fit an offset, which is a signed number of 64 bits.
        app.router.add_post(f"{place}api/dead-letters/{{offset:[0-9]{{1,18}}}}/retry", _retry)
    return app


def _shown(request: web.Request) -> AbstractAsyncContextManager[ShownRun]:
    """The run that a request's address names, during the block."""
    return request.app[RUNS].using(request.match_info.get("run"))


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
        async with asyncio.timeout(None if request.path.endswith(UPDATES) else ANSWER_TIMEOUT_S):
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
        context = None if (main := request.app[RUNS].main) is None else main.context
        return _refusal(503, str(error) if context is None else with_advice(error, context.advice()))


def _refusal(status: int, text: str, *, again: bool = False) -> web.Response:
    """An error answer. ``again``: whether the same request may succeed soon."""
    headers = {**HEADERS, "Retry-After": "2"} if again else HEADERS
    return web.json_response({"error": text, "again": again}, status=status, headers=headers)


async def _index(request: web.Request) -> web.StreamResponse:
    if request.match_info.get("run") is None and request.app[RUNS].main is None:
        raise web.HTTPFound("/runs/")
    return _page("index.html")


async def _list(_request: web.Request) -> web.StreamResponse:
    return _page("runs.html")


def _page(name: str) -> web.Response:
    return web.Response(body=(PAGE / name).read_bytes(), content_type="text/html", charset="utf-8")


async def _runs(request: web.Request) -> web.StreamResponse:
    with request.app[TOPIC_READS].slot():
        return web.json_response({"directory": str(request.app[RUNS].root), "runs": await request.app[RUNS].rows()})


async def _asset(request: web.Request) -> web.StreamResponse:
    folder = FOLDERS[request.match_info["folder"]]
    path = folder / request.match_info["name"]
    # An escaped slash is unescaped here, and could lead out of the folder.
    if path.parent != folder or path.suffix not in TYPES or not path.is_file():
        raise web.HTTPNotFound
    return web.Response(body=path.read_bytes(), content_type=TYPES[path.suffix], charset="utf-8")


async def _updates(request: web.Request) -> web.StreamResponse:
    with request.app[STREAMS].slot():
        async with _shown(request) as shown:
            response = web.StreamResponse(headers={**HEADERS, "Content-Type": "text/event-stream"})
            await response.prepare(request)
            try:
                async for event in shown.stream.updates(shown.stop):
                    await response.write(event.encode())
            # A closed browser is no error.
            except (ClientConnectionError, ConnectionResetError):
                pass
            return response


async def _snapshot(request: web.Request) -> web.StreamResponse:
    async with _shown(request) as shown:
        stream = shown.stream
        return web.json_response(snapshot(stream.state, stream.state.known_until(stream.clock())))


async def _trajectory(request: web.Request) -> web.StreamResponse:
    with request.app[TOPIC_READS].slot(), normal_priority():
        async with _shown(request) as shown:
            return web.json_response(await inspect(shown.records, request.query.get("id", "")[:300]))


async def _dead_letters(request: web.Request) -> web.StreamResponse:
    with request.app[TOPIC_READS].slot():
        async with _shown(request) as shown:
            return web.json_response(await newest_dead_letters(shown.records))


async def _retry(request: web.Request) -> web.StreamResponse:
    with request.app[TOPIC_READS].slot():
        async with _shown(request) as shown:
            return web.json_response(await retry_dead_letter(shown.records, int(request.match_info["offset"])))


LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class ServingOptions:
    """Where to serve, and whether to open the page in a browser."""

    host: str
    port: int
    open_browser: bool


def serve(
    target: RunConnection | PastRun | None,
    where: Path | None,
    listed: Callable[[Path], Sequence[Mapping[str, Any]]],
    options: ServingOptions,
) -> int:
    """Serve until interrupted, and return the exit code. ``target`` None: only the list of runs and its runs.

    ``where``: how the command line named the run. ``listed``: see ``ShownRuns``.

    Raises:
        UserError: there is no such run, no broker, or the port is in use.
    """
    if options.host not in LOOPBACK:
        note = f"note: everyone who can reach {options.host} can see the runs and retry their dead letters"
        print(note, file=sys.stderr)
    uvloop.run(_serve(target, where, listed, options))
    return stopping.exit_code(after_ctrl_c=0)


async def _serve(
    target: RunConnection | PastRun | None,
    where: Path | None,
    listed: Callable[[Path], Sequence[Mapping[str, Any]]],
    options: ServingOptions,
) -> None:
    stop, pace = asyncio.Event(), Pace()
    with stopping.stop_requests_handled_by(lambda _: stop.set()):
        main = None if target is None else await opened(target, str(where or ""), pace.seconds)
        directory = directory_of(target)
        runs = ShownRuns(main, RUNS_DIRECTORY if directory is None else directory.parent, listed, pace.seconds)
        requests = OpenRequests(build_app(runs, options.host), 1.0)
        await requests.runner.setup()
        try:
            address = await bind(requests.runner, options.host, options.port)
            name = f"runs in {runs.root}/" if runs.main is None else runs.main.stream.state.run
            print(f"{name} at {address}  (Ctrl-C stops it)", flush=True)
            if options.open_browser:
                await in_thread(webbrowser.open, address)
            tune_garbage_collector()
            await _follow_until(stop, runs.follow_main(directory))
        finally:
            # Streams first, so that their requests end; then all requests, so that none uses a closed index.
            await runs.halt()
            try:
                await requests.end()
            finally:
                await runs.close()


async def _follow_until(stop: asyncio.Event, following: Coroutine[Any, Any, None]) -> None:
    """Return when ``stop`` is set. If the run cannot be followed any more, its error ends the command."""
    tasks = [asyncio.create_task(stop.wait()), asyncio.create_task(following)]
    try:
        for done in (await asyncio.wait(tasks, return_when=FIRST_COMPLETED))[0]:
            done.result()
    finally:
        await end_tasks(tasks)


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
