"""Workers of one host and the real store and relay: a version is fetched once, as deltas where they lead to it."""

import asyncio
import fcntl
import hashlib
import json
import os
import shutil
import zlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from aiohttp import web
from aiohttp.test_utils import TestServer

from streamrl.schemas.control import AnnouncedWeights, ArmWeights, WeightsReady
from streamrl.schemas.errors import WeightsError
from streamrl.schemas.files import sha256_of
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.weights import DIRECTORY, MANIFEST, WEIGHTS
from streamrl.weights import cache as weight_cache
from streamrl.weights.export import DELTA, WeightExporter
from streamrl.weights.fetch import WeightsFetcher
from streamrl.weights.relay.server import Relay
from streamrl.weights.settings import RelaySettings
from streamrl.weights.store import WeightStore

SIZE = 200_000


@dataclass
class Published:
    """A store that a trainer writes to, behind a relay that notes what it is asked for.

    ``directory``: what it says when it is asked where a version lies; None: nothing, as a relay of another host; empty:
    the truth.
    """

    root: Path
    store: WeightExporter
    address: str = ""
    asked: list[str] = field(default_factory=list)
    directory: str | None = None
    of_arms: dict[str, torch.Tensor] = field(default_factory=dict)
    weights: torch.Tensor = field(default_factory=lambda: torch.linspace(-0.1, 0.1, SIZE))

    def step(self, number: int, lineage: int = 1) -> WeightsReady:
        """An optimizer step on float32 weights, and their announcement in bfloat16."""
        chance = torch.Generator().manual_seed(number)
        self.weights = self.weights + 1e-6 * torch.randn(SIZE, generator=chance)
        version = PolicyVersion(lineage, number)
        sha256 = self.store.export({"w": self.weights.bfloat16()}, {"config.json": "{}"}, version, number, 0.0)
        return WeightsReady(
            sequence=number, sent_at=0.0, version=version, step=number, manifest_sha256=sha256, relays=(self.address,)
        )

    def step_of_arm(self, arm: str, number: int) -> ArmWeights:
        """The same of an arm of a split, whose weights have nothing to do with the served policy's."""
        chance = torch.Generator().manual_seed(zlib.crc32(arm.encode()) + number)
        before = self.of_arms.get(arm, torch.linspace(0.1, -0.2, SIZE).roll(len(arm)))
        weights = self.of_arms[arm] = before + 1e-6 * torch.randn(SIZE, generator=chance)
        version, store = PolicyVersion(1, number), WeightExporter(self.root_of(arm), 4, "delta")
        sha256 = store.export({"w": weights.bfloat16()}, {"config.json": "{}"}, version, number, 0.0)
        about: dict[str, Any] = {"sequence": number, "sent_at": 0.0, "version": version, "step": number}
        return ArmWeights(**about, manifest_sha256=sha256, relays=(self.address,), policy=arm)

    def root_of(self, arm: str) -> Path:
        return self.root.parent / "instances" / arm / "weights" if arm else self.root

    def whole(self, ready: AnnouncedWeights) -> bytes:
        return (self.root_of(ready.series) / str(ready.version) / WEIGHTS).read_bytes()

    def fetched(self, name: str) -> list[str]:
        return [path for path in self.asked if path.endswith(name)]


@pytest.fixture
async def published(tmp_path: Path) -> AsyncIterator[Published]:
    root = tmp_path / "store"
    found = Published(root, WeightExporter(root, 4, "delta"))

    @web.middleware
    async def note(request: web.Request, handler: Any) -> web.StreamResponse:
        if request.path.endswith(f"/{DIRECTORY}") and found.directory != "":
            if found.directory is None:
                return web.Response(status=404)
            return web.Response(text=found.directory)
        found.asked.append(request.path.removeprefix("/weights/"))
        answer: web.StreamResponse = await handler(request)
        return answer

    def store_of_arm(arm: str) -> WeightStore:
        return WeightStore(found.root_of(arm))

    app = Relay(WeightStore(root), RelaySettings(port=1), store_of_series=store_of_arm).application()
    app.middlewares.append(note)
    async with TestServer(app) as server:
        found.address = str(server.make_url("")).rstrip("/")
        yield found


def fetcher(tmp_path: Path, timeout_s: float = 5.0) -> WeightsFetcher:
    """Of a worker; all of them share the host's cache."""
    return WeightsFetcher(tmp_path / "host", timeout_s=timeout_s)


