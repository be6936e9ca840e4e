import asyncio
import fcntl
import operator
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from streamrl.producers.generation.status import WorkerStatus
from streamrl.schemas.control import AnnouncedWeights, ArmWeights, WeightsReady
from streamrl.schemas.errors import ChecksumMismatch, WeightsError
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.weights import WeightFile
from streamrl.weights.adopt import FIRST_TRIES, WeightsAdopter
from streamrl.weights.fetch import WeightsFetcher
from tests.fakes.engine import FakeEngine
from tests.fakes.waiting import until
from tests.producers.generation.factories import FakeRelay, running_relay
from tests.progress import within


@dataclass
class RecordedStatus(WorkerStatus):
    """``said``: each version that it was told waits, None for none."""

    said: list[PolicyVersion | None] = field(default_factory=list)

    def await_idle(self, version: PolicyVersion | None) -> None:
        self.said.append(version)
        super().await_idle(version)


@asynccontextmanager
async def adopting(engine: FakeEngine, cache: Path) -> AsyncIterator[WeightsAdopter]:
    adopter = WeightsAdopter(engine, WeightsFetcher(cache), WorkerStatus(), asyncio.Event().wait)
    task = asyncio.create_task(adopter.adopt_loop())
    try:
        yield adopter
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def test_latest_version_wins(tmp_path: Path) -> None:
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


async def until_held(adopter: WeightsAdopter, number: int) -> None:
    await until(lambda: adopter.held == (1, number))


async def test_the_last_two_versions_are_kept_on_disk(tmp_path: Path) -> None:
    async with running_relay() as relay, adopting(FakeEngine(), tmp_path) as adopter:
        for number in range(4):
            adopter.offer(relay.add(PolicyVersion(1, number)))
            await until_held(adopter, number)
        await until(lambda: sorted(path.name for path in tmp_path.iterdir()) == ["1-2", "1-3"])


