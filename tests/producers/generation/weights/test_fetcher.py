import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from producers.generation.weights import WeightsFetcher
from schemas.errors import ChecksumMismatch, WeightsError
from schemas.identifiers import PolicyVersion
from schemas.weights import WeightFile
from tests.producers.generation.factories import FakeRelay, running_relay

V1, V2, V3 = PolicyVersion(1, 1), PolicyVersion(1, 2), PolicyVersion(2, 0)


@pytest.fixture
async def relay() -> AsyncIterator[FakeRelay]:
    async with running_relay() as relay:
        yield relay


def leftovers(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir())


async def test_a_version_arrives_byte_for_byte(relay: FakeRelay, tmp_path: Path) -> None:
    directory = await WeightsFetcher(tmp_path).fetch(relay.add(V1))
    assert directory == tmp_path / "1-1"
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == relay.content["1-1"]
    assert leftovers(tmp_path) == ["1-1"]


@pytest.mark.parametrize("damage", ["flipped bit", "cut short", "too long"])
@pytest.mark.parametrize("name", ["model.safetensors", "manifest.json"])
async def test_only_verified_bytes_are_adopted(relay: FakeRelay, tmp_path: Path, name: str, damage: str) -> None:
    ready, files = relay.add(V1), relay.content["1-1"]
    good = files[name]
    files[name] = {
        "flipped bit": good[:-2] + bytes([good[-2] ^ 1]) + good[-1:],
        "cut short": good[:-1],
        "too long": good + b"\n",
    }[damage]
    with pytest.raises(ChecksumMismatch):
        await WeightsFetcher(tmp_path).fetch(ready)
    assert leftovers(tmp_path) == []
    files[name] = good
    await WeightsFetcher(tmp_path).fetch(ready)
    assert leftovers(tmp_path) == ["1-1"]


@pytest.mark.parametrize(
    "changes",
    [
        {"version": V2},
        {"files": (WeightFile.model_construct(name="../../evil.json", size=1, sha256="0" * 64),)},
        {"files": (WeightFile.model_construct(name="manifest.json", size=1, sha256="0" * 64),)},
        {"files": (WeightFile(name="a.json", size=2, sha256="0" * 64),) * 2},
        {"files": (WeightFile(name="a.json", size=1 << 60, sha256="0" * 64),)},
    ],
)
async def test_a_manifest_that_means_something_else_is_refused(
    relay: FakeRelay, tmp_path: Path, changes: dict[str, object]
) -> None:
    with pytest.raises(WeightsError):
        await WeightsFetcher(tmp_path).fetch(relay.add(V1, **changes))
    assert leftovers(tmp_path) == []


async def test_a_manifest_without_end_is_cut_off(relay: FakeRelay, tmp_path: Path) -> None:
    ready = relay.add(V1)
    relay.content["1-1"]["manifest.json"] = b" " * (2 << 20)
    with pytest.raises(WeightsError, match="at most"):
        await WeightsFetcher(tmp_path).fetch(ready)


async def test_each_attempt_asks_the_next_relay(relay: FakeRelay, tmp_path: Path) -> None:
    ready = relay.add(V1).replace(relays=("http://127.0.0.1:9", relay.address))
    fetcher = WeightsFetcher(tmp_path)
    with pytest.raises(WeightsError, match=r"127\.0\.0\.1:9"):
        await fetcher.fetch(ready, 0)
    assert await fetcher.fetch(ready, 1) == tmp_path / "1-1"
    assert await WeightsFetcher(tmp_path / "other", offset=1).fetch(ready, 0) == tmp_path / "other" / "1-1"


@pytest.mark.parametrize("status", [404, 500, 302])
async def test_a_relay_without_the_version_is_named(relay: FakeRelay, tmp_path: Path, status: int) -> None:
    ready = relay.add(V1)
    relay.status = status
    with pytest.raises(WeightsError, match=f"got {status}"):
        await WeightsFetcher(tmp_path).fetch(ready)


async def test_no_relay_at_all_is_an_error(relay: FakeRelay, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"set coordinator\.relays"):
        await WeightsFetcher(tmp_path).fetch(relay.add(V1).replace(relays=()))


