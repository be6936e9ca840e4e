import asyncio
import hashlib
import os
import shutil
import time
import zlib
from collections.abc import AsyncIterator
from contextlib import ExitStack, suppress
from pathlib import Path
from threading import Event
from typing import BinaryIO
from urllib.parse import quote

import pytest
from aiohttp import ClientConnectorError, ClientSession, web
from aiohttp.test_utils import TestServer, make_mocked_request
from hypothesis import given
from hypothesis import strategies as st
from yarl import URL

from streamrl.bus.embedded.node import free_ports
from streamrl.schemas.errors import ChecksumMismatch, UserError
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.weights import WeightFile, WeightManifest
from streamrl.weights.relay import server as relay_server
from streamrl.weights.relay.copies import ArrivingFile, VersionCopy
from streamrl.weights.relay.server import Relay, _answer_directory
from streamrl.weights.settings import RelaySettings
from streamrl.weights.store import WeightStore

CONTENT = os.urandom(100_000)


def fill(root: Path) -> Path:
    version = root / "weights" / "1-3"
    version.mkdir(parents=True)
    (root / "secret.json").write_text("secret")
    (version / "model.safetensors").write_bytes(CONTENT)
    (version / "link.json").symlink_to(root / "secret.json")
    (version / "manifest.json").write_text("{}")
    unfinished = root / "weights" / "1-4"
    unfinished.mkdir()
    (unfinished / "model.safetensors").write_bytes(b"half")
    return root / "weights"


@pytest.fixture
async def address(tmp_path: Path) -> AsyncIterator[URL]:
    server = TestServer(Relay(WeightStore(fill(tmp_path)), RelaySettings()).application())
    await server.start_server()
    yield server.make_url("/")
    await server.close()


async def test_a_file_is_served_whole_and_by_range(address: URL) -> None:
    async with ClientSession() as session:
        async with session.get(address / "weights/1-3/model.safetensors") as response:
            assert response.status == 200
            assert await response.read() == CONTENT
        headers = {"Range": "bytes=99990-"}
        async with session.get(address / "weights/1-3/model.safetensors", headers=headers) as response:
            assert response.status == 206
            assert await response.read() == CONTENT[99990:]


@pytest.mark.parametrize(
    ("asked", "answered"),
    [
        ("bytes=5-8", (206, f"bytes 5-8/{len(CONTENT)}", CONTENT[5:9])),
        ("bytes=-3", (206, f"bytes {len(CONTENT) - 3}-{len(CONTENT) - 1}/{len(CONTENT)}", CONTENT[-3:])),
        (f"bytes={len(CONTENT)}-", (416, f"bytes */{len(CONTENT)}", b"")),
        ("bytes=9-5", (416, f"bytes */{len(CONTENT)}", b"")),
        ("lines=1-2", (416, f"bytes */{len(CONTENT)}", b"")),
    ],
)
async def test_a_range_is_answered_as_http_says(address: URL, asked: str, answered: tuple[int, str, bytes]) -> None:
    url = address / "weights/1-3/model.safetensors"
    async with ClientSession() as session, session.get(url, headers={"Range": asked}) as response:
        body = await response.read() if response.status == 206 else b""
        assert (response.status, response.headers["Content-Range"], body) == answered


async def test_head_tells_the_size_and_sends_no_file(address: URL) -> None:
    async with ClientSession() as session:
        for _ in range(2):  # on one connection: bytes of a body would be taken for the next answer
            async with session.head(address / "weights/1-3/model.safetensors") as response:
                assert (response.status, response.content_length) == (200, len(CONTENT))


async def test_a_file_that_opens_while_its_request_is_cancelled_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_opening, files = Event(), list[BinaryIO]()

    def open_slowly(opened: ExitStack, path: Path) -> BinaryIO:
        is_opening.set()
        time.sleep(0.2)
        files.append(opened.enter_context(path.open("rb")))
        return files[0]

    monkeypatch.setattr(relay_server, "_open_into", open_slowly)
    app = Relay(WeightStore(fill(tmp_path)), RelaySettings()).application()
    async with TestServer(app, handler_cancellation=True) as server:
        async with ClientSession() as session:
            asked = asyncio.create_task(session.get(server.make_url("/weights/1-3/model.safetensors")))
            assert await asyncio.to_thread(is_opening.wait, 10)
            asked.cancel()
        for _ in range(100):
            if files and files[0].closed:
                break
            await asyncio.sleep(0.05)
    assert files[0].closed


