"""How an aiohttp server begins to listen, and ends together with the requests that it is answering."""

import asyncio
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

from streamrl.bus.waiting import to_its_end, until_ended

TURNS = 10
"""Of the event loop: more than lie between a connection's acceptance and the server's knowing of it, and between a
handler's cancellation and its end where nothing holds it up."""


async def listen(runner: web.AppRunner, host: str, port: int) -> None:
    """Serve a runner's application at this address; ``runner.cleanup`` ends that also where the caller is cancelled.

    asyncio's own ``create_server``, cancelled in its last turn, leaves a server that goes on listening.

    Raises:
        OSError: the port is taken, or the address is not this machine's.
        CancelledError: the caller was cancelled.
    """
    await to_its_end(web.TCPSite(runner, host, port).start())


class OpenRequests:
    """The requests that an application is answering. Make it before the application is served; end the server with it.

    Invariant no_request_outlives_its_server: aiohttp cancels those that take too long, and does not wait for them:
    one whose thread is still at a file or a database would go on while its owner closes that.
    """

    def __init__(self, app: web.Application) -> None:
        self._tasks = set[asyncio.Task[Any]]()
        app.middlewares.append(self._noted)

    @web.middleware
    async def _noted(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        task = asyncio.current_task()
        assert task is not None, "aiohttp answers within tasks"
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await handler(request)

    async def end(self, runner: web.AppRunner) -> None:
        """Close the application's server and all its connections; returns when nothing of it runs any more.

        Raises:
            CancelledError: the caller was cancelled meanwhile; it has ended all the same.
        """
        await to_its_end(self._end(runner))

    async def _end(self, runner: web.AppRunner) -> None:
        server, quiet = runner.server, 0
        await runner.cleanup()
        while quiet < TURNS:
            await asyncio.sleep(0)
            quiet += 1
            if server is not None and server.connections:  # who connected in the last moment
                await server.shutdown(0)
                quiet = 0
            if self._tasks:
                await until_ended([*self._tasks])
                quiet = 0
