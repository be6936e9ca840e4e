"""The relay: serves weight versions over HTTP with Range, from the trainer's store or from copies.

No trainer waits for a relay. A worker on the relay's host gets the path of a version, and maps the relay's own files:
no byte is copied.

Invariant only_complete_versions_are_served: a version of the store is visible once its manifest is there, which is
written last. Of an arriving version, readers get only bytes that were checked.
"""

import asyncio
import json
import socket
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import BinaryIO, Protocol
from urllib.parse import quote

import structlog
from aiohttp import web

from streamrl.bus.serving import OpenRequests, listen
from streamrl.bus.waiting import in_thread, wait_for_event
from streamrl.schemas.errors import ChecksumMismatch, UserError
from streamrl.schemas.identifiers import PolicyVersion, is_plain_name
from streamrl.schemas.weights import BELOW, DIRECTORY, MANIFEST, weights_path
from streamrl.weights.relay.copies import ArrivingFile, RelayCopies, VersionCopy
from streamrl.weights.relay.limits import TIMES, RelayTimes
from streamrl.weights.settings import RelaySettings
from streamrl.weights.store import WeightStore

log = structlog.get_logger()

PIECE_BYTES = 1 << 18
"""Bytes sent at once if the pace is limited."""
SIGN_OF_LIFE_S = 1.0
"""Seconds between two signs of progress to a client that waits for a whole version."""
KNOWN_WITHIN = 0.5
"""Share of clients' time-out for which a request waits for a version that is still unknown here."""


class RelayLoops(Protocol):
    """What a relay does on the bus besides serving: it sends heartbeats and fetches announced versions."""

    async def run(self, stop: asyncio.Event) -> None:
        """Work until stopped, whether the broker answers or not."""
        ...


