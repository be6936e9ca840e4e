"""Brings weight versions from the relays to a worker's disk. Knows announcements, not where they come from.

Invariants:
- only_verified_bytes_are_adopted: a version's directory appears, by one rename, after every byte was checked against
  the manifest, and the manifest against the announcement;
- local_files_are_linked: a relay's files on the same host are hard-linked, not copied;
- nothing_is_fetched_twice: bytes that a relay delivered before it failed are kept, and the next relay sends the rest;
  of the workers that share a cache, only one fetches a version.
"""

import asyncio
import json
import os
import shutil
import socket
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import structlog

from streamrl.bus.waiting import in_thread
from streamrl.schemas.control import AnnouncedWeights
from streamrl.schemas.errors import ChecksumMismatch, WeightsError
from streamrl.schemas.files import sha256_of
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.weight_deltas import apply_deltas
from streamrl.schemas.weights import (
    BELOW,
    DIRECTORY,
    MANIFEST,
    MAX_MANIFEST_BYTES,
    SERIES,
    WeightDelta,
    WeightFile,
    WeightManifest,
    checked_manifest,
    weights_path,
)
from streamrl.weights.cache import Incoming, WeightCache, is_linkable, link
from streamrl.weights.turns import SENT, SentVersion

log = structlog.get_logger()

READ_BYTES = 1 << 20
CONNECT_TIMEOUT_S = 5.0
SILENCE_S = 30.0
"""Longest time without data from a relay during a fetch: its disk may be busy with another version."""
PEER_PAUSE_S = 0.05
"""Seconds between two looks whether a peer has finished its fetch."""
UNSENT_S = 30.0
"""Seconds for which a worker fetches files after the sender failed, so that a stuck sender delays only one version."""
TO_BE_SENT = ".to-be-sent"
"""Folder of the cache with one directory per version that a sender sends; each names the sender."""
WORTH_IT = 0.5
"""Share of the whole file's size. If the deltas together are larger, the whole file is fetched."""