async def test_a_worker_that_has_ended_holds_no_version(tmp_path: Path) -> None:
    async with running_relay() as relay, adopting(FakeEngine(), tmp_path) as adopter:
        adopter.offer(relay.add(PolicyVersion(1, 0)))
        await until(lambda: adopter.held == (1, 0))
    with (tmp_path / "1-0" / ".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


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


ANY = WeightsReady(sequence=0, sent_at=0.0, version=PolicyVersion(1, 0), step=0, manifest_sha256="0" * 64, relays=())


class Shelf(WeightsFetcher):
    """Has every version at once, or a failing relay; and while one is fetched the next one is announced."""

    def __init__(self, cache: Path, newest: int) -> None:
        super().__init__(cache)
        self.newest, self.is_down, self.fetched, self.kept = newest, False, list[int](), set[PolicyVersion]()
        self.adopter: WeightsAdopter | None = None

    async def fetch(self, ready: AnnouncedWeights, attempt: int = 0) -> Path:
        await asyncio.sleep(0.002)
        if self.is_down:
            raise WeightsError("a relay that is down")
        self.fetched.append(number := ready.version.number)
        assert self.adopter is not None
        if number < self.newest:
            self.adopter.offer(ready.replace(version=PolicyVersion(1, number + 1)))
        return self.cache

    def keep_only(self, versions: Iterable[PolicyVersion], arm: str = "") -> None:
        self.kept = set(versions)


async def test_no_completion_mixes_two_policies(tmp_path: Path) -> None:
    """Weights of another policy are taken once nothing runs, whatever their number; those of its own at once."""
    idle, status, shelf = asyncio.Event(), RecordedStatus(), Shelf(tmp_path, 0)
    engine = FakeEngine()
    shelf.adopter = adopter = WeightsAdopter(engine, shelf, status, idle.wait)
    of_arm = ArmWeights(**ANY.model_dump(exclude={"kind", "promotion", "version"}), policy="rloo", version=(1, 3))
    task = asyncio.create_task(adopter.adopt_loop())
    for number in (7, 8):
        adopter.offer(ANY.replace(version=PolicyVersion(1, number)))
        await until_held(adopter, number)
    adopter.offer(of_arm)
    await until(lambda: status.said[-1:] == [(1, 3)])
    assert (adopter.held, adopter.series, status.has_arm_weights) == ((1, 8), "", True)
    # It is for the served policy after all: nothing is waited for.
    adopter.offer(ANY.replace(version=PolicyVersion(1, 9)))
    await until(lambda: adopter.held == (1, 9))
    assert (adopter.series, status.has_arm_weights, status.said[-1]) == ("", False, None)
    adopter.offer(of_arm)
    idle.set()
    await until(lambda: adopter.series == "rloo")
    adopter.offer(of_arm.replace(version=PolicyVersion(1, 2)))
    adopter.offer(of_arm.replace(version=PolicyVersion(1, 4)))
    await until(lambda: adopter.held == (1, 4))
    task.cancel()
    assert [version for version, _ in engine.adopted] == [(1, 7), (1, 8), (1, 9), (1, 3), (1, 4)]


@asynccontextmanager
async def from_shelf(
    cache: Path, newest: int, idle: asyncio.Event, engine: FakeEngine | None = None
) -> AsyncIterator[tuple[Shelf, WeightsAdopter, list[PolicyVersion | None]]]:
    """A shelf, what adopts from it once ``idle`` is set, and what that said it waits with."""
    shelf, status = Shelf(cache, newest), RecordedStatus()
    adopter = WeightsAdopter(engine or FakeEngine(), shelf, status, idle.wait, only_idle=True)
    shelf.adopter = adopter
    task = asyncio.create_task(adopter.adopt_loop())
    try:
        yield shelf, adopter, status.said
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@pytest.mark.parametrize(("newest", "first"), [(2, 2), (1 << 30, FIRST_TRIES)])
async def test_a_worker_begins_with_the_weights_that_are_current_when_it_has_them(
    tmp_path: Path, newest: int, first: int
) -> None:
    engine = FakeEngine()
    async with from_shelf(tmp_path, newest, asyncio.Event(), engine) as (shelf, adopter, _):
        adopter.offer(ANY.replace(version=PolicyVersion(1, 0)))
        await until(lambda: adopter.held is not None)
        assert [version.number for version, _ in engine.adopted] == [first]
        assert shelf.fetched[: first + 1] == list(range(first + 1))


async def test_newer_versions_do_not_delay_a_fetched_one(
    tmp_path: Path,
) -> None:
    idle, engine = asyncio.Event(), FakeEngine()
    async with from_shelf(tmp_path, 0, idle, engine) as (shelf, adopter, said):
        adopter.offer(ANY.replace(version=PolicyVersion(1, 0)))
        await until(lambda: adopter.held == (1, 0))
        shelf.newest = 1 << 30
        adopter.offer(ANY.replace(version=PolicyVersion(1, 1)))
        await until(lambda: len(shelf.fetched) >= 10)
        seen = shelf.fetched[-1]
        assert engine.version == (1, 0)
        assert said[-1] in {(1, seen - 1), (1, seen)}  # told once what passed by is off the disk
        assert len(shelf.kept) == 2  # the one in use, and one of those that passed by
        assert (1, 0) in shelf.kept
        idle.set()
        await until(lambda: adopter.held is not None and adopter.held.number >= seen)
        # What was here when the engine was idle, or was under way by then.
        assert engine.adopted[1][0].number <= seen + 1
        shelf.newest = 0
        await until(lambda: said[-1] is None)


async def test_a_relay_that_is_down_keeps_no_idle_engine_from_the_version_that_is_here(tmp_path: Path) -> None:
    idle = asyncio.Event()
    async with from_shelf(tmp_path, 0, idle) as (shelf, adopter, said):
        adopter.offer(ANY.replace(version=PolicyVersion(1, 0)))
        await until(lambda: adopter.held == (1, 0))
        adopter.offer(ANY.replace(version=PolicyVersion(1, 1)))
        await until(lambda: said == [None, (1, 1)])
        shelf.is_down = True
        adopter.offer(ANY.replace(version=PolicyVersion(1, 2)))
        await asyncio.sleep(0.01)
        idle.set()
        await until(lambda: adopter.held == (1, 1))
        shelf.is_down = False
        await until(lambda: adopter.held == (1, 2))  # and what was announced is asked for until it is there


async def test_weights_that_are_refused_are_not_waited_for_any_more(tmp_path: Path) -> None:
    idle, engine = asyncio.Event(), FakeEngine(refuse={PolicyVersion(1, 1)})
    async with from_shelf(tmp_path, 0, idle, engine) as (_, adopter, said):
        adopter.offer(ANY.replace(version=PolicyVersion(1, 0)))
        await until(lambda: adopter.held == (1, 0))
        adopter.offer(ANY.replace(version=PolicyVersion(1, 1)))
        await until(lambda: said[-1] == (1, 1))
        idle.set()
        await until(lambda: said[-1] is None)
        assert (adopter.held, adopter.completions_may_start.is_set()) == ((1, 0), True)


async def test_weights_that_the_engine_refuses_leave_the_old_ones_in_service(tmp_path: Path) -> None:
    engine = FakeEngine(refuse={PolicyVersion(1, 1)})
    async with running_relay() as relay, adopting(engine, tmp_path) as adopter:
        adopter.offer(relay.add(PolicyVersion(1, 0)))
        await until(lambda: adopter.held == (1, 0))  # what is announced before, it would begin with
        for number in (1, 2):
            adopter.offer(relay.add(PolicyVersion(1, number)))
            await until(partial(operator.contains, relay.requests, f"1-{number}/config.json"))
        await until(lambda: adopter.held == (1, 2))
    assert [version for version, _ in engine.adopted] == [(1, 0), (1, 2)]


async def test_first_weights_that_do_not_fit_end_the_worker(tmp_path: Path) -> None:
    engine = FakeEngine(refuse={PolicyVersion(1, 0)})
    adopter = WeightsAdopter(engine, WeightsFetcher(tmp_path), WorkerStatus(), asyncio.Event().wait)
    async with running_relay() as relay:
        adopter.offer(relay.add(PolicyVersion(1, 0)))
        with pytest.raises(WeightsError):
            await within(adopter.adopt_loop(), 5)


V1, V2, V3 = PolicyVersion(1, 1), PolicyVersion(1, 2), PolicyVersion(2, 0)


@pytest.fixture
async def relay() -> AsyncIterator[FakeRelay]:
    async with running_relay() as relay:
        yield relay


def contents(directory: Path) -> dict[str, bytes]:
    """The version's own files; beside them is the lock."""
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.name != ".lock"}