@dataclass
class Relay:
    """Serves ``GET /weights``, ``GET /weights/{version}/{file}`` (also for other series) and ``GET /health``.

    Clients on the same host may ask for ``DIRECTORY`` instead of a file. ``store_of_series``: gives the store of a
    series by name; None if the relay serves copies, or the run has one series. ``on_response`` is called when an answer
    starts, with its status and the number of bytes of weights in it. ``copies``: copies of another relay's versions,
    served instead of ``store``; None: the relay serves the trainer's own store. ``loops``: None without a bus.
    """

    store: WeightStore
    settings: RelaySettings
    on_response: Callable[[int, int], None] = lambda status, weight_bytes: None
    copies: RelayCopies | None = None
    loops: RelayLoops | None = None
    store_of_series: Callable[[str], WeightStore] | None = None
    times: RelayTimes = TIMES
    _series: dict[str, WeightStore] = field(default_factory=dict)
    _pace: "SendingPace" = field(init=False)

    def __post_init__(self) -> None:
        self._pace = SendingPace(self.settings.max_bytes_per_s)

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until stopped.

        Consumes: HTTP requests. Produces: files of the store, or of its copies.
        Waits for: requests.
        On failure: an unknown file is a 404, a file of a deleted version a 410; a taken port raises ``UserError``.
        On stop: closes its connections within two seconds, and releases versions that were kept for readers.
        """
        (self.copies.root if self.copies is not None else self.store.root).mkdir(parents=True, exist_ok=True)
        app = self.application()
        requests = OpenRequests(app, 2.0)
        await requests.runner.setup()
        try:
            try:
                await listen(requests.runner, self.settings.host, self.settings.port)
            except OSError as error:
                raise _taken(self.settings, error) from error
            log.info("relay ready", address=requests.runner.addresses, store=self.store.root.name)
            async with asyncio.TaskGroup() as tasks:
                tidying = tasks.create_task(self._tidy_loop())
                if self.loops is not None:
                    tasks.create_task(self.loops.run(stop))
                await stop.wait()
                tidying.cancel()
        finally:
            await requests.end()
        # Not after a failure: if the port was taken, another relay may serve the same store.
        if self.copies is None:
            for store in (self.store, *self._series.values()):
                await in_thread(store.release)

    async def _tidy_loop(self) -> None:
        """Delete versions that are no longer read, at intervals, until cancelled."""
        while True:
            if self.copies is None:
                for store in (self.store, *self._series.values()):
                    await in_thread(store.tidy)
            else:
                await self.copies.tidy()
            await asyncio.sleep(max(1.0, (self.copies or self.store).lease_s / 4))

    def application(self) -> web.Application:
        """The routes."""
        app = web.Application(client_max_size=1024)
        app.router.add_get("/health", self._health)
        app.router.add_get("/weights", self._versions)
        app.router.add_get("/weights/{version}/{name}", self._file)
        app.router.add_get(f"/{weights_path('{series}')}/{{version}}/{{name}}", self._file_of_series)
        app.on_response_prepare.append(self._report_response)
        return app

    async def _report_response(self, request: web.Request, response: web.StreamResponse) -> None:
        is_file = "name" in request.match_info and response.status in (200, 206) and request.method == "GET"
        self.on_response(response.status, (response.content_length or 0) if is_file else 0)

    async def _health(self, _request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _versions(self, _request: web.Request) -> web.Response:
        versions = await in_thread(self.store.versions) if self.copies is None else self.copies.whole()
        return web.json_response({"versions": [str(version) for version in versions]})

    async def _file(self, request: web.Request) -> web.StreamResponse:
        version, name = request.match_info["version"], request.match_info["name"]
        if self.copies is not None:
            return await self._copied(request, self.copies, version, name)
        return await self._stored(request, self.store, version, name)

    async def _file_of_series(self, request: web.Request) -> web.StreamResponse:
        series, version, name = (request.match_info[key] for key in ("series", "version", "name"))
        if not is_plain_name(series):
            raise _missing(version, name, is_gone=False)
        if self.copies is not None:
            of_series = await self.copies.find_series(series, KNOWN_WITHIN * self.times.upstream_timeout_s)
            if of_series is None:
                raise _missing(version, name, is_gone=False)
            return await self._copied(request, of_series, version, name)
        if self.store_of_series is None:
            raise _missing(version, name, is_gone=False)
        if (store := self._series.get(series)) is None:
            found = self.store_of_series(series)
            if not await in_thread(found.root.is_dir):  # a client may ask for any name
                raise _missing(version, name, is_gone=False)
            store = self._series.setdefault(series, found)
        return await self._stored(request, store, version, name)

    async def _stored(self, request: web.Request, store: WeightStore, version: str, name: str) -> web.StreamResponse:
        sought = MANIFEST if name == DIRECTORY and _may_share_files(request) else name
        path = await in_thread(store.find, version, sought)  # a slow disk must not hold up other downloads
        if path is None:
            raise _missing(version, name, is_gone=await in_thread(store.is_gone, version))
        if name == DIRECTORY:
            return web.json_response({DIRECTORY: str(path.parent.absolute())})
        await in_thread(store.keep, read := PolicyVersion.parse(version))
        try:
            file = await in_thread(ArrivingFile.there, path)
            return await self._sent(request, file, store.lease(read))
        except FileNotFoundError:  # deleted after it was found and before it was kept
            raise _missing(version, name, is_gone=await in_thread(store.is_gone, version)) from None

    async def _copied(self, request: web.Request, copies: RelayCopies, version: str, name: str) -> web.StreamResponse:
        try:
            wanted = PolicyVersion.parse(version)
        except ValueError:
            raise _missing(version, name, is_gone=False) from None
        copy = await copies.find(wanted, KNOWN_WITHIN * self.times.upstream_timeout_s)
        if copy is None:
            raise _missing(version, name, is_gone=copies.is_gone(wanted))
        lease = copies.lease(copy)
        if name == MANIFEST:
            with lease:
                return web.Response(body=copy.raw, content_type="application/octet-stream")
        if name == DIRECTORY and _may_share_files(request):
            with lease:
                return await _answer_directory(request, copy)
        if (arriving := copy.files.get(name)) is None:
            raise _missing(version, name, is_gone=False)
        try:
            return await self._sent(request, arriving, lease, is_settled=copy.is_whole)
        except FileNotFoundError:  # another run's copies are deleted at once
            raise _missing(version, name, is_gone=copies.is_gone(wanted)) from None

    async def _sent(
        self,
        request: web.Request,
        arriving: ArrivingFile,
        lease: AbstractContextManager[None],
        *,
        is_settled: bool = True,
    ) -> web.StreamResponse:
        """Send the file, or its requested range, so that an interrupted download can continue.

        ``is_settled``: it is whole, and will not be renamed.

        Raises:
            FileNotFoundError: a settled file is not there; nothing was sent.
        """
        start, stop = _range_of(request, size := arriving.file.size)
        is_part = "Range" in request.headers
        headers = {"Content-Type": "application/octet-stream", "Accept-Ranges": "bytes"}
        if is_part:
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
        response = web.StreamResponse(status=206 if is_part else 200, headers=headers)
        response.content_length = stop - start
        with lease, ExitStack() as opened:
            # In a thread, for a slow disk. Cancelled, in_thread() ends when the file is open, and the stack closes it.
            file = await in_thread(_open_into, opened, arriving.path) if is_settled else None
            try:
                await response.prepare(request)
                if request.method != "HEAD":
                    file = file or await _open_arriving(opened, arriving, start)
                    await self._stream(request, arriving, file, start, stop)
                await response.write_eof()
            except (ChecksumMismatch, ConnectionError) as error:
                # The answer has started, so only a premature end can show the failure. The client then asks another
                # relay.
                log.info("answer broken off", file=arriving.file.name, error=str(error))
                if request.transport is not None:
                    request.transport.abort()
        return response

    async def _stream(self, request: web.Request, arriving: ArrivingFile, file: BinaryIO, at: int, stop: int) -> None:
        is_paced = self._pace.is_bounded and not _is_of_this_host(request)
        while at < stop:
            size = min(await arriving.beyond(at), stop) - at
            if is_paced:
                await self._pace.take(size := min(PIECE_BYTES, size))
            if (transport := request.transport) is None or transport.is_closing():
                raise ConnectionResetError("the client has closed its connection")
            # The kernel sends from the file's pages to the socket: this process would copy the bytes twice.
            sent = await asyncio.get_running_loop().sendfile(transport, file, at, size)
            if not sent:
                raise ConnectionResetError("the file is shorter than its manifest says")
            at += sent


def _range_of(request: web.Request, size: int) -> tuple[int, int]:
    """The first requested byte, and the one after the last."""
    try:
        start, stop, _ = request.http_range.indices(size)
    except ValueError:  # not a range of bytes
        start = stop = 0
    if start >= stop and "Range" in request.headers:
        raise web.HTTPRequestRangeNotSatisfiable(headers={"Content-Range": f"bytes */{size}"})
    return start, stop


def _open_into(opened: ExitStack, path: Path) -> BinaryIO:
    return opened.enter_context(path.open("rb"))


async def _open_arriving(opened: ExitStack, arriving: ArrivingFile, at: int) -> BinaryIO:
    """Open the file once its bytes from ``at`` arrive, and only then: its path changes, and it may be deleted."""
    await arriving.beyond(at)
    # Not in a thread: the path could change before the thread opens it.
    return _open_into(opened, arriving.path)


async def _answer_directory(request: web.Request, copy: VersionCopy) -> web.StreamResponse:
    """Answer with a copy's directory, once it is whole. Until then, blanks, which JSON allows, show progress.

    A header names the parent directory at once: a client that cannot link files from there need not wait.
    """
    response = web.StreamResponse(headers={"Content-Type": "application/json", BELOW: _quoted(copy.directory.parent)})
    with suppress(ConnectionError):  # the client has left
        await response.prepare(request)
        had = copy.have
        while not await wait_for_event(copy.ended, SIGN_OF_LIFE_S):
            if request.transport is None or request.transport.is_closing():
                return response
            if copy.have != had:
                had = copy.have
                await response.write(b" ")
        where = {DIRECTORY: str(copy.directory.absolute())} if copy.is_whole else {}
        await response.write_eof(json.dumps(where).encode())
    return response


def _quoted(path: Path) -> str:
    return quote(str(path.absolute()))


@dataclass
class SendingPace:
    """Limits the bytes per second over all connections together; 0: no limit."""

    bytes_per_s: int
    clock: Callable[[], float] = time.monotonic
    _free_at: float = 0.0

    @property
    def is_bounded(self) -> bool:
        """Whether there is a limit."""
        return self.bytes_per_s > 0

    async def take(self, size: int) -> None:
        """Wait until ``size`` bytes may be sent."""
        now = self.clock()
        self._free_at = max(self._free_at, now) + size / self.bytes_per_s
        await asyncio.sleep(max(0.0, self._free_at - now))


def _is_of_this_host(request: web.Request) -> bool:
    """Whether both ends of the connection have the same address, so that no network is crossed."""
    name = request.transport.get_extra_info("sockname") if request.transport is not None else None
    return name is not None and request.remote == name[0]


def _may_share_files(request: web.Request) -> bool:
    """Whether the client is on this host, under any of its addresses. In a container it will not find the files."""
    return _is_of_this_host(request) or (request.remote is not None and ip_address(request.remote).is_loopback)


def _missing(version: str, name: str, *, is_gone: bool) -> web.HTTPException:
    if is_gone:
        return web.HTTPGone(text=f"version {version!r} was deleted; a newer one is announced on control\n")
    return web.HTTPNotFound(text=f"no {name!r} of version {version!r}; GET /weights lists what there is\n")


def check_port(settings: RelaySettings) -> None:
    """Refuse a taken port before the run starts other processes.

    Raises:
        UserError: another process listens there, or the host is not this machine's.
    """
    try:
        # The same call as the relay's own: a port that its predecessor has just left counts as free.
        family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
        with socket.create_server((settings.host, settings.port), family=family):
            pass
    except OSError as error:
        raise _taken(settings, error) from error


def _taken(settings: RelaySettings, error: OSError) -> UserError:
    return UserError(
        f"expected a free port for the relay, got {settings.host}:{settings.port} in use "
        f"({error.strerror}); choose another with --relay.port"
    )