@dataclass
class WeightsFetcher:
    """Fetches versions into ``cache``, which other workers may share.

    Each version has a directory there. Versions of a series other than the run's own are in a folder with the series'
    name. ``timeout_s`` is a relay's longest silence. The relay of this ``host`` is asked first; ``offset`` spreads the
    workers over the other relays. ``sender``: address of a weight sender, empty for none. A sender puts weights of the
    run's own series straight into the engine, except the first ones after the worker starts.
    """

    cache: Path
    timeout_s: float = SILENCE_S
    offset: int = 0
    host: str = field(default_factory=socket.gethostname)
    sender: str = ""
    _is_begun: bool = False
    _run_id: str = ""
    _files_until: float = 0.0
    _caches: dict[str, WeightCache] = field(default_factory=dict)

    def _versions_of(self, series: str) -> WeightCache:
        if (found := self._caches.get(series)) is None:
            found = self._caches[series] = WeightCache(self.cache / SERIES / series if series else self.cache)
        return found

    def set_run_id(self, run_id: str) -> None:
        """Name the run that owns the weights. The next fetch removes other runs' versions from the cache."""
        self._run_id = run_id

    async def fetch(self, ready: AnnouncedWeights, attempt: int = 0) -> Path:
        """The verified directory of an announced version; each attempt asks the next relay.

        If another worker of the host is fetching the version, waits for it as long as it makes progress. If a sender
        will send the version, the directory holds only the sender's address.

        Raises:
            ChecksumMismatch: what the relay has differs from the announcement.
            WeightsError: it does not have the version, or does not answer.
        """
        is_sent = self.sender and self._is_begun and not (ready.series or attempt)
        if is_sent and asyncio.get_running_loop().time() >= self._files_until:
            return await in_thread(self._to_be_sent, ready)
        try:
            found = await self._fetched(ready, self._relay(ready, attempt))
            self._is_begun = True
            return found
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise WeightsError(
                f"expected weights {ready.version} from {self._relay(ready, attempt)}, got {error!r}"
            ) from error

    def _to_be_sent(self, ready: AnnouncedWeights) -> Path:
        sent = SentVersion(sender=self.sender, version=ready.version, manifest_sha256=ready.manifest_sha256)
        directory = self.cache / TO_BE_SENT / str(ready.version)
        directory.mkdir(parents=True, exist_ok=True)
        # By a rename: the workers of a host share this file and all write the same content.
        written = directory / f".{os.getpid()}"
        written.write_text(sent.model_dump_json())
        written.rename(directory / SENT)
        return directory

    def falls_back_to_files(self, directory: Path) -> bool:
        """Whether the refused weights of this directory came from the sender. If so, fetch files for a while."""
        if not directory.is_relative_to(self.cache / TO_BE_SENT):
            return False
        self._files_until = asyncio.get_running_loop().time() + UNSENT_S
        return True

    async def _fetched(self, ready: AnnouncedWeights, relay: str) -> Path:
        loop, versions = asyncio.get_running_loop(), self._versions_of(ready.series)
        if run_id := self._run_id:
            await in_thread(self._versions_of("").belong_to, run_id)
        received, progress_at = -1, loop.time()
        while True:
            if (found := await in_thread(versions.find, ready.version, ready.manifest_sha256)) is not None:
                return found
            # A stopped peer process (SIGSTOP) may hold its lock for ever.
            suffix = f"-{os.getpid()}" if loop.time() - progress_at > self.timeout_s else ""
            with versions.incoming(ready.version, ready.manifest_sha256, suffix) as incoming:
                if incoming is not None:
                    return await self._download(ready, relay, incoming)
            if (size := await in_thread(versions.size_of_incoming, ready.version)) != received:
                received, progress_at = size, loop.time()
            await asyncio.sleep(PEER_PAUSE_S)

    def keep_only(self, versions: Iterable[PolicyVersion], series: str = "") -> None:
        """Delete a series' older versions and interrupted fetches, except those that other workers use.

        Also release all versions of every other series that this worker used before.
        """
        wanted = set(versions)
        self._versions_of(series).keep_only(wanted)
        for old in () if series else (self.cache / TO_BE_SENT).glob("*-*"):
            if PolicyVersion.parse(old.name) < min(wanted):
                shutil.rmtree(old, ignore_errors=True)
        for other in self._caches.keys() - {series}:
            self._caches.pop(other).release()

    def release(self) -> None:
        """Release all versions."""
        for versions in self._caches.values():
            versions.release()

    def _relay(self, ready: AnnouncedWeights, attempt: int) -> str:
        if not ready.relays:
            raise WeightsError(f"expected a relay that serves {ready.version}, got none; set coordinator.relays")
        near = [relay for relay, host in zip(ready.relays, ready.relay_hosts, strict=False) if host == self.host]
        others = [relay for relay in ready.relays if relay not in near]
        first = self.offset % len(others) if others else 0
        order = [*near, *others[first:], *others[:first]]
        return order[attempt % len(order)].rstrip("/")

    async def _download(self, ready: AnnouncedWeights, relay: str, incoming: Incoming) -> Path:
        versions, weights = self._versions_of(ready.series), f"{relay}/{weights_path(ready.series)}"
        base = f"{weights}/{ready.version}"
        # No limit on the total: gigabytes may take long, and only silence shows that a relay is gone.
        timeout = aiohttp.ClientTimeout(total=None, connect=CONNECT_TIMEOUT_S, sock_read=self.timeout_s)
        # No decompression: sizes, ranges and checksums refer to the stored bytes.
        async with aiohttp.ClientSession(timeout=timeout, auto_decompress=False) as session:
            raw = await _read_manifest(session, f"{base}/{MANIFEST}")
            manifest = checked_manifest(raw, ready.version, ready.manifest_sha256, base)
            present = await _link_from_relay(session, base, manifest, incoming.directory)
            if not present:
                self._check_space(manifest, incoming)
                present = await self._patch(session, weights, manifest, incoming.directory, versions)
            for file in manifest.files:
                if file.name not in present:
                    await _download_file(session, f"{base}/{file.name}", file, incoming.directory / file.name)
        return await in_thread(versions.put, incoming, ready.version, manifest, raw)

    async def _patch(
        self,
        session: aiohttp.ClientSession,
        weights: str,
        manifest: WeightManifest,
        directory: Path,
        versions: WeightCache,
    ) -> set[str]:
        """Make the weights file by applying deltas to a version in the cache; the file's name.

        Empty if the file must be fetched whole. Any failure of the deltas or their base means that, since the whole
        file is always right.
        """
        # A fetch of the whole file was interrupted: continue it.
        if manifest.delta is None or _size_of(directory / manifest.delta.target):
            return set()
        target = next(file for file in manifest.files if file.name == manifest.delta.target)
        patched, deltas = directory / ".patched", list[Path]()
        try:
            base, chain = await self._chain(session, weights, manifest, target.size, versions)
            for version, delta in chain:
                deltas.append(directory / f"{version}.delta")
                await _download_file(session, f"{weights}/{version}/{delta.file.name}", delta.file, deltas[-1])
            found = await in_thread(apply_deltas, base / target.name, deltas, patched)
            if found != target.sha256:
                raise ChecksumMismatch(f"expected {target.sha256} of {base.name} and its deltas, got {found}")
            patched.rename(directory / target.name)
        except (WeightsError, aiohttp.ClientError, TimeoutError, OSError) as error:
            log.info("weights fetched whole", version=str(manifest.version), reason=str(error))
            return set()
        finally:
            for path in (patched, *deltas):
                _discard(path)
        return {target.name}

    async def _chain(
        self, session: aiohttp.ClientSession, weights: str, manifest: WeightManifest, size: int, versions: WeightCache
    ) -> tuple[Path, list[tuple[PolicyVersion, WeightDelta]]]:
        """The directory of a version that is here, and the deltas that lead from it to the manifest's, in this order.

        Raises:
            WeightsError: no version that is here is near enough.
        """
        chain: list[tuple[PolicyVersion, WeightDelta]] = []
        while (delta := manifest.delta) is not None:
            chain.insert(0, (manifest.version, delta))
            if sum(one.file.size for _, one in chain) > WORTH_IT * size:
                break
            base = await in_thread(versions.find, delta.base, delta.base_manifest_sha256)
            if base is not None:
                return base, chain
            # A trusted manifest names the checksum of this one, so that this one's delta is trusted too.
            where = f"{weights}/{delta.base}/{MANIFEST}"
            raw = await _read_manifest(session, where)
            manifest = checked_manifest(raw, delta.base, delta.base_manifest_sha256, where)
        raise WeightsError(f"expected a version from which deltas lead to {chain[-1][0]} in {self.cache}, got none")

    def _check_space(self, manifest: WeightManifest, incoming: Incoming) -> None:
        here = sum(path.stat().st_size for path in incoming.files)
        needed, free = sum(file.size for file in manifest.files) - here, shutil.disk_usage(self.cache).free
        if needed > free:
            raise WeightsError(f"expected {needed} bytes free for weights in {self.cache}, got {free}; make room")