async def test_local_files_are_linked(published: Published, tmp_path: Path) -> None:
    published.directory = ""
    for number in (0, 1):  # also where a delta leads to it
        ready = published.step(number)
        source = published.root / f"1-{number}" / WEIGHTS
        whole = published.whole(ready)
        directory = await fetcher(tmp_path).fetch(ready)
        assert os.path.samestat(source.stat(), (directory / WEIGHTS).stat())
        assert sorted(path.name for path in directory.iterdir()) == [".lock", "config.json", MANIFEST, WEIGHTS]
        assert published.asked[-2:] == [f"1-{number}/{MANIFEST}", f"1-{number}/{DIRECTORY}"]
        shutil.rmtree(source.parent)
        assert (directory / WEIGHTS).read_bytes() == whole
        # Its checksums stand as verified though the other name is gone: at worst, they are computed once more.
        assert await fetcher(tmp_path).fetch(ready) == directory
    assert len(published.asked) == 4


async def test_local_files_of_an_arm_are_linked(published: Published, tmp_path: Path) -> None:
    published.directory = ""
    ready = published.step_of_arm("rloo", 0)
    directory = await fetcher(tmp_path).fetch(ready)
    assert os.path.samestat((published.root_of("rloo") / "1-0" / WEIGHTS).stat(), (directory / WEIGHTS).stat())


@pytest.mark.parametrize("reason", ["another file system", "other content", "half", "not there", "a link", "nonsense"])
async def test_weights_that_cannot_be_linked_are_fetched(published: Published, tmp_path: Path, reason: str) -> None:
    ready = published.step(0)
    whole, other, cache = published.whole(ready), tmp_path / "other", tmp_path / "host"
    other.mkdir()
    published.directory = json.dumps({DIRECTORY: str(other)})
    match reason:
        case "another file system":
            published.directory = ""
            cache = Path(mkdtemp(prefix="streamrl-test-", dir="/dev/shm"))
            assert cache.stat().st_dev != published.root.stat().st_dev
        case "other content":
            (other / WEIGHTS).write_bytes(bytes(len(whole)))
        case "half":
            (other / WEIGHTS).write_bytes(whole[:-100])
        case "a link":
            (other / WEIGHTS).symlink_to(published.root / "1-0" / WEIGHTS)
        case "nonsense":
            published.directory = '[{"directory": 3'
    before = {path: path.read_bytes() for path in other.iterdir()}
    try:
        fetched = await WeightsFetcher(cache).fetch(ready) / WEIGHTS
        assert (fetched.read_bytes(), fetched.is_symlink()) == (whole, False)
    finally:
        shutil.rmtree(cache)
    assert published.fetched(WEIGHTS) == ["1-0/model.safetensors"]
    assert {path: path.read_bytes() for path in other.iterdir()} == before


async def test_another_run_of_the_same_name_removes_all_unused_weights(published: Published, tmp_path: Path) -> None:
    old, arms = fetcher(tmp_path), fetcher(tmp_path)
    old.set_run_id("one")
    lasting = await old.fetch(published.step(500))
    await arms.fetch(published.step_of_arm("rloo", 500))
    arms.keep_only({PolicyVersion(1, 500)}, "another")  # it is dealt elsewhere
    new = fetcher(tmp_path)
    new.set_run_id("two")
    ready = published.step(1)
    assert await new.fetch(ready) == tmp_path / "host" / "1-1"
    assert lasting.exists(), "a process of the old run has it mapped"
    assert not list((tmp_path / "host" / "arms" / "rloo").glob("*"))
    for worker in (old, new):  # which was made of it by a delta
        worker.keep_only({PolicyVersion(1, 1)})
    another = fetcher(tmp_path)
    another.set_run_id("two")
    assert await another.fetch(ready) == tmp_path / "host" / "1-1"
    assert len(published.fetched(f"1-1/{MANIFEST}")) == 1
    three = fetcher(tmp_path)
    three.set_run_id("three")
    await three.fetch(published.step(2))
    assert {path.name for path in (tmp_path / "host").glob("1-*")} == {"1-1", "1-2"}


async def test_a_version_is_made_of_the_one_before_and_a_delta(published: Published, tmp_path: Path) -> None:
    worker = fetcher(tmp_path)
    await worker.fetch(published.step(0))
    ready = published.step(1)
    directory = await worker.fetch(ready)
    assert (directory / WEIGHTS).read_bytes() == published.whole(ready)
    assert published.fetched(WEIGHTS) == ["1-0/model.safetensors"]
    assert published.fetched(DELTA) == ["1-1/model.delta"]
    assert sorted(path.name for path in directory.iterdir()) == [".lock", "config.json", MANIFEST, WEIGHTS]
    delta = (published.root / "1-1" / DELTA).stat().st_size
    assert delta < 0.1 * len(published.whole(ready))


