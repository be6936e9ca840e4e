import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from producers.generation.weights import WeightsAdopter, WeightsFetcher
from schemas.errors import WeightsError
from schemas.identifiers import PolicyVersion
from tests.fakes.engine import FakeEngine
from tests.fakes.waiting import until
from tests.producers.generation.factories import running_relay


@asynccontextmanager
async def adopting(engine: FakeEngine, cache: Path) -> AsyncIterator[WeightsAdopter]:
    adopter = WeightsAdopter(engine, WeightsFetcher(cache), lambda version: None)
    task = asyncio.create_task(adopter.adopt_loop())
    try:
        yield adopter
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def test_latest_wins(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with running_relay() as relay, adopting(engine, tmp_path) as adopter:
        ready = {number: relay.add(PolicyVersion(1, number)) for number in (1, 2, 3)} | {
            0: relay.add(PolicyVersion(2, 0))
        }
        for number in (2, 1, 3):
            adopter.offer(ready[number])
        await until(lambda: adopter.held == (1, 3))
        adopter.offer(ready[2])
        adopter.offer(ready[0])
        await until(lambda: adopter.held == (2, 0))
    assert [version for version, _ in engine.adopted] == [(1, 3), (2, 0)]
    assert engine.adopted[0][1] == ["config.json", "manifest.json", "model.safetensors"]


async def test_the_last_two_versions_are_kept_on_disk(tmp_path: Path) -> None:
    async with running_relay() as relay, adopting(FakeEngine(), tmp_path) as adopter:
        for number in range(4):
            adopter.offer(relay.add(PolicyVersion(1, number)))
            await until(lambda number=number: adopter.held == (1, number))
        await until(lambda: sorted(path.name for path in tmp_path.iterdir()) == ["1-2", "1-3"])


async def test_a_corrupted_file_is_refused_and_fetched_again_while_the_old_weights_serve(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with running_relay() as relay, adopting(engine, tmp_path) as adopter:
        adopter.offer(relay.add(PolicyVersion(1, 0)))
        await until(lambda: adopter.held == (1, 0))
        ready = relay.add(PolicyVersion(1, 1))
        good = relay.content["1-1"]["model.safetensors"]
        relay.content["1-1"]["model.safetensors"] = good[:-1] + bytes([good[-1] ^ 1])
        adopter.offer(ready)
        await until(lambda: relay.requests.count("1-1/model.safetensors") >= 2)
        assert adopter.held == engine.version == (1, 0)
        relay.content["1-1"]["model.safetensors"] = good
        await until(lambda: adopter.held == (1, 1))


async def test_a_version_that_is_gone_is_overtaken_by_the_next(tmp_path: Path) -> None:
    async with running_relay() as relay, adopting(FakeEngine(), tmp_path) as adopter:
        gone = relay.add(PolicyVersion(1, 0))
        del relay.content["1-0"]
        adopter.offer(gone)
        await until(lambda: "1-0/manifest.json" in relay.requests)
        adopter.offer(relay.add(PolicyVersion(1, 1)))
        await until(lambda: adopter.held == (1, 1))


async def test_an_announcement_that_comes_before_its_files_is_asked_for_again(tmp_path: Path) -> None:
    async with running_relay() as relay, adopting(FakeEngine(), tmp_path) as adopter:
        ready = relay.add(PolicyVersion(1, 0))
        files = relay.content.pop("1-0")
        adopter.offer(ready)
        await until(lambda: relay.requests.count("1-0/manifest.json") >= 2)
        relay.content["1-0"] = files
        await until(lambda: adopter.held == (1, 0))


async def test_a_version_deleted_in_mid_download_is_left_for_the_newest(tmp_path: Path) -> None:
    async with running_relay() as relay, adopting(FakeEngine(), tmp_path) as adopter:
        ready = relay.add(PolicyVersion(1, 0))
        relay.breaks_at = 1 << 20
        adopter.offer(ready)
        await until(lambda: relay.breaks_at is None)
        del relay.content["1-0"]
        for number in range(1, 5):
            ready = relay.add(PolicyVersion(1, number))
        adopter.offer(ready)
        await until(lambda: adopter.held == (1, 4))
        await until(lambda: sorted(path.name for path in tmp_path.iterdir()) == ["1-4"])
    assert not {name for name in relay.requests if name.startswith(("1-1/", "1-2/", "1-3/"))}


async def test_weights_that_the_engine_refuses_leave_the_old_ones_in_service(tmp_path: Path) -> None:
    engine = FakeEngine(refuse={PolicyVersion(1, 1)})
    async with running_relay() as relay, adopting(engine, tmp_path) as adopter:
        for number in (0, 1, 2):
            adopter.offer(relay.add(PolicyVersion(1, number)))
            await until(lambda number=number: f"1-{number}/config.json" in relay.requests)
        await until(lambda: adopter.held == (1, 2))
    assert [version for version, _ in engine.adopted] == [(1, 0), (1, 2)]


async def test_first_weights_that_do_not_fit_end_the_worker(tmp_path: Path) -> None:
    adopter = WeightsAdopter(FakeEngine(refuse={PolicyVersion(1, 0)}), WeightsFetcher(tmp_path), lambda version: None)
    async with running_relay() as relay:
        adopter.offer(relay.add(PolicyVersion(1, 0)))
        with pytest.raises(WeightsError):
            await asyncio.wait_for(adopter.adopt_loop(), 5)