async def test_weights_of_an_arm_are_served_next_to_those_of_the_served_policy(tmp_path: Path) -> None:
    weights = fill(tmp_path)

    def store_of(arm: str) -> WeightStore:
        return WeightStore(weights if arm == "rloo" else tmp_path / arm)

    relay = Relay(WeightStore(tmp_path / "none"), RelaySettings(), store_of_series=store_of)
    async with TestServer(relay.application()) as server, ClientSession() as session:
        for path, status in (
            ("arms/rloo/weights/1-3/model.safetensors", 200),
            ("arms/rloo/weights/1-2/model.safetensors", 410),
            ("arms/long/weights/1-3/model.safetensors", 404),
            ("arms/..%2Fweights/weights/1-3/model.safetensors", 404),
            ("weights/1-3/model.safetensors", 404),
        ):
            async with session.get(URL(str(server.make_url("/")) + path, encoded=True)) as response:
                assert (path, response.status) == (path, status)


def test_a_file_that_is_damaged_as_a_whole_starts_again(tmp_path: Path) -> None:
    content, wrong = os.urandom(10), os.urandom(10)
    file = WeightFile(name="a.json", size=10, sha256=hashlib.sha256(content).hexdigest())
    arriving = ArrivingFile(file, tmp_path / file.name)
    arriving.resume()
    arriving.arrived(arriving.append(memoryview(wrong), "there"))
    with pytest.raises(ChecksumMismatch, match=r"expected sha256 .* of a\.json at there"):
        arriving.finish("there")
    assert (arriving.have, arriving.is_whole, arriving.next_chunk()) == (0, False, 10)
    arriving.arrived(arriving.append(memoryview(content), "there"))
    arriving.finish("there")
    assert arriving.is_whole
    assert arriving.path.read_bytes() == content


def test_after_a_crash_only_the_good_chunks_before_the_first_damaged_one_are_kept(tmp_path: Path) -> None:
    content = os.urandom(10)
    chunks = [content[at : at + 4] for at in range(0, 10, 4)]
    file = WeightFile(
        name="a.json",
        size=10,
        sha256=hashlib.sha256(content).hexdigest(),
        chunk_bytes=4,
        chunk_crc32="".join(f"{zlib.crc32(chunk):08x}" for chunk in chunks),
    )
    arriving = ArrivingFile(file, tmp_path / file.name)
    arriving.path.write_bytes(content[:4] + b"...." + content[8:])
    arriving.resume()
    assert (arriving.have, arriving.path.read_bytes()) == (4, content[:4])
    for chunk in chunks[1:]:
        arriving.arrived(arriving.append(memoryview(chunk), "there"))
    arriving.finish("there")
    assert arriving.path.read_bytes() == content


async def test_only_complete_versions_are_served(address: URL) -> None:
    async with ClientSession() as session:
        async with session.get(address / "weights") as response:
            assert await response.json() == {"versions": ["1-3"]}
        async with session.get(address / "weights/1-4/model.safetensors") as response:
            assert response.status == 404


async def test_a_version_that_was_deleted_is_gone_and_one_that_may_still_come_is_not_found(address: URL) -> None:
    async with ClientSession() as session:
        for version, status in (("1-2", 410), ("1-4", 404), ("2-0", 404), ("nonsense", 404)):
            async with session.get(address / f"weights/{version}/manifest.json") as response:
                assert (version, response.status) == (version, status)


