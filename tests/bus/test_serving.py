import asyncio
import threading

import aiohttp
from aiohttp import web

from streamrl.bus.serving import OpenRequests
from streamrl.bus.threads import in_thread
from tests.fakes.waiting import until


async def test_no_request_outlives_its_server() -> None:
    """One that is in a thread takes longer than the server waits for it, and ends before the server has."""
    begun, free, ended = threading.Event(), threading.Event(), list[str]()

    def read() -> None:
        begun.set()
        free.wait(10)
        ended.append("thread")

    async def slow(_request: web.Request) -> web.Response:
        await in_thread(read)
        return web.Response()

    app = web.Application()
    app.router.add_get("/", slow)
    requests, runner = OpenRequests(app), web.AppRunner(app, shutdown_timeout=0.05)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with aiohttp.ClientSession() as session:
        asking = asyncio.create_task(session.get(f"http://127.0.0.1:{runner.addresses[0][1]}/"))
        await until(begun.is_set)
        asyncio.get_running_loop().call_later(0.3, free.set)
        ending = asyncio.create_task(requests.end(runner))
        await asyncio.sleep(0.1)
        ending.cancel()
        await asyncio.wait([ending])
        assert ended == ["thread"]
        assert ending.cancelled()
        await asyncio.wait([asking])
        assert isinstance(asking.exception(), aiohttp.ClientError)
