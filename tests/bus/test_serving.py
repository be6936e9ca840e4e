import asyncio
import gc
import socket
import threading
import time

import aiohttp
import pytest
from aiohttp import web

from streamrl.bus.serving import OpenRequests, listen
from streamrl.bus.waiting import in_thread
from tests.fakes.waiting import until


async def served(app: web.Application, grace_s: float) -> OpenRequests:
    """An application that listens on a free port."""
    requests = OpenRequests(app, grace_s)
    await requests.runner.setup()
    await listen(requests.runner, "127.0.0.1", 0)
    return requests


def url_of(requests: OpenRequests) -> str:
    return f"http://127.0.0.1:{requests.runner.addresses[0][1]}/"


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
    requests = await served(app, 0.05)
    async with aiohttp.ClientSession() as session:
        asking = asyncio.create_task(session.get(url_of(requests)))
        await until(begun.is_set)
        asyncio.get_running_loop().call_later(0.3, free.set)
        ending = asyncio.create_task(requests.end())
        await asyncio.sleep(0.1)
        ending.cancel()
        await asyncio.wait([ending])
        assert ended == ["thread"]
        assert ending.cancelled()
        await asyncio.wait([asking])
        assert isinstance(asking.exception(), aiohttp.ClientError)


async def test_a_request_that_ends_as_its_time_is_over_ends_well(caplog: pytest.LogCaptureFixture) -> None:
    asked = asyncio.Event()

    async def answered(_request: web.Request) -> web.Response:
        asked.set()
        await asyncio.sleep(0.15)
        return web.Response(text="answered")

    app = web.Application()
    app.router.add_get("/", answered)
    requests = await served(app, 0.2)
    async with aiohttp.ClientSession() as session:
        asking = asyncio.create_task(session.get(url_of(requests)))
        await asked.wait()
        ending = asyncio.create_task(requests.end())
        await asyncio.sleep(0.05)
        time.sleep(0.3)  # so that one turn of the event loop comes after both times
        await ending
        await asyncio.wait([asking])
    assert not caplog.records


async def test_a_client_that_leaves_as_its_connection_opens_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    asked, gone = asyncio.Event(), asyncio.Event()
    raised = list[type[Exception]]()

    async def open_socket(request: web.Request) -> web.WebSocketResponse:
        asked.set()
        await gone.wait()
        await until(lambda: request.transport is None or request.transport.is_closing())
        websocket = web.WebSocketResponse()
        try:
            await websocket.prepare(request)
        except ConnectionError as error:
            raised.append(type(error))
            raise
        return websocket

    app = web.Application()
    app.router.add_get("/", open_socket)
    requests = await served(app, 0.2)
    async with aiohttp.ClientSession() as session:
        asking = asyncio.create_task(session.ws_connect(url_of(requests)))
        await asked.wait()
        asking.cancel()
    gone.set()
    await until(lambda: bool(raised))
    await requests.end()
    assert len(raised) == 1
    assert not caplog.records


async def test_a_handlers_own_lost_connection_is_an_error(caplog: pytest.LogCaptureFixture) -> None:
    async def forward(_request: web.Request) -> web.Response:
        raise ConnectionResetError("the next server")

    app = web.Application()
    app.router.add_get("/", forward)
    requests = await served(app, 0.2)
    async with aiohttp.ClientSession() as session, session.get(url_of(requests)) as response:
        assert response.status == 500
    await requests.end()
    assert [record.levelname for record in caplog.records] == ["ERROR"]


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.parametrize("after", range(8))
async def test_a_start_that_is_cancelled_at_any_moment_leaves_no_server(after: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as chosen:
        port: int = chosen.getsockname()[1]
    app = web.Application()
    requests = OpenRequests(app, 1.0)
    await requests.runner.setup()
    starting = asyncio.create_task(listen(requests.runner, "127.0.0.1", port))
    await turns(after)
    starting.cancel()
    await asyncio.wait([starting])
    await requests.end()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


# asyncio drops a socket that it accepted in the turn in which its server was closed.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("after", range(12))
async def test_a_connection_during_shutdown_leaves_no_task(after: int) -> None:
    app = web.Application()
    requests = await served(app, 1.0)
    with socket.create_connection(requests.runner.addresses[0][:2]) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: us\r\n\r\n")
        await turns(after)
        await requests.end()
        assert asyncio.all_tasks() == {asyncio.current_task()}
    gc.collect()