async def test_versions_between_are_bridged_by_their_deltas(published: Published, tmp_path: Path) -> None:
    worker = fetcher(tmp_path)
    await worker.fetch(published.step(0))
    *_, ready = [published.step(number) for number in (1, 2, 3)]
    directory = await worker.fetch(ready)
    assert (directory / WEIGHTS).read_bytes() == published.whole(ready)
    assert published.fetched(DELTA) == ["1-1/model.delta", "1-2/model.delta", "1-3/model.delta"]
    assert published.fetched(WEIGHTS) == ["1-0/model.safetensors"]


async def test_deltas_of_two_arms_of_the_same_numbers_are_each_applied_to_its_own_base(
    published: Published, tmp_path: Path
) -> None:
    """One worker after the other is dealt to an arm, to another, and back; all share the host's cache."""
    for number in range(4):
        of = {
            "": published.step(number),
            **{arm: published.step_of_arm(arm, number) for arm in ("rloo", "long")},
        }
        assert len({published.whole(ready) for ready in of.values()}) == 3
        one, other = fetcher(tmp_path), fetcher(tmp_path)
        for worker, arms in ((one, ("rloo", "long", "", "rloo")), (other, ("", "rloo", "long"))):
            for arm in arms:
                directory = await worker.fetch(of[arm])
                assert (directory / WEIGHTS).read_bytes() == published.whole(of[arm])
                worker.keep_only({of[arm].version}, arm)
    each = ("", "/arms/long/weights/", "/arms/rloo/weights/")
    # The first versions are fetched whole, and of all later ones the difference, each once.
    assert sorted(published.fetched(WEIGHTS)) == sorted(f"{where}1-0/{WEIGHTS}" for where in each)
    wanted = sorted(f"{where}1-{number}/{DELTA}" for where in each for number in (1, 2, 3))
    assert sorted(published.fetched(DELTA)) == wanted


async def test_a_base_that_is_another_arm_s_is_none(published: Published, tmp_path: Path) -> None:
    """Whatever lies in the place of an arm's version, as after an instance was deleted and its name given again."""
    worker = fetcher(tmp_path)
    await worker.fetch(published.step_of_arm("long", 0))
    published.step_of_arm("rloo", 0)
    shutil.copytree(tmp_path / "host" / "arms" / "long" / "1-0", tmp_path / "host" / "arms" / "rloo" / "1-0")
    ready = published.step_of_arm("rloo", 1)
    directory = await fetcher(tmp_path).fetch(ready)
    assert (directory / WEIGHTS).read_bytes() == published.whole(ready)
    assert f"/arms/rloo/weights/1-1/{WEIGHTS}" in published.asked


@pytest.mark.parametrize("lost", ["no base", "damaged base", "another base", "delta gone", "delta damaged", "too old"])
async def test_without_base_or_delta_the_whole_file_is_fetched(published: Published, tmp_path: Path, lost: str) -> None:
    worker = fetcher(tmp_path)
    first = published.step(0)
    if lost != "no base":
        base = await worker.fetch(first)
        worker = fetcher(tmp_path)  # a new process, which trusts nothing
        data = (base / WEIGHTS).read_bytes()
        if lost == "damaged base":
            (base / WEIGHTS).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        if lost == "another base":
            (base / MANIFEST).write_bytes((base / MANIFEST).read_bytes() + b" ")
    ready = published.step(1)
    delta = published.root / "1-1" / DELTA
    if lost == "delta gone":
        delta.unlink()
    if lost == "delta damaged":
        delta.write_bytes(delta.read_bytes()[:-1] + b"?")
    if lost == "too old":  # of the versions between none is kept
        *_, ready = [published.step(number) for number in range(2, 8)]
    directory = await worker.fetch(ready)
    assert (directory / WEIGHTS).read_bytes() == published.whole(ready)
    assert f"{ready.version}/{WEIGHTS}" in published.asked


async def test_a_version_in_the_cache_is_whole_or_thrown_away(published: Published, tmp_path: Path) -> None:
    """A base that changes behind the cache's back, in the middle of the fetch."""
    worker = fetcher(tmp_path)
    base = await worker.fetch(published.step(0))
    ready = published.step(1)
    changed = worker._versions_of("")
    changed.find = lambda version, manifest_sha256: base if str(version) == "1-0" else None  # type: ignore[method-assign]
    data = (base / WEIGHTS).read_bytes()
    (base / WEIGHTS).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    directory = await worker.fetch(ready)
    assert (directory / WEIGHTS).read_bytes() == published.whole(ready)
    assert published.fetched(WEIGHTS) == ["1-0/model.safetensors", "1-1/model.safetensors"]


