"""Starts an aiohttp server, and stops it together with the requests that it is answering."""

import asyncio
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

from streamrl.bus.waiting import to_its_end, wait_for_tasks

CLIENT_LEFT = 499
"""The status that servers commonly log for a request whose client closed the connection."""
TURNS = 10
"""Turns of the event loop to wait at the end of a server.

This is more than a new connection needs to reach the server object, and more than a cancelled handler needs to end if
nothing blocks it.
"""


async def listen(runner: web.AppRunner, host: str, port: int) -> None:
    """Serve a runner's application at an address. ``runner.cleanup`` stops the server, also after a cancellation here.

    asyncio's ``create_server`` does not promise that: cancelled in its last turn, it leaves a listening server.

    Raises:
        OSError: the port is taken, or the address is not this machine's.
        CancelledError: the caller was cancelled.
    """
    await to_its_end(web.TCPSite(runner, host, port).start())


class OpenRequests:
    """A runner for an application, and the requests that it is answering; ``end`` ends the runner's server.

    Invariant no_request_outlives_its_server: aiohttp cancels slow requests at the end, but does not wait for them. A
    request's thread could then still use a file or a database while its owner closes it.

    ``grace_s``: seconds that requests get to end by themselves. ``options``: further ones of ``web.AppRunner``.
    """

    def __init__(self, app: web.Application, grace_s: float, **options: Any) -> None:
        self.grace_s = grace_s
        self.runner = web.AppRunner(app, access_log=None, shutdown_timeout=grace_s, **options)
        self._tasks = set[asyncio.Task[Any]]()
        app.middlewares.append(self._track)

    @web.middleware
    async def _track(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        task = asyncio.current_task()
        assert task is not None, "aiohttp answers within tasks"
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            return await handler(request)
        except ConnectionError:
            if (transport := request.transport) is not None and not transport.is_closing():
                raise  # another connection, of the handler itself
            # Its client has left, which is no error here: aiohttp would log a traceback. This answer is dropped.
            return web.Response(status=CLIENT_LEFT)

    async def end(self) -> None:
        """Close the application's server and all its connections. Returns when none of its requests is running.

        Raises:
            CancelledError: the caller was cancelled; the server has ended nevertheless.
        """
        await to_its_end(self._end())

    async def _end(self) -> None:
        server, quiet_turns = self.runner.server, 0
        for site in [*self.runner.sites]:
            await site.stop()
        # The requests end before aiohttp's own shutdown. That one gives requests time as well, but a request that ends
        # in the very turn in which this time is over fails there with InvalidStateError.
        deadline = asyncio.get_running_loop().time() + self.grace_s
        while server is not None and quiet_turns < TURNS:
            await asyncio.sleep(0)
            quiet_turns += 1
            server.pre_shutdown()  # closes connections that have no request
            if self._tasks:
                await self._end_requests(deadline)
                quiet_turns = 0
        await self.runner.cleanup()
        for _ in range(TURNS):  # for the tasks of the connections that were just closed
            await asyncio.sleep(0)

    async def _end_requests(self, deadline: float) -> None:
        """Wait for the requests until ``deadline``, by the event loop's clock, then cancel and await those left."""
        left = max(0.0, deadline - asyncio.get_running_loop().time())
        _, late = await asyncio.wait([*self._tasks], timeout=left)
        for task in late:
            task.cancel()
        if late:
            await wait_for_tasks(late)