async def test_a_silent_relay_is_given_up(tmp_path: Path) -> None:
    left = asyncio.Event()

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()
        await writer.wait_closed()
        left.set()

    server = await asyncio.start_server(say_nothing, "127.0.0.1", 0)
    address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    with pytest.raises(WeightsError):
        await WeightsFetcher(tmp_path, timeout_s=0.1).fetch(FakeRelay().add(V1).replace(relays=(address,)))
    await asyncio.wait_for(left.wait(), 5)
    server.close()
    await server.wait_closed()


@pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
async def test_nothing_is_fetched_twice(relay: FakeRelay, tmp_path: Path, share: float) -> None:
    """The first relay dies on the way; the second one is asked for the rest.

    What the client had received and not yet looked at is lost with the connection; as much as socket buffers hold.
    """
    async with running_relay() as other:
        ready = relay.add(V1, 40 << 20)
        other.content = relay.content
        ready = ready.replace(relays=(relay.address, other.address))
        size = sum(map(len, relay.content["1-1"].values()))
        relay.breaks_at = int(share * len(relay.content["1-1"]["model.safetensors"]))
        fetcher = WeightsFetcher(tmp_path)
        with pytest.raises(WeightsError):
            await fetcher.fetch(ready, 0)
        directory = await fetcher.fetch(ready, 1)
        assert {path.name: path.read_bytes() for path in directory.iterdir()} == relay.content["1-1"]
        assert relay.sent + other.sent <= 1.1 * size
        assert leftovers(tmp_path) == ["1-1"]


async def test_a_relay_that_knows_no_ranges_is_read_from_the_start(relay: FakeRelay, tmp_path: Path) -> None:
    ready, relay.breaks_at, relay.ranged = relay.add(V1), 1 << 20, False
    with pytest.raises(WeightsError):
        await WeightsFetcher(tmp_path).fetch(ready)
    directory = await WeightsFetcher(tmp_path).fetch(ready)
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == relay.content["1-1"]


async def test_a_first_half_that_was_corrupt_is_thrown_away(relay: FakeRelay, tmp_path: Path) -> None:
    ready, good = relay.add(V1), relay.content["1-1"]["model.safetensors"]
    relay.content["1-1"]["model.safetensors"] = bytes([good[0] ^ 1]) + good[1:]
    relay.breaks_at = len(good) // 2
    fetcher = WeightsFetcher(tmp_path)
    with pytest.raises(WeightsError):
        await fetcher.fetch(ready)
    relay.content["1-1"]["model.safetensors"] = good
    with pytest.raises(ChecksumMismatch):
        await fetcher.fetch(ready)
    directory = await fetcher.fetch(ready)
    assert (directory / "model.safetensors").read_bytes() == good


async def test_a_checksum_mismatch_is_mended_by_another_relay(relay: FakeRelay, tmp_path: Path) -> None:
    async with running_relay() as other:
        ready = relay.add(V1).replace(relays=(relay.address, other.address))
        other.content = {"1-1": dict(relay.content["1-1"])}
        good = relay.content["1-1"]["model.safetensors"]
        relay.content["1-1"]["model.safetensors"] = good[:-1] + bytes([good[-1] ^ 1])
        fetcher = WeightsFetcher(tmp_path)
        with pytest.raises(ChecksumMismatch):
            await fetcher.fetch(ready, 0)
        assert await fetcher.fetch(ready, 1) == tmp_path / "1-1"
        assert other.requests == ["1-1/manifest.json", "1-1/model.safetensors", "1-1/config.json"]


async def test_a_version_already_here_is_verified_and_not_fetched_again(relay: FakeRelay, tmp_path: Path) -> None:
    ready, fetcher = relay.add(V1), WeightsFetcher(tmp_path)
    await fetcher.fetch(ready)
    asked = len(relay.requests)
    await fetcher.fetch(ready)
    assert len(relay.requests) == asked
    (tmp_path / "1-1" / "config.json").write_bytes(b"[]")
    await fetcher.fetch(ready)
    assert (tmp_path / "1-1" / "config.json").read_bytes() == b"{}"


async def test_only_the_versions_named_are_kept(relay: FakeRelay, tmp_path: Path) -> None:
    fetcher = WeightsFetcher(tmp_path)
    for version in (V1, V2, V3):
        await fetcher.fetch(relay.add(version))
    (tmp_path / ".incoming-left").mkdir()
    (tmp_path / "not-ours").mkdir()
    fetcher.keep_only({V2, V3})
    assert leftovers(tmp_path) == ["1-2", "2-0", "not-ours"]
