"""Brings weight versions from the relays to a worker's disk. Knows announcements, not where they come from.

Invariants:
- only_verified_bytes_are_adopted: a version's directory appears, by one rename, after every byte of it was checked
  against its manifest, and the manifest against the announcement;
- nothing_is_fetched_that_is_here: a relay's files on the same host are linked, not copied;
- nothing_is_fetched_twice: what a relay delivered before it broke off is kept, and the next one is asked for the rest;
  of the workers that share a cache one fetches a version.
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
PEER_PAUSE_S = 0.05
"""How often a worker looks whether the one that fetches a version for it is done."""
UNSENT_S = 30.0
"""So long after it was not sent to, a worker fetches files: a sender that is stuck holds up one version, not each."""
TO_BE_SENT = ".to-be-sent"
"""In the cache: directories of versions that say who sends them."""
WORTH_IT = 0.5
"""Of a whole file: deltas that are longer than that together are not fetched in its place."""


@dataclass
class WeightsFetcher:
    """Keeps versions under ``cache``, one directory each, together with the other workers that use it; those of
    another series than the run's own in a folder of its name there.

    ``timeout_s`` is the longest silence of a relay; the one of this ``host`` is asked first, and ``offset`` spreads the
    workers over the others. ``sender``: the address of one that puts weights of the run's own series into the engine
    itself, but for those with which a worker begins; empty: there is none.
    """

    cache: Path
    timeout_s: float = 30.0
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
        """Whose weights these are: from the next fetch on, those of other runs are removed from the cache."""
        self._run_id = run_id

    async def fetch(self, ready: AnnouncedWeights, attempt: int = 0) -> Path:
        """The verified directory of an announced version; each attempt asks the next relay.

        If another worker of the host is fetching it, waits for that one, as long as it gets anywhere. Of what is to be
        sent, the directory holds the sender's address alone.

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
        # By a rename: the workers of a host share it, and say the same.
        written = directory / f".{os.getpid()}"
        written.write_text(sent.model_dump_json())
        written.rename(directory / SENT)
        return directory

    def takes_files_after(self, directory: Path) -> bool:
        """Whether weights that were refused were to be sent: they are fetched now, and some of the next ones."""
        if not directory.is_relative_to(self.cache / TO_BE_SENT):
            return False
        self._files_until = asyncio.get_running_loop().time() + UNSENT_S
        return True

    async def _fetched(self, ready: AnnouncedWeights, relay: str) -> Path:
        loop, versions = asyncio.get_running_loop(), self._versions_of(ready.series)
        if run_id := self._run_id:
            await in_thread(self._versions_of("").belong_to, run_id)
        there, moved_at = -1, loop.time()
        while True:
            if (found := await in_thread(versions.find, ready.version, ready.manifest_sha256)) is not None:
                return found
            # A peer that stands still, as a process can be made to, may hold its lock for ever.
            suffix = f"-{os.getpid()}" if loop.time() - moved_at > self.timeout_s else ""
            with versions.incoming(ready.version, ready.manifest_sha256, suffix) as incoming:
                if incoming is not None:
                    return await self._download(ready, relay, incoming)
            if (size := await in_thread(versions.size_of_incoming, ready.version)) != there:
                there, moved_at = size, loop.time()
            await asyncio.sleep(PEER_PAUSE_S)

    def keep_only(self, versions: Iterable[PolicyVersion], series: str = "") -> None:
        """Delete every older version of a series, and what interrupted fetches left, but for what other workers use.

        Of another series, whose weights it had before, this worker uses none any more.
        """
        wanted = set(versions)
        self._versions_of(series).keep_only(wanted)
        for old in () if series else (self.cache / TO_BE_SENT).glob("*-*"):
            if PolicyVersion.parse(old.name) < min(wanted):
                shutil.rmtree(old, ignore_errors=True)
        for other in self._caches.keys() - {series}:
            self._caches.pop(other).release()

    def release(self) -> None:
        """Use no version any more."""
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
        # No limit on the whole: gigabytes may take long, and only silence tells a relay that is gone.
        timeout = aiohttp.ClientTimeout(total=None, connect=CONNECT_TIMEOUT_S, sock_read=self.timeout_s)
        # No decompression: sizes, ranges and checksums are of the bytes as they are stored.
        async with aiohttp.ClientSession(timeout=timeout, auto_decompress=False) as session:
            raw = await _read_manifest(session, f"{base}/{MANIFEST}")
            manifest = checked_manifest(raw, ready.version, ready.manifest_sha256, base)
            there = await _linked(session, base, manifest, incoming.directory)
            if not there:
                self._check_space(manifest, incoming)
                there = await self._patched(session, weights, manifest, incoming.directory, versions)
            for file in manifest.files:
                if file.name not in there:
                    await _download_file(session, f"{base}/{file.name}", file, incoming.directory / file.name)
        return await in_thread(versions.put, incoming, ready.version, manifest, raw)

    async def _patched(
        self,
        session: aiohttp.ClientSession,
        weights: str,
        manifest: WeightManifest,
        directory: Path,
        versions: WeightCache,
    ) -> set[str]:
        """Make the file that deltas lead to from a version that is here; its name, or none: it is to be fetched whole.

        Whatever is wrong with deltas or what they are applied to, the whole file is right.
        """
        # Begun to be fetched whole: what is there of it is kept.
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
            # Its manifest's checksum stands in one that was announced, so that its own delta is as good as announced.
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