async def test_a_version_that_is_read_stays_though_the_trainer_deletes_it(tmp_path: Path) -> None:
    now = [0.0]
    store = WeightStore(fill(tmp_path), lease_s=60.0, clock=lambda: now[0])
    (store.root / "1-3" / "link.json").unlink()
    newer = store.root / "1-5"
    newer.mkdir()
    (newer / "manifest.json").write_text("{}")
    async with TestServer(Relay(store, RelaySettings()).application()) as server, ClientSession() as session:

        async def asked(name: str) -> tuple[int, bytes]:
            async with session.get(server.make_url(f"/weights/1-3/{name}")) as response:
                return response.status, await response.read()

        assert await asked("manifest.json") == (200, b"{}")
        shutil.rmtree(store.root / "1-3")
        now[0] = 59.0
        store.tidy()
        assert await asked("model.safetensors") == (200, CONTENT)
        now[0] = 118.0
        store.tidy()
        assert (await asked("model.safetensors"))[0] == 200
        now[0] = 179.0
        store.tidy()
        assert (await asked("model.safetensors"))[0] == 410
        assert not any((store.root / ".leases").iterdir())


async def test_a_version_that_is_deleted_between_being_found_and_being_kept_is_gone(tmp_path: Path) -> None:
    store = WeightStore(fill(tmp_path))
    newer = store.root / "1-5"
    newer.mkdir()
    (newer / "manifest.json").write_text("{}")

    def deleted(version: PolicyVersion) -> None:
        shutil.rmtree(store.root / str(version))

    store.keep = deleted  # type: ignore[method-assign]
    async with (
        TestServer(Relay(store, RelaySettings()).application()) as server,
        ClientSession() as session,
        session.get(server.make_url("/weights/1-3/model.safetensors")) as response,
    ):
        assert response.status == 410


async def test_a_stopping_relay_removes_leased_files_unless_another_serves_them(
    tmp_path: Path,
) -> None:
    store, stop, (port,) = WeightStore(fill(tmp_path), lease_s=60.0), asyncio.Event(), free_ports(1)
    (store.root / "1-3" / "link.json").unlink()
    kept = store.root / ".leases" / "1-3" / "model.safetensors"
    serving = asyncio.create_task(Relay(store, RelaySettings(host="127.0.0.1", port=port)).run(stop))
    async with ClientSession() as session:
        for _ in range(200):
            with suppress(ClientConnectorError):
                async with session.get(f"http://127.0.0.1:{port}/weights/1-3/model.safetensors") as response:
                    assert await response.read() == CONTENT
                    break
            await asyncio.sleep(0.05)
    assert kept.is_file()
    second = Relay(WeightStore(store.root, lease_s=60.0), RelaySettings(host="127.0.0.1", port=port))
    with pytest.raises(UserError, match=str(port)):
        await second.run(stop)
    assert kept.is_file()
    stop.set()
    await serving
    assert not kept.parent.parent.exists()
    assert (store.root / "1-3" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    "path", ["1-3/link.json", "1-3/..%2fsecret.json", "1-3/%2e%2e%2f%2e%2e%2fsecret.json", "..%2f1-3/manifest.json"]
)
async def test_nothing_outside_a_version_is_served(address: URL, path: str) -> None:
    async with (
        ClientSession() as session,
        session.get(URL(f"{address}weights/{path}", encoded=True)) as response,
    ):
        assert response.status == 404
        assert "secret" not in (await response.text()).removeprefix("no '").split("'")[-1]


@given(version=st.text(max_size=20), name=st.text(max_size=40))
def test_no_name_reaches_a_file_outside_the_store(
    tmp_path_factory: pytest.TempPathFactory, version: str, name: str
) -> None:
    root = tmp_path_factory.getbasetemp() / "store"
    if not root.exists():
        fill(root)
    found = WeightStore(root / "weights").find(version, name)
    assert found is None or found.resolve().parent == (root / "weights" / "1-3").resolve(), quote(name)


async def test_a_reader_that_leaves_before_the_answer_causes_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(self: web.StreamResponse, data: bytes = b"") -> None:
        raise ConnectionResetError("nobody is there any more")

    monkeypatch.setattr(web.StreamResponse, "write_eof", broken)
    version = PolicyVersion(1, 0)
    manifest = WeightManifest(version=version, step=0, files=(), created_at=0.0)
    copy = VersionCopy(version, manifest, b"{}", tmp_path / "1-0")
    copy.ended.set()
    request = make_mocked_request("GET", "/weights/1-0/directory")
    assert (await _answer_directory(request, copy)).status == 200