async def test_the_workers_of_a_host_fetch_a_version_once_and_hash_it_once(
    published: Published, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed = list[str]()
    plain = sha256_of

    def noted(path: Path) -> str:
        hashed.append(path.name)
        return plain(path)

    monkeypatch.setattr(weight_cache, "sha256_of", noted)
    ready = published.step(0)
    workers = [fetcher(tmp_path) for _ in range(3)]
    directories = await asyncio.gather(*(worker.fetch(ready) for worker in workers))
    assert set(directories) == {tmp_path / "host" / "1-0"}
    assert published.fetched(WEIGHTS) == ["1-0/model.safetensors"]
    assert hashed == [], "what one has verified on its way in, nobody hashes again"
    path = directories[0] / "config.json"
    os.utime(path)
    await fetcher(tmp_path).fetch(ready)
    assert len(hashed) == 2, "a file that was touched is not taken on trust"


@pytest.mark.parametrize("ends", ["before its files are listed", "before they are measured"])
def test_a_fetch_may_end_while_a_peer_asks_for_its_size(
    ends: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    version, cache = PolicyVersion(1, 0), weight_cache.WeightCache(tmp_path)
    with cache.incoming(version, "0" * 64) as incoming:
        assert incoming is not None
        (incoming.directory / WEIGHTS).write_bytes(b"1000")
        assert cache.size_of_incoming(version) == 4

        def ending(call: Callable[..., Any]) -> Callable[..., Any]:
            def call_then(path: Any, *arguments: Any, **options: Any) -> Any:
                if Path(path) == incoming.directory and ends == "before its files are listed":
                    incoming.directory.rename(tmp_path / "1-0")
                found = call(path, *arguments, **options)
                if Path(path) == incoming.directory and ends == "before they are measured":
                    incoming.directory.rename(tmp_path / "1-0")
                return found

            return call_then

        for name in ("listdir", "scandir"):  # of which Python's versions use one or the other
            monkeypatch.setattr(os, name, ending(getattr(os, name)))
        assert cache.size_of_incoming(version) == 0
        assert (tmp_path / "1-0" / WEIGHTS).exists()


async def test_another_goes_on_where_a_worker_died(published: Published, tmp_path: Path) -> None:
    ready = published.step(0)
    dead = fetcher(tmp_path)
    with dead._versions_of("").incoming(ready.version, ready.manifest_sha256) as incoming:
        assert incoming is not None
        (incoming.directory / WEIGHTS).write_bytes(published.whole(ready)[:1000])
        waiting = asyncio.create_task(fetcher(tmp_path).fetch(ready))
        await asyncio.sleep(0.2)
        assert published.asked == [], "while it lives, nobody fetches beside it"
    directory = await waiting
    assert (directory / WEIGHTS).read_bytes() == published.whole(ready)
    assert [path.name for path in (tmp_path / "host").iterdir()] == ["1-0"]


async def test_a_stalled_worker_is_not_waited_for(published: Published, tmp_path: Path) -> None:
    ready = published.step(0)
    still = fetcher(tmp_path)
    with still._versions_of("").incoming(ready.version, ready.manifest_sha256) as incoming:
        assert incoming is not None
        (incoming.directory / WEIGHTS).write_bytes(published.whole(ready)[:1000])
        directory = await fetcher(tmp_path, timeout_s=0.1).fetch(ready)
        assert (directory / WEIGHTS).read_bytes() == published.whole(ready)
        # It wakes up, and finds that there is nothing left to do.
        found = await still._download(ready, published.address, incoming)
        assert (found, hashlib.sha256((found / WEIGHTS).read_bytes()).hexdigest()) == (
            directory,
            hashlib.sha256(published.whole(ready)).hexdigest(),
        )


async def test_versions_in_use_are_not_deleted(published: Published, tmp_path: Path) -> None:
    slow, quick = fetcher(tmp_path), fetcher(tmp_path)
    versions = [published.step(number) for number in range(3)]
    await slow.fetch(versions[0])
    for ready in versions:
        await quick.fetch(ready)
        quick.keep_only({ready.version})
    here = tmp_path / "host"
    assert sorted(path.name for path in here.iterdir()) == ["1-0", "1-2"]
    slow.keep_only({versions[0].version})
    assert (here / "1-2").is_dir(), "newer ones are for whoever comes next"
    await slow.fetch(versions[2])
    slow.keep_only({versions[2].version})
    assert sorted(path.name for path in here.iterdir()) == ["1-2"]


async def test_a_disk_that_cannot_lock_says_what_to_do(
    published: Published, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, how: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(WeightsError, match=r"not supported; set generation\.weights_cache"):
        await fetcher(tmp_path).fetch(published.step(0))
