import asyncio
from collections.abc import AsyncIterator

import pytest

from tests.faults.proxy import HOST, FaultProxy

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture
async def proxy() -> AsyncIterator[FaultProxy]:
    """Before a server that sends back what it gets."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while chunk := await reader.read(1 << 16):
                writer.write(chunk)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(echo, HOST, 0)
    async with FaultProxy(HOST, server.sockets[0].getsockname()[1]) as proxy:
        yield proxy
    server.close()
    await server.wait_closed()


_opened: list[asyncio.StreamWriter] = []


async def connected(proxy: FaultProxy) -> Streams:
    streams = await asyncio.open_connection(HOST, proxy.port)
    _opened.append(streams[1])
    return streams


@pytest.fixture(autouse=True)
async def _no_connection_is_left() -> AsyncIterator[None]:
    yield
    while _opened:
        _opened.pop().transport.abort()


async def echoed(streams: Streams, data: bytes, timeout_s: float = 5.0) -> bytes:
    streams[1].write(data)
    return await asyncio.wait_for(streams[0].readexactly(len(data)), timeout_s)


async def took(streams: Streams, data: bytes) -> float:
    began = asyncio.get_running_loop().time()
    assert await echoed(streams, data) == data
    return asyncio.get_running_loop().time() - began


async def test_without_faults_it_is_a_wire(proxy: FaultProxy) -> None:
    data = bytes(range(256)) * 8192
    assert await echoed(await connected(proxy), data) == data
    assert proxy.passed == {"to_target": len(data), "to_client": len(data)}


async def test_latency_is_added_each_way_and_does_not_add_up_per_chunk(proxy: FaultProxy) -> None:
    streams = await connected(proxy)
    proxy.latency_s = 0.1
    assert 0.2 <= await took(streams, bytes(1 << 20)) < 1.0


async def test_bandwidth_is_shared_by_all_connections(proxy: FaultProxy) -> None:
    proxy.bandwidth = 1_000_000
    both = [await connected(proxy), await connected(proxy)]
    times = await asyncio.gather(*(took(streams, bytes(200_000)) for streams in both))
    assert 0.3 <= max(times) < 1.5


async def test_a_reset_is_felt_and_a_new_connection_works(proxy: FaultProxy) -> None:
    streams = await connected(proxy)
    await echoed(streams, b"x")
    proxy.reset()
    with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
        await echoed(streams, b"x")
    assert await echoed(await connected(proxy), b"y") == b"y"


async def test_half_open_swallows_old_and_new_connections_without_a_word(proxy: FaultProxy) -> None:
    old = await connected(proxy)
    await echoed(old, b"x")
    proxy.half_open()
    for streams in (old, await connected(proxy)):
        with pytest.raises(TimeoutError):
            await echoed(streams, b"lost", 0.2)
    assert proxy.swallowed == {"to_target": 8, "to_client": 0}
    proxy.heal()
    with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
        await echoed(old, b"x")
    assert await echoed(await connected(proxy), b"y") == b"y"


async def test_a_blackhole_lets_the_other_direction_through(proxy: FaultProxy) -> None:
    proxy.blackhole("to_client")
    with pytest.raises(TimeoutError):
        await echoed(await connected(proxy), b"x", 0.2)
    assert proxy.passed["to_target"] == 1
    assert proxy.swallowed["to_client"] == 1


async def test_a_cut_refuses_for_its_time(proxy: FaultProxy) -> None:
    cut = asyncio.create_task(proxy.cut(0.3))
    await asyncio.sleep(0.05)
    with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError, OSError)):
        await echoed(await connected(proxy), b"x")
    await cut
    assert await echoed(await connected(proxy), b"y") == b"y"


async def test_a_target_that_is_gone_resets_the_client() -> None:
    async with FaultProxy(HOST, 1) as proxy:
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await echoed(await connected(proxy), b"x")


async def test_nothing_is_left_when_it_ends(proxy: FaultProxy) -> None:
    streams = await connected(proxy)
    await echoed(streams, b"x")
    assert proxy.open_connections == 1
    streams[1].close()
    async with asyncio.timeout(5):
        while proxy.open_connections:
            await asyncio.sleep(0.01)
