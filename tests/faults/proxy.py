"""A TCP proxy that misbehaves on demand: latency, bandwidth, resets, half-open connections. Knows no protocol.

The broker must advertise the proxy's port, or clients go round it: see ``tests.faults.cluster``.
"""

import asyncio
import contextlib
import functools
import socket
import struct
from collections.abc import Callable
from types import TracebackType
from typing import Literal, Self

HOST = "127.0.0.1"
CHUNK = 16 << 10
WINDOW = 256
"""Chunks under way in one direction of a connection; then the sender waits, as it does for a network."""
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)

Direction = Literal["to_target", "to_client"]
DIRECTIONS: tuple[Direction, Direction] = ("to_target", "to_client")


class FaultProxy:
    """Passes bytes to ``target``. Faults hold for all connections, also later ones, until ``heal``.

    ``latency_s`` is added one way, in each direction; ``bandwidth`` is in bytes/s, each direction of all connections
    together; both may be set at any time. ``who`` says whose end of a connection a port is: a number, or none known;
    what those in ``cut_off`` send and are sent goes nowhere.
    """

    def __init__(
        self, target_host: str, target_port: int, *, port: int = 0, who: Callable[[int], int | None] | None = None
    ) -> None:
        self.target = (target_host, target_port)
        self.port = port
        self.latency_s = 0.0
        self.bandwidth: float | None = None
        self.accepted = 0
        self.passed: dict[Direction, int] = dict.fromkeys(DIRECTIONS, 0)
        self.swallowed: dict[Direction, int] = dict.fromkeys(DIRECTIONS, 0)
        self.who = who
        self.cut_off: frozenset[int] = frozenset()
        self._swallowing: set[Direction] = set()
        self._refusing = False
        self._free_at: dict[Direction, float] = dict.fromkeys(DIRECTIONS, 0.0)
        self._connections: dict[asyncio.Task[None], _Connection] = {}
        self._server: asyncio.Server | None = None

    @property
    def address(self) -> str:
        """``host:port`` for clients."""
        return f"{HOST}:{self.port}"

    @property
    def open_connections(self) -> int:
        """Connections of clients held now."""
        return len(self._connections)

    def half_open(self) -> None:
        """Take connections and bytes, and pass nothing on; nobody is told."""
        self._swallowing |= set(DIRECTIONS)

    def blackhole(self, direction: Direction) -> None:
        """Swallow what goes one way."""
        self._swallowing.add(direction)

    def reset(self) -> None:
        """End every connection with RST; new ones are welcome."""
        for connection in self._connections.values():
            connection.reset()

    def refuse(self) -> None:
        """Reset every connection, also new ones."""
        self._refusing = True
        self.reset()

    async def cut(self, seconds: float) -> None:
        """``refuse`` for so long."""
        self.refuse()
        try:
            await asyncio.sleep(seconds)
        finally:
            self._refusing = False

    def heal(self) -> None:
        """Be a wire again. Connections that lost bytes are reset, as a peer that forgot them would do."""
        self.latency_s, self.bandwidth, self._refusing = 0.0, None, False
        self._swallowing.clear()
        self.cut_off = frozenset()
        for connection in self._connections.values():
            if connection.lost_bytes:
                connection.reset()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, HOST, self.port, limit=CHUNK)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        self.reset()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        await self._server.wait_closed()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connection = self._connections[task] = _Connection(self, reader, writer)
        self.accepted += 1
        try:
            if not self._refusing:
                await connection.serve()
        except (OSError, asyncio.CancelledError):
            pass  # whoever ended it, the other side is told below
        finally:
            connection.reset()
            del self._connections[task]

    def take(self, direction: Direction, size: int, owner: Callable[[], int | None]) -> bool:
        """Count bytes; False: they go nowhere."""
        lost = direction in self._swallowing or (bool(self.cut_off) and owner() in self.cut_off)
        (self.swallowed if lost else self.passed)[direction] += size
        return not lost

    def due_at(self, direction: Direction, size: int) -> float:
        """When bytes that arrive now reach the other side, as a time of the loop."""
        now = asyncio.get_running_loop().time()
        self._free_at[direction] = max(now, self._free_at[direction]) + (size / self.bandwidth if self.bandwidth else 0)
        return self._free_at[direction] + self.latency_s


class _Connection:
    """A client's connection and ours to the target."""

    def __init__(self, proxy: FaultProxy, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._proxy = proxy
        self._client = (reader, writer)
        self._writers = [writer]
        self._port: int = writer.get_extra_info("peername")[1]
        self.lost_bytes = False

    @functools.cached_property
    def _known_owner(self) -> int | None:
        return self._proxy.who(self._port) if self._proxy.who is not None else None

    def owner(self) -> int | None:
        """Whose connection it is; asked only when it matters."""
        return self._known_owner

    async def serve(self) -> None:
        target = await asyncio.open_connection(*self._proxy.target, limit=CHUNK)
        self._writers.append(target[1])
        ways = [
            asyncio.create_task(self._pass_on("to_target", self._client[0], target[1])),
            asyncio.create_task(self._pass_on("to_client", target[0], self._client[1])),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)

    async def _pass_on(self, direction: Direction, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(WINDOW)
        writing = asyncio.create_task(self._write(under_way, sink))
        try:
            while chunk := await source.read(CHUNK):
                if self._proxy.take(direction, len(chunk), self.owner):
                    await under_way.put((self._proxy.due_at(direction, len(chunk)), chunk))
                else:
                    self.lost_bytes = True
            await under_way.join()
            while self.lost_bytes:
                await asyncio.sleep(3600)  # an end that nobody hears of; ``heal`` or the other side ends the wait
        finally:
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)

    async def _write(self, under_way: "asyncio.Queue[tuple[float, bytes]]", sink: asyncio.StreamWriter) -> None:
        while True:
            due_at, chunk = await under_way.get()
            await asyncio.sleep(max(0.0, due_at - asyncio.get_running_loop().time()))
            try:
                sink.write(chunk)
                await sink.drain()
            finally:
                under_way.task_done()

    def reset(self) -> None:
        """End both halves without a farewell."""
        for writer in self._writers:
            if (connection := writer.get_extra_info("socket")) is not None:
                with contextlib.suppress(OSError):
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
            writer.transport.abort()