async def _read_manifest(session: aiohttp.ClientSession, url: str) -> bytes:
    raw = b""
    async with _opened(session, url) as response:
        async for chunk in response.content.iter_chunked(READ_BYTES):
            raw += chunk
            if len(raw) > MAX_MANIFEST_BYTES:
                raise WeightsError(f"expected a manifest of at most {MAX_MANIFEST_BYTES} bytes at {url}, got more")
    return raw


async def _link_from_relay(
    session: aiohttp.ClientSession, base: str, manifest: WeightManifest, directory: Path
) -> set[str]:
    """Hard-link a version's files from a relay of this host; the names of the linked files.

    Empty if the relay is on another host or its files are on another file system. Waits until the relay has the whole
    version. If linking is clearly impossible, returns at once, and the caller reads the version while it arrives. The
    links stay when the relay deletes its files.
    """
    answer = b""
    async with session.get(f"{base}/{DIRECTORY}", allow_redirects=False) as response:
        # A relay on another host does not answer this, nor does one of an earlier release.
        if response.status == 200 and is_linkable(response.headers.get(BELOW), directory):
            while (more := await response.content.read(READ_BYTES)) and len(answer) <= MAX_MANIFEST_BYTES:
                answer += more
    try:
        source = json.loads(answer or b"{}").get(DIRECTORY)
        return await in_thread(link, Path(source), manifest, directory) if source else set()
    except (ValueError, AttributeError, TypeError, OSError) as error:
        log.debug("weights not linked", version=str(manifest.version), reason=repr(error))
        return set()


async def _download_file(session: aiohttp.ClientSession, url: str, file: WeightFile, path: Path) -> None:
    """Stream a file's missing bytes to disk, then check the whole file; a file that fails the check is deleted.

    Hashing and writing happen in a thread: the event loop has tokens to pass on.
    """
    have = _size_of(path)
    # `not have`: an empty file lacks no bytes, but must be created.
    if have < file.size or not have:
        have = await _append(session, url, path, have, file.size)
    found = await in_thread(sha256_of, path)
    if have != file.size or found != file.sha256:
        _discard(path)
        raise ChecksumMismatch(
            f"expected {file.size} bytes with sha256 {file.sha256} at {url}, got {have} with {found}; asking again"
        )


async def _append(session: aiohttp.ClientSession, url: str, path: Path, have: int, size: int) -> int:
    """Fetch a file from byte ``have`` on; the number of bytes on disk now. Stops once there are more than ``size``."""
    async with _opened(session, url, {"Range": f"bytes={have}-"} if have else {}) as response:
        if response.status == 200:  # a relay that does not know Range sends all of it again
            have = 0
        with path.open("ab" if have else "wb") as target:
            async for chunk in response.content.iter_chunked(READ_BYTES):
                have += len(chunk)
                await in_thread(target.write, chunk)
                if have > size:  # enough to know that this is not the expected file
                    break
    return have


@asynccontextmanager
async def _opened(
    session: aiohttp.ClientSession, url: str, headers: Mapping[str, str] | None = None
) -> AsyncIterator[aiohttp.ClientResponse]:
    # No redirects: a relay must not choose where weights come from, even though they are checked.
    async with session.get(url, headers=headers, allow_redirects=False) as response:
        if response.status != 200 and not (headers and response.status == 206):
            raise WeightsError(f"expected status 200 from {url}, got {response.status}")
        yield response


def _size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _discard(path: Path) -> None:
    path.unlink(missing_ok=True)
