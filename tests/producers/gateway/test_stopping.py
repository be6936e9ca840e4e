"""A gateway that is stopped or cancelled while requests are under way: what they are told, and what is left."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from streamrl.producers.gateway.gateway import Gateway
from tests.fakes.waiting import until
from tests.producers.gateway.gateway_harness import RUN, ScriptedEngine, running_gateway


class Watched:
    """The task of a gateway's ``run``, its stop, and the server's tasks that are there when it has ended."""

    def __init__(self) -> None:
        self.left: list[str] | None = None

    def prepare(self, gateway: Gateway) -> None:
        run = gateway.run

        async def watched(stop: asyncio.Event) -> None:
            task = asyncio.current_task()
            assert task is not None
            self.task, self.stop = task, stop
            try:
                await run(stop)
            except asyncio.CancelledError:
                task.uncancel()
            names = [str(getattr(one.get_coro(), "__qualname__", "")) for one in asyncio.all_tasks()]
            self.left = [
                name
                for name in names
                if name.startswith(("RequestResponseCycle", "_wait_for_disconnect", "FeedbackDesk"))
            ]

        gateway.run = watched  # type: ignore[method-assign]


@pytest.fixture(autouse=True)
def short_shutdown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamrl.producers.gateway.gateway.SHUTDOWN_TIMEOUT_S", 1.0)


@asynccontextmanager
async def under_way(path: Path) -> AsyncIterator[tuple[Watched, "asyncio.Task[Any]", "asyncio.Task[Any]"]]:
    """A gateway in the middle of a stream and of a whole answer, neither of which would ever end."""
    watched, engine = Watched(), ScriptedEngine(hold_at=2)
    async with running_gateway(path, engines=[engine], prepare=watched.prepare) as it:
        headers = {"Authorization": f"Bearer {it.key}"}

        async def ask(*, stream: bool) -> Any:
            body = {"model": RUN, "prompt": "hello", "stream": stream}
            async with session.post("/v1/completions", json=body) as response:
                return response.status, await response.text()

        async with aiohttp.ClientSession(it.gateway.address, headers=headers) as session:
            streamed, whole = (asyncio.create_task(ask(stream=stream)) for stream in (True, False))
            await until(lambda: engine.running == 2)
            await asyncio.sleep(0.05)
            yield watched, streamed, whole
            await asyncio.wait([streamed, whole])


async def test_requests_that_outlast_the_time_of_a_stop_are_ended_without_a_traceback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        async with under_way(tmp_path) as (watched, stream, whole):
            watched.stop.set()
            await until(lambda: watched.left is not None)
    assert watched.left == []
    assert isinstance(stream.exception(), aiohttp.ClientError), "cut off, and not taken for whole"
    status, said = whole.result()
    assert status == 503
    assert "the gateway is stopping; send this request again" in said
    assert not [record for record in caplog.records if record.exc_info]


async def test_a_gateway_that_is_cancelled_twice_has_ended_its_requests_and_loops(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        async with under_way(tmp_path) as (watched, stream, whole):
            watched.task.cancel()
            await asyncio.sleep(0.05)
            watched.task.cancel()
            await until(lambda: watched.left is not None, timeout_s=5.0)
    assert watched.left == []
    assert isinstance(stream.exception(), aiohttp.ClientError)
    assert isinstance(whole.exception(), aiohttp.ClientError) or whole.result()[0] == 503
    assert not [record for record in caplog.records if record.exc_info]
