"""Fetches a version from the relays before this one, chunk by chunk; the next relay reads it while it arrives.

Invariants:
- nothing_is_fetched_twice: bytes that an upstream delivered before it failed are kept, and another sends the rest;
- damage_is_found_at_once: each chunk is checked before it is written, each file and version before it counts as whole.
"""

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from urllib.parse import urlsplit

import aiohttp
import structlog

from streamrl.bus.waiting import in_thread
from streamrl.schemas.control import AnnouncedWeights
from streamrl.schemas.errors import ChecksumMismatch, WeightsError
from streamrl.schemas.identifiers import named_version
from streamrl.schemas.weight_deltas import apply_deltas
from streamrl.schemas.weights import MANIFEST, MAX_MANIFEST_BYTES, WeightManifest, checked_manifest, weights_path
from streamrl.weights.relay.copies import ArrivingFile, RelayCopies, VersionCopy

log = structlog.get_logger()

CONNECT_TIMEOUT_S = 2.0
"""Short, since hosts of one network answer in milliseconds: the sooner is a dead one passed over."""
PROBE_S = 1.0
SILENCES = 3
"""Time-outs in a row, of a healthy upstream that sends nothing, before another is asked: it may be waiting too."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0
"""Seconds to wait after all upstreams were tried, doubled each time from the first to the longest."""

Route = Callable[[AnnouncedWeights, frozenset[str]], list[str]]
"""Gives the addresses of the upstreams for an announced version, the best first, without the ones given up."""


@dataclass
class ChainTransfer:
    """Fetches versions of one policy into ``copies``.

    ``route`` is asked at each attempt, since relays come and go. ``is_overtaken``: whether another version is wanted
    now; then no upstream is asked a second time. ``received_bytes``: all bytes of weights received, good or not.
    """

    copies: RelayCopies
    route: Route
    timeout_s: float
    is_overtaken: Callable[[AnnouncedWeights], bool]
    received_bytes: int = 0

    async def fetch(self, ready: AnnouncedWeights) -> None:
        """Fetch a whole version; relays after this one read it while it arrives.

        Raises:
            WeightsError: no relay has it any more, and another version is wanted.
            OSError: the disk is full or cannot be written.
        """
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=self.timeout_s)
        # A thread of its own moves bytes from socket to file: the event loop's threads serve this relay's readers.
        # Leaving the block does not block, since a cancelled call was waited for before.
        with ThreadPoolExecutor(1, "weights") as thread:
            async with aiohttp.ClientSession(timeout=timeout, auto_decompress=False) as session:
                await self._pull(_Pull(self, session, ready, thread))
        await self.copies.tidy()

    async def _pull(self, pull: "_Pull") -> None:
        raw, manifest = await pull.manifest()
        copy = self.copies.begin(manifest, raw)
        try:
            await self._patch(pull, copy)
            for file in manifest.files:
                await pull.file(copy.files[file.name])
            self.copies.finish(copy)
        except BaseException:
            self.copies.abandon(copy)
            raise

    async def _patch(self, pull: "_Pull", copy: VersionCopy) -> None:
        """Make the weights file from the delta, if its base is here. After any failure the whole file is fetched."""
        delta, base = copy.manifest.delta, self.copies.base_of(copy.manifest)
        if delta is None or base is None:
            return
        target, arriving = copy.files[delta.target], copy.files[delta.file.name]
        try:
            with self.copies.lease(self.copies.versions[delta.base]):
                await pull.file(arriving)
                made = await in_thread(apply_deltas, base, [arriving.path], target.path)
            if made != target.file.sha256:
                raise ChecksumMismatch(f"expected {target.file.sha256} of a version and its delta, got {made}")
            target.made()
        except (WeightsError, OSError) as error:
            log.info("weights fetched whole", version=str(copy.version), reason=str(error))


@dataclass
class _Pull:
    """The fetch of one version. ``given_up``: upstreams that are gone or sent damaged bytes."""

    transfer: ChainTransfer
    session: aiohttp.ClientSession
    ready: AnnouncedWeights
    thread: ThreadPoolExecutor
    given_up: set[str] = field(default_factory=set)

    async def manifest(self) -> tuple[bytes, WeightManifest]:
        found: list[tuple[bytes, WeightManifest]] = []

        async def read(weights: str) -> None:
            found.append(await self._read_manifest(f"{weights}/{MANIFEST}"))

        await self._from_an_upstream(read)
        return found[-1]

    async def file(self, arriving: ArrivingFile) -> None:
        """Fetch the missing bytes of a file."""
        if arriving.is_whole:
            return
        await in_thread(arriving.resume)
        await self._from_an_upstream(lambda weights: self._receive(f"{weights}/{arriving.file.name}", arriving))

    async def _from_an_upstream(self, ask: Callable[[str], Awaitable[None]]) -> None:
        """Ask one upstream after the other until one has answered in full."""
        pause_s, silences = FIRST_PAUSE_S, 0
        error: Exception | None = None
        while True:
            route = self.transfer.route(self.ready, frozenset(self.given_up))
            if not route:
                if error is not None and self.transfer.is_overtaken(self.ready):
                    raise WeightsError(f"expected weights {self.ready.version} from a relay, got {error!r}") from error
                self.given_up.clear()
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
                continue
            upstream = route[0].rstrip("/")
            try:
                await ask(f"{upstream}/{weights_path(self.ready.series)}/{self.ready.version}")
            except TimeoutError as silence:
                silences, error = silences + 1, silence
                if silences < SILENCES and await self._answers(upstream):
                    continue
            except (WeightsError, aiohttp.ClientError, HTTPException, EOFError, ConnectionError) as failure:
                error = failure
            else:
                return
            named = named_version(self.ready.series or None, self.ready.version)
            log.warning("another upstream asked", version=named, given_up=upstream, error=repr(error))
            self.given_up.add(route[0])
            silences = 0

    async def _answers(self, upstream: str) -> bool:
        timeout = aiohttp.ClientTimeout(total=PROBE_S)
        try:
            async with self.session.get(f"{upstream}/health", timeout=timeout) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False

    async def _read_manifest(self, url: str) -> tuple[bytes, WeightManifest]:
        async with self.session.get(url, allow_redirects=False) as response:
            if response.status != 200:
                raise WeightsError(f"expected status 200 from {url}, got {response.status}")
            raw = await response.content.read(MAX_MANIFEST_BYTES + 1)
            while (more := await response.content.read(MAX_MANIFEST_BYTES)) and len(raw) <= MAX_MANIFEST_BYTES:
                raw += more
        self.transfer.received_bytes += len(raw)
        return raw, checked_manifest(raw, self.ready.version, self.ready.manifest_sha256, url)

    async def _receive(self, url: str, arriving: ArrivingFile) -> None:
        """Receive a file: each chunk is checked and written, and relays after this one may read it then."""
        if arriving.have < arriving.file.size:
            body, loop = _Body(url, arriving.have, self.transfer.timeout_s), asyncio.get_running_loop()

            def arrived(have: int) -> None:
                self.transfer.received_bytes += have - arriving.have
                arriving.arrived(have)

            # In a thread, straight into memory: an event loop needs about a hundred steps per chunk, and twice the CPU
            # time per byte.
            await in_thread(
                body.pour,
                arriving,
                lambda have: loop.call_soon_threadsafe(arrived, have),
                executor=self.thread,
                on_cancel=body.stop,
            )
        arriving.finish(url)


@dataclass
class _Body:
    """The body of an upstream's answer: a file from byte ``start`` on. All calls block, except ``stop``."""

    url: str
    start: int
    timeout_s: float
    _socket: socket.socket | None = None
    _is_stopped: bool = False

    def stop(self) -> None:
        """Interrupt the reading, from another thread."""
        self._is_stopped = True
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def pour(self, arriving: ArrivingFile, on_arrived: Callable[[int], object]) -> None:
        """Write the body to the file, chunk by chunk.

        Raises:
            WeightsError: the status is unexpected, or a chunk is damaged.
            TimeoutError: the upstream was silent for ``timeout_s``.
            ConnectionError, EOFError, HTTPException: the connection broke.
            OSError: the disk is full.
        """
        where = urlsplit(self.url)
        of_kind = HTTPSConnection if where.scheme == "https" else HTTPConnection
        connection = of_kind(where.hostname or "", where.port, timeout=CONNECT_TIMEOUT_S)
        with contextlib.closing(connection), self._answering(connection, where.path) as response:
            buffer = memoryview(bytearray(min(arriving.chunk_bytes, arriving.file.size)))
            while length := arriving.next_chunk():
                with _connection_errors():
                    self._fill(response, buffer[:length])
                on_arrived(arriving.append(buffer[:length], self.url))

    def _answering(self, connection: HTTPConnection, path: str) -> HTTPResponse:
        with _connection_errors():
            connection.connect()
            self._socket = connection.sock
            self._socket.settimeout(self.timeout_s)
            if self._is_stopped:
                raise ConnectionAbortedError(f"{self.url} is not wanted any more")
            connection.request("GET", path, headers={"Range": f"bytes={self.start}-"})
            response = connection.getresponse()
        if response.status != 206:
            response.close()
            raise WeightsError(f"expected status 206 from {self.url}, got {response.status}")
        return response

    def _fill(self, response: HTTPResponse, buffer: memoryview) -> None:
        filled = 0
        while filled < len(buffer):
            read = 0 if self._is_stopped else response.readinto(buffer[filled:])
            if not read:
                raise EOFError(f"{self.url} ended {len(buffer) - filled} bytes before the end of a chunk")
            filled += read


@contextmanager
def _connection_errors() -> Iterator[None]:
    """Raise every OSError of the block as a connection's failure, so that it does not look like a full disk."""
    try:
        yield
    except (ConnectionError, TimeoutError):
        raise
    except OSError as error:  # no route, no such name
        raise ConnectionError(str(error)) from error
