"""A worker's side of its connection to gateways."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from streamrl.bus.memory import MemoryBus
from streamrl.bus.port import Record
from streamrl.producers.gateway import worker_requests
from streamrl.producers.gateway.worker_requests import (
    RequestServer,
    RequestSlots,
    pack,
    shared_secret,
    unpack,
    verify_peer,
)
from streamrl.producers.generation.rollout import TokenStream, WorkerLoad
from streamrl.producers.generation.status import WorkerStatus
from streamrl.schemas.errors import UserError
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.trajectories import SamplingParams, TokenChunk
from tests.fakes.engine import FakeEngine
from tests.fakes.waiting import until

V0 = PolicyVersion(1, 0)


@dataclass
class RequestServerHarness:
    """A server over a fake engine, and a gateway's connection to it that has proved the secret."""

    server: RequestServer
    engine: FakeEngine
    address: str
    client: aiohttp.ClientSession
    socket: aiohttp.ClientWebSocketResponse

    async def start(self, name: int, prompt: list[int] | None = None, **fields: Any) -> None:
        data = np.array(prompt or [1, 2], "<i4").tobytes()
        sampling = SamplingParams(max_completion_length=8).model_dump()
        await self.socket.send_bytes(pack("start", name, {"prompt": data, "sampling": sampling} | fields))

    async def next(self) -> list[Any]:
        """The next frame that is no status."""
        while True:
            frame = unpack(await self.socket.receive_bytes(timeout=5))
            if frame[0] != "status":
                return frame


@pytest.fixture
async def it() -> AsyncIterator[RequestServerHarness]:
    engine = FakeEngine(max_num_seqs=8, version=V0, started=True)
    status = WorkerStatus(version=V0)
    server = RequestServer(engine, WorkerLoad(), "w0", RequestSlots("127.0.0.1", 2, "s"), status)
    address = await server.open()
    async with aiohttp.ClientSession() as client, client.ws_connect(address) as socket:
        assert await verify_peer(socket, "s", is_worker=False)
        yield RequestServerHarness(server, engine, address, client, socket)
        engine.release.set()
    await server.close()


async def test_tokens_come_back_with_their_version_and_one_end(it: RequestServerHarness) -> None:
    await it.start(7)
    tokens: list[int] = []
    reasons: list[str | None] = []
    while True:
        kind, rows = await it.next()
        assert kind == "tokens"
        for name, ids, logprobs, lineage, number, reason in rows:
            assert (name, lineage, number, len(logprobs)) == (7, 1, 0, len(ids))
            tokens += ids
            reasons.append(reason)
        if reasons[-1] is not None:
            break
    assert (len(tokens), reasons[-1]) == (8, "stop")
    assert not any(reasons[:-1])
    assert it.engine.requests[0].interactive
    assert it.engine.requests[0].chunk_tokens == 1
    assert it.server.load.generated_tokens == 8
    await until(lambda: not it.server.running + it.server.waiting)


async def test_tokens_of_consenting_requesters_go_to_the_topic_once(it: RequestServerHarness) -> None:
    bus = MemoryBus()
    bus.create_topic("r.tokens", 1)
    it.server.tokens = TokenStream(await bus.publisher("w0"), "r.tokens", "w0")
    publishing = asyncio.create_task(it.server.tokens.publish_loop())
    try:
        await it.start(1)
        await it.start(2, stream_as="gateway/cmpl-1/0/0", prefix=np.array([5, 6], "<i4").tobytes())
        told: dict[int, list[int]] = {1: [], 2: []}
        ends = 0
        while ends < 2:
            _, rows = await it.next()
            for name, ids, *_, reason in rows:
                told[name] += ids
                ends += reason is not None
        (log,) = bus.log("r.tokens").partitions
        await until(lambda: bool(log) and chunk_of(log[-1]).finish_reason is not None)
    finally:
        publishing.cancel()
    chunks = [chunk_of(record) for record in log]
    assert {chunk.trajectory_id for chunk in chunks} == {"gateway/cmpl-1/0/0"}
    assert [token for chunk in chunks for token in chunk.token_ids] == told[2]
    starts = [2 + sum(len(chunk.token_ids) for chunk in chunks[:number]) for number in range(len(chunks))]
    assert [chunk.start for chunk in chunks] == starts


def chunk_of(record: Record) -> TokenChunk:
    message = record.message()
    assert isinstance(message, TokenChunk)
    return message


