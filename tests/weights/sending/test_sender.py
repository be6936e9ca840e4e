"""The weight sender over gloo, to ranks that are threads; to vLLM's: ``engines/test_vllm_transfer.py``."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from streamrl.bus.embedded.node import free_ports
from streamrl.producers.generation.status import WorkerStatus
from streamrl.schemas.errors import UserError, WeightsError
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.weights import fetch
from streamrl.weights.adopt import WeightsAdopter
from streamrl.weights.export import WeightExporter
from streamrl.weights.fetch import WeightsFetcher
from streamrl.weights.groups import SendingGroup, broadcast, join_gloo, open_group, word_sum
from streamrl.weights.sending.sender import WeightSender
from streamrl.weights.sending.settings import SenderSettings
from streamrl.weights.turns import SENT, SendingTurn, SentVersion, TurnAsker, read_sent
from tests.fakes.engine import FakeEngine
from tests.fakes.waiting import until
from tests.producers.generation.factories import running_relay

FIRST, SECOND = PolicyVersion(1, 0), PolicyVersion(1, 1)
A, B = "a" * 32, "b" * 32
TIMEOUT_S, SHORT_S = 60.0, 5.0
"""The short one where it is waited for; on a busy machine to meet takes seconds."""


Open = Callable[[int], SendingGroup]


def tensors_of(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {"w": torch.randn(7, 5).bfloat16(), "b": torch.randn(3), "none": torch.zeros(0, 4)}


@pytest.fixture
def store(tmp_path: Path) -> WeightExporter:
    return WeightExporter(tmp_path / "store", 2)


def add(store: WeightExporter, version: PolicyVersion, sender: str) -> SentVersion:
    sha256 = store.export(tensors_of(version.number), {"config.json": "{}"}, version, version.number, 0.0)
    return SentVersion(sender=sender, version=version, manifest_sha256=sha256)


@asynccontextmanager
async def sending(
    store: WeightExporter, timeout_s: float = TIMEOUT_S, opened: Open | None = None
) -> AsyncIterator[str]:
    """A sender; its address."""
    settings = SenderSettings(backend="gloo", port=free_ports(1)[0])
    group = opened or partial(open_group, "gloo", settings.host, timeout_s=timeout_s)
    stop = asyncio.Event()
    running = asyncio.create_task(WeightSender(store.root, settings, group, timeout_s).run(stop))
    assert await _listens(settings.port)
    try:
        yield settings.address
    finally:
        stop.set()
        await running


def _holds(adopter: WeightsAdopter, version: PolicyVersion) -> bool:
    return adopter.held == version


async def _listens(port: int, *, wanted: bool = True) -> bool:
    """Whether it does, as soon as it does as is wanted, or after half a minute."""
    for _ in range(1500):
        found = False
        with suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.close()
            found = True
        if found == wanted:
            break
        await asyncio.sleep(0.02)
    return found


class Engine:
    """The ranks of an engine, as threads."""

    def __init__(self, session: str, ranks: int = 1) -> None:
        self.session, self.ranks = session, ranks
        self.groups: list[dist.ProcessGroup] = []

    async def turn(self, sent: SentVersion, timeout_s: float = TIMEOUT_S) -> SendingTurn:
        return await asyncio.to_thread(TurnAsker(self.session, self.ranks, timeout_s).ask, sent)

    async def receive(self, turn: SendingTurn) -> list[dict[str, torch.Tensor]]:
        """What each rank gets."""
        with ThreadPoolExecutor(self.ranks) as threads:
            loop = asyncio.get_running_loop()
            if turn.meeting:
                joined = [loop.run_in_executor(threads, self._join, turn, rank) for rank in range(self.ranks)]
                self.groups = await asyncio.gather(*joined)
            got = [loop.run_in_executor(threads, self._receive, turn, group) for group in self.groups]
            return await asyncio.gather(*got)

    @staticmethod
    def _join(turn: SendingTurn, rank: int) -> dist.ProcessGroup:
        meeting: dict[str, Any] = turn.meeting
        at = meeting["master_address"], meeting["master_port"]
        group: dist.ProcessGroup = join_gloo(
            *at, meeting["rank_offset"] + rank, meeting["world_size"], meeting["timeout_s"]
        )
        return group

    @staticmethod
    def _receive(turn: SendingTurn, group: dist.ProcessGroup) -> dict[str, torch.Tensor]:
        got = {}
        for name, dtype, shape in zip(turn.names, turn.dtype_names, turn.shapes, strict=True):
            got[name] = torch.empty(shape, dtype=getattr(torch, dtype))
            broadcast(group, got[name])
        return got


def assert_got(received: list[dict[str, torch.Tensor]], version: PolicyVersion, turn: SendingTurn) -> None:
    expected = tensors_of(version.number)
    for got in received:
        assert got.keys() == expected.keys()
        assert all(torch.equal(got[name], expected[name]) for name in expected)
        assert tuple(word_sum(got[name]) for name in turn.names) == turn.sums


async def test_ranks_get_what_was_announced_and_meet_the_sender_once(store: WeightExporter) -> None:
    async with sending(store) as address:
        one, two = Engine(A), Engine(B, ranks=2)
        for version in (FIRST, SECOND):
            sent = add(store, version, address)
            for engine in (one, two):
                turn = await engine.turn(sent)
                assert bool(turn.meeting) == (version == FIRST)
                assert_got(await engine.receive(turn), version, turn)


async def test_only_announced_weights_are_sent(store: WeightExporter) -> None:
    async with sending(store) as address:
        sent = add(store, FIRST, address)
        with pytest.raises(WeightsError, match="409"):
            await Engine(A).turn(sent.model_copy(update={"manifest_sha256": "0" * 64}))
        with pytest.raises(WeightsError, match="410"):
            await Engine(A).turn(sent.model_copy(update={"version": SECOND}))
        engine = Engine(A)
        turn = await engine.turn(sent)
        assert_got(await engine.receive(turn), FIRST, turn)
        with pytest.raises(WeightsError, match="409"):  # of the version that is in memory by now
            await Engine(B).turn(sent.model_copy(update={"manifest_sha256": "0" * 64}))


async def test_a_damaged_file_is_not_sent(store: WeightExporter) -> None:
    async with sending(store) as address:
        sent = add(store, FIRST, address)
        path = store.root / str(FIRST) / "model.safetensors"
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
        with pytest.raises(WeightsError, match="409: expected sha256"):
            await Engine(A).turn(sent)


async def test_one_engine_is_sent_to_at_a_time_and_a_missing_rank_is_waited_for_no_longer_than_the_timeout(
    store: WeightExporter,
) -> None:
    async with sending(store, SHORT_S) as address:
        sent = add(store, FIRST, address)
        absent, engine = Engine(A), Engine(B)
        await absent.turn(sent)
        asked = asyncio.create_task(engine.turn(sent))
        await asyncio.sleep(SHORT_S / 4)
        assert not asked.done()
        try:
            turn = await asked
        except WeightsError:  # its own wait was over a moment before the sender's
            turn = await _admitted(engine, sent)
        assert_got(await engine.receive(turn), FIRST, turn)


async def test_a_failed_turn_ends_its_session(store: WeightExporter) -> None:
    async with sending(store, SHORT_S) as address:
        engine = Engine(A)
        turn = await engine.turn(add(store, FIRST, address))
        await engine.receive(turn)
        second = add(store, SECOND, address)
        assert not (await engine.turn(second)).meeting
        engine.groups.clear()  # it is gone, while it is being sent to
        again = Engine(A)
        turn = await _admitted(again, second)
        assert turn.meeting
        assert_got(await again.receive(turn), SECOND, turn)


async def _admitted(engine: Engine, sent: SentVersion) -> SendingTurn:
    for _ in range(5):
        with suppress(WeightsError):
            return await engine.turn(sent)
    raise AssertionError("never admitted")


async def test_an_engine_that_stopped_waiting_is_not_sent_to(store: WeightExporter) -> None:
    async with sending(store) as address:
        engine, gone = Engine(A), Engine(B)
        sent = add(store, FIRST, address)
        turn = await engine.turn(sent)
        with pytest.raises(WeightsError, match="timed out"):
            await gone.turn(sent, 0.2)
        await engine.receive(turn)
        began = asyncio.get_running_loop().time()
        turn = await engine.turn(sent)
        assert not turn.meeting
        assert asyncio.get_running_loop().time() - began < TIMEOUT_S / 2
        await engine.receive(turn)


class Endless:
    """A collective that nothing ends."""

    meeting: dict[str, Any] = {"master_port": 1}

    def __init__(self, ranks: int) -> None:
        self.is_released = threading.Event()

    def send(self, tensors: object) -> None:
        self.is_released.wait(30)

    def close(self) -> None:
        pass


async def test_a_collective_without_end_ends_the_sender(store: WeightExporter) -> None:
    group = Endless(1)
    with pytest.raises(WeightsError, match=r"within 0\.1 s"):
        async with sending(store, 0.1, lambda ranks: group) as address:
            await Engine(A).turn(add(store, FIRST, address))
            assert not await _listens(int(address.rpartition(":")[2]), wanted=False)
    group.is_released.set()


async def test_a_taken_port_gives_one_line(store: WeightExporter) -> None:
    settings = SenderSettings(backend="gloo", port=free_ports(1)[0])
    sender = WeightSender(store.root, settings, partial(open_group, "gloo", settings.host, timeout_s=1.0))
    taken = await asyncio.start_server(lambda reader, writer: None, settings.host, settings.port)
    async with taken:
        with pytest.raises(UserError, match="expected a free port for the weight sender"):
            await sender.run(asyncio.Event())


class SentTo(FakeEngine):
    """Tells files from what is sent; ``is_sent``: whether a sender gets through."""

    is_sent = True

    async def adopt(self, directory: Path, version: PolicyVersion) -> None:
        if read_sent(directory) is not None and not self.is_sent:
            raise WeightsError("expected a sender, got none")
        await super().adopt(directory, version)


@pytest.mark.parametrize(("unsent_s", "at_last"), [(0.2, True), (60.0, False)])
async def test_a_worker_begins_with_files_then_is_sent_to_and_takes_files_for_a_while_when_it_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unsent_s: float, *, at_last: bool
) -> None:
    monkeypatch.setattr(fetch, "UNSENT_S", unsent_s)
    engine, fetcher = SentTo(), WeightsFetcher(tmp_path, sender="http://sender:1")
    adopter = WeightsAdopter(engine, fetcher, WorkerStatus(), asyncio.Event().wait)
    versions = [PolicyVersion(1, number) for number in range(4)]
    async with running_relay() as relay:
        task = asyncio.create_task(adopter.adopt_loop())
        for version in versions:
            engine.is_sent = version.number != 2
            ready = relay.add(version)
            adopter.offer(ready)
            await until(partial(_holds, adopter, version))
            if not engine.is_sent:
                await asyncio.sleep(min(unsent_s, 1.0))
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
    assert [version for version, _ in engine.adopted] == versions
    assert [SENT in names for _, names in engine.adopted] == [False, True, False, at_last]
    assert "1-1/model.safetensors" not in relay.requests
    said = read_sent(tmp_path / ".to-be-sent" / "1-3")
    assert not at_last or said == SentVersion(
        sender="http://sender:1", version=versions[3], manifest_sha256=ready.manifest_sha256
    )


async def test_a_turn_that_is_given_up_is_not_waited_for() -> None:
    asked = asyncio.Event()

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"}")
        asked.set()
        await reader.read()
        writer.close()

    async with await asyncio.start_server(listen, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        sent = SentVersion(sender=f"http://{host}:{port}", version=PolicyVersion(1, 1), manifest_sha256="0" * 64)
        asker = TurnAsker("0" * 32, 1, 3600.0)
        asking = asyncio.create_task(asyncio.to_thread(asker.ask, sent))
        await asked.wait()
        asker.give_up()
        with pytest.raises(WeightsError, match="to send weights"):
            await asking
        asker.give_up()