def leftovers(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir())


async def test_a_version_arrives_byte_for_byte(relay: FakeRelay, tmp_path: Path) -> None:
    directory = await WeightsFetcher(tmp_path).fetch(relay.add(V1))
    assert directory == tmp_path / "1-1"
    assert contents(directory) == relay.content["1-1"]
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
    relay: FakeRelay, tmp_path: Path, changes: dict[str, Any]
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
    await within(left.wait(), 5)
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
        assert contents(directory) == relay.content["1-1"]
        assert relay.sent + other.sent <= 1.1 * size
        assert leftovers(tmp_path) == ["1-1"]


async def test_the_host_s_own_relay_is_asked_first_and_then_the_others(tmp_path: Path) -> None:
    async with running_relay() as relay, running_relay() as own, running_relay() as third:
        ready = relay.add(V1, 1000)
        own.status, third.content = 503, relay.content
        ready = ready.replace(
            relays=(relay.address, own.address, third.address), relay_hosts=("elsewhere", "here", "there")
        )
        fetcher = WeightsFetcher(tmp_path, offset=1, host="here")
        with pytest.raises(WeightsError):
            await fetcher.fetch(ready, 0)
        assert (own.requests, relay.requests, third.requests) == (["1-1/manifest.json"], [], [])
        await fetcher.fetch(ready, 1)
        assert third.requests
        assert not relay.requests


async def test_the_same_version_again_names_other_relays(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with running_relay() as relay, adopting(engine, tmp_path) as adopter:
        ready = relay.add(V1, 1000)
        adopter.offer(ready.replace(relays=()))
        await asyncio.sleep(0.05)
        adopter.offer(ready)
        await until(lambda: adopter.held == V1)
        adopter.offer(ready.replace(relays=("http://another:1",)))
        await asyncio.sleep(0.05)
    assert len(engine.adopted) == 1


async def test_a_relay_that_knows_no_ranges_is_read_from_the_start(relay: FakeRelay, tmp_path: Path) -> None:
    ready, relay.breaks_at, relay.ranged = relay.add(V1), 1 << 20, False
    with pytest.raises(WeightsError):
        await WeightsFetcher(tmp_path).fetch(ready)
    directory = await WeightsFetcher(tmp_path).fetch(ready)
    assert contents(directory) == relay.content["1-1"]


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