@pytest.mark.parametrize("secret", ["", "S", "s "])
async def test_only_gateways_with_the_secret_are_answered(it: RequestServerHarness, secret: str) -> None:
    async with it.client.ws_connect(it.address) as stranger:
        assert not await verify_peer(stranger, secret, is_worker=False)
        await stranger.send_bytes(pack("start", 1, {}))
        message = await stranger.receive(timeout=5)
        assert message.type in (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSED, aiohttp.WSMsgType.CLOSING)
    # A proof that is sent back is none, as each side proves its own role.
    async with it.client.ws_connect(it.address) as mirror:
        await mirror.send_bytes(await mirror.receive_bytes())
        await mirror.send_bytes(await mirror.receive_bytes())
        assert (await mirror.receive(timeout=5)).type is not aiohttp.WSMsgType.BINARY
    assert not it.engine.requests


async def test_requests_keep_to_their_slots_and_others_are_told_that_it_is_busy(it: RequestServerHarness) -> None:
    it.engine.hold_at = 0
    for name in range(11):
        await it.start(name)
    assert await it.next() == ["failed", 10, "busy", "this worker accepts no more requests now"]
    assert (it.engine.running, it.server.running, it.server.waiting) == (2, 2, 8)
    await it.socket.send_bytes(pack("cancel", 0))
    await until(lambda: it.server.waiting == 7)
    assert it.engine.running == 2
    it.engine.release.set()
    await it.server.until_idle()


async def test_requests_that_the_engine_rejects_are_refused(it: RequestServerHarness) -> None:
    it.engine.longest = 3
    await it.start(1, [1, 2, 3, 4])
    kind, name, why, text = await it.next()
    assert (kind, name, why) == ("failed", 1, "refused")
    assert "1 to 3 tokens" in text
    it.engine.failures["*"] = 1
    await it.start(2)
    assert (await it.next())[:3] == ["failed", 2, "failed"]
    await it.start(3, sampling={"max_completion_length": 0})
    assert (await it.next())[:3] == ["failed", 3, "refused"]


async def test_a_disconnected_gateway_frees_its_slots(it: RequestServerHarness) -> None:
    it.engine.hold_at = 4
    for name in range(4):
        await it.start(name)
    await until(lambda: it.engine.running == 2)
    await it.socket.close()
    await until(lambda: not it.engine.running and not it.server.running + it.server.waiting)
    assert it.engine.left_early == 2


async def test_a_frame_that_is_none_ends_the_connection(it: RequestServerHarness) -> None:
    for data in (b"\xc1", b"\x90", pack("grow", 1), pack(1)):
        async with it.client.ws_connect(it.address) as socket:
            assert await verify_peer(socket, "s", is_worker=False)
            await socket.send_bytes(data)
            while (await socket.receive(timeout=5)).type is aiohttp.WSMsgType.BINARY:
                pass


async def test_a_slow_gateway_stalls_nothing(it: RequestServerHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_requests, "MAX_HELD_DELTAS", 3)
    connection = worker_requests.GatewayConnection(_NeverRead(), it.server, abort := _Counted())  # type: ignore[arg-type]
    request = {
        "prompt": np.array([1], "<i4").tobytes(),
        "sampling": SamplingParams(max_completion_length=8).model_dump(),
    }
    it.engine.chunk = 1
    sending = asyncio.create_task(connection._send_loop())
    connection._receive(pack("start", 1, request))
    await until(lambda: it.engine.running == 0 and bool(it.engine.requests))
    assert abort.calls, "it is disconnected"
    assert it.server.load.generated_tokens == 8, "and the engine went on"
    sending.cancel()


class _NeverRead:
    async def send_bytes(self, data: bytes) -> None:
        await asyncio.Event().wait()


@dataclass
class _Counted:
    calls: int = 0

    def __call__(self) -> None:
        self.calls += 1


def test_processes_of_a_directory_share_a_secret(tmp_path: Path) -> None:
    path = tmp_path / "gateway" / "secret"
    first = shared_secret(path)
    assert shared_secret(path) == first
    assert len(first) > 40
    assert path.stat().st_mode & 0o777 == 0o600
    assert [*path.parent.iterdir()] == [path]
    with pytest.raises(UserError, match="request_secret"):
        shared_secret(path / "below a file")


async def test_an_address_of_another_machine_is_refused(it: RequestServerHarness) -> None:
    elsewhere = RequestServer(it.engine, WorkerLoad(), "w1", RequestSlots("192.0.2.1", 2, "s"), WorkerStatus())
    with pytest.raises(UserError, match="request_host"):
        await elsewhere.open()
    await elsewhere.close()