async def _linked(session: aiohttp.ClientSession, base: str, manifest: WeightManifest, directory: Path) -> set[str]:
    """Have a version's files from a relay of this host: the same ones, in its memory or on its disk, under a second
    name. Their names; none if it is of another host, or its files are on another file system.

    Waits until the relay has the version whole, unless it is clear at once that they are elsewhere: then what arrives
    there is read meanwhile. What it deletes later stays here.
    """
    said = b""
    async with session.get(f"{base}/{DIRECTORY}", allow_redirects=False) as response:
        # A relay of another host does not say it, nor does one of an earlier release.
        if response.status == 200 and is_linkable(response.headers.get(BELOW), directory):
            while (more := await response.content.read(READ_BYTES)) and len(said) <= MAX_MANIFEST_BYTES:
                said += more
    try:
        where = json.loads(said or b"{}").get(DIRECTORY)
        return await in_thread(link, Path(where), manifest, directory) if where else set()
    except (ValueError, AttributeError, TypeError, OSError) as error:
        log.debug("weights not linked", version=str(manifest.version), reason=repr(error))
        return set()


async def _download_file(session: aiohttp.ClientSession, url: str, file: WeightFile, path: Path) -> None:
    """Stream what is missing of a file to disk, then check all of it; a file that fails the check is deleted.

    Hashing and writing happen in a thread, which leaves the loop to the tokens.
    """
    have = _size_of(path)
    # `not have`: an empty file lacks no bytes, but has to be created.
    if have < file.size or not have:
        have = await _append(session, url, path, have, file.size)
    found = await in_thread(sha256_of, path)
    if have != file.size or found != file.sha256:
        _discard(path)
        raise ChecksumMismatch(
            f"expected {file.size} bytes with sha256 {file.sha256} at {url}, got {have} with {found}; asking again"
        )


async def _append(session: aiohttp.ClientSession, url: str, path: Path, have: int, size: int) -> int:
    """Fetch a file from a byte on, up to one byte too many; how many there are now."""
    async with _opened(session, url, {"Range": f"bytes={have}-"} if have else {}) as response:
        if response.status == 200:  # a relay that does not know Range sends all of it again
            have = 0
        with path.open("ab" if have else "wb") as target:
            async for chunk in response.content.iter_chunked(READ_BYTES):
                have += len(chunk)
                await in_thread(target.write, chunk)
                if have > size:  # enough to know that it is not the file, whatever else follows
                    break
    return have


@asynccontextmanager
async def _opened(
    session: aiohttp.ClientSession, url: str, headers: Mapping[str, str] | None = None
) -> AsyncIterator[aiohttp.ClientResponse]:
    # A redirect would let a relay choose where weights come from; they are checked, but need not be fetched from there.
    async with session.get(url, headers=headers, allow_redirects=False) as response:
        if response.status != 200 and not (headers and response.status == 206):
            raise WeightsError(f"expected status 200 from {url}, got {response.status}")
        yield response


def _size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _discard(path: Path) -> None:
    path.unlink(missing_ok=True)
