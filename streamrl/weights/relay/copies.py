"""A relay's copies of versions from another relay, whole or arriving. Checked bytes can be read while the rest arrives.

    {root}/1-7/manifest.json, model.safetensors …       whole
    {root}/.incoming-1-8-{sha256}/…                     arriving, or interrupted by a crash: the next fetch continues it
    {root}/arms/{name}/…                                the same for another series
    {root}/.run                                         the id of the run whose weights these are

Invariants:
- only_verified_chunks_are_forwarded: the bytes of a chunk are readable only after its check passed;
- readers_of_an_abandoned_version_are_notified: when a transfer is abandoned, each reader gets an error and asks another
  relay;
- copies_belong_to_one_run: copies of another run with this name are deleted before versions of this run arrive;
- a_copy_is_whole_or_incoming: a version gets its name, by a rename, after the sha256 of every file was right;
- leased_versions_are_kept: a version is deleted only after its last reader has finished and its lease has expired, even
  if its series is no longer wanted. Versions of another run are the exception: they are deleted at once, and open
  files stay readable.
"""

import asyncio
import hashlib
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from pydantic import ValidationError

from streamrl.bus.waiting import in_thread
from streamrl.schemas.errors import ChecksumMismatch
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.weights import (
    INCOMING_PREFIX,
    MANIFEST,
    SERIES,
    WeightFile,
    WeightManifest,
    chunk_bytes_of,
    complete_versions,
    read_run_id,
    version_in,
    write_run_id,
)

GONE = ".gone-"
"""Prefix of a directory that is being deleted: a series, or another run's copies. Its old name is free for reuse."""


@dataclass
class ArrivingFile:
    """An arriving file. ``have``: bytes that are here and checked; ``is_given_up``: the rest will not arrive."""

    file: WeightFile
    path: Path
    have: int = 0
    is_whole: bool = False
    is_given_up: bool = False
    _written: int = 0
    _restarts: int = 0
    _digest: "hashlib._Hash" = field(default_factory=hashlib.sha256)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    @classmethod
    def there(cls, path: Path) -> "ArrivingFile":
        """A complete file of the trainer's own store, which is not checked."""
        size = path.stat().st_size
        return cls(WeightFile.model_construct(name=path.name, size=size, sha256=""), path, size, is_whole=True)

    @property
    def chunk_bytes(self) -> int:
        """Size of a chunk, which is checked and passed on as a whole."""
        return self.file.chunk_bytes or chunk_bytes_of(self.file.size)

    def next_chunk(self) -> int:
        """Length in bytes of the next chunk to write; 0 after the last one."""
        return min(self.chunk_bytes, self.file.size - self._written)

    def resume(self) -> None:
        """Keep the good chunks that an earlier process left, and cut off the rest. Blocks while it reads."""
        self.path.touch()
        with self.path.open("r+b") as file:
            while (length := self.next_chunk()) and len(chunk := file.read(length)) == length:
                if self.file.is_damaged(self._written, chunk):
                    break
                self._digest.update(chunk)
                self._written += length
            file.truncate(self._written)
        self.have = self._written

    def append(self, chunk: memoryview, where: str) -> int:
        """Check a chunk and append it to the file; returns the bytes written so far. Blocks.

        Raises:
            ChecksumMismatch: the chunk is damaged; nothing was written.
        """
        if self.file.is_damaged(self._written, chunk):
            raise ChecksumMismatch(
                f"expected bytes {self._written} to {self._written + len(chunk)} of {self.file.name} at {where} with "
                "the checksum from their manifest, got other bytes; asking another relay"
            )
        with self.path.open("r+b") as file:
            file.seek(self._written)
            file.write(chunk)
        self._digest.update(chunk)
        self._written += len(chunk)
        return self._written

    def arrived(self, have: int) -> None:
        """Let readers have the first ``have`` bytes."""
        self.have = have
        self._wake_readers()

    def give_up(self) -> None:
        """Notify readers that the rest will not arrive."""
        self.is_given_up = True
        self._wake_readers()

    def finish(self, where: str) -> None:
        """Check the whole file, after all its bytes were written.

        Raises:
            ChecksumMismatch: the file has another sha256; it starts again from its first byte.
        """
        if (found := self._digest.hexdigest()) != self.file.sha256:
            self._digest, self.have, self._written = hashlib.sha256(), 0, 0
            self._restarts += 1
            self._wake_readers()
            raise ChecksumMismatch(f"expected sha256 {self.file.sha256} of {self.file.name} at {where}, got {found}")
        self.made()

    def made(self) -> None:
        """Mark the file as whole and checked."""
        self.have = self._written = self.file.size
        self.is_whole = True
        self._wake_readers()

    async def beyond(self, position: int) -> int:
        """Wait until more than ``position`` bytes are here or the file is whole; returns how many are here.

        Raises:
            ChecksumMismatch: the file was damaged and started again.
            ConnectionResetError: the rest will not arrive.
        """
        restarts = self._restarts
        while self.have <= position and not self.is_whole:
            if self.is_given_up:
                raise ConnectionResetError(f"the rest of {self.file.name} will not arrive at this relay")
            await self._changed.wait()
            if self._restarts != restarts:
                raise ChecksumMismatch(f"expected {self.file.name} to arrive intact, got damage; it starts again")
        return self.have

    def _wake_readers(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


@dataclass
class VersionCopy:
    """A version whose manifest is here. ``files``: its files, whole or arriving. ``ended``: set when no more arrive."""

    version: PolicyVersion
    manifest: WeightManifest
    raw: bytes
    directory: Path
    files: dict[str, ArrivingFile] = field(default_factory=dict)
    readers: int = 0
    read_at: float = -1e9
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @classmethod
    def at(cls, directory: Path, manifest: WeightManifest, raw: bytes, *, with_delta: bool) -> "VersionCopy":
        """A copy that has no bytes of its files yet."""
        described = [*manifest.files, *([manifest.delta.file] if with_delta and manifest.delta is not None else [])]
        files = {file.name: ArrivingFile(file, directory / file.name) for file in described}
        return cls(manifest.version, manifest, raw, directory, files)

    @property
    def is_whole(self) -> bool:
        """Whether the version has its final name, and hence all of its files."""
        return not self.directory.name.startswith(INCOMING_PREFIX)

    def is_as_announced(self, manifest_sha256: str) -> bool:
        """Whether this is the whole version with that manifest, not just one with the same number."""
        return self.is_whole and hashlib.sha256(self.raw).hexdigest() == manifest_sha256

    @property
    def have(self) -> int:
        """Bytes of its files that are here."""
        return sum(file.have for file in self.files.values())

    def move_to(self, directory: Path) -> None:
        """Rename its directory; readers of open files are not affected."""
        self.directory.rename(directory)
        self.directory = directory
        for arriving in self.files.values():
            arriving.path = directory / arriving.file.name


@dataclass
class RelayCopies:
    """The versions under ``root``: the newest ``keep`` whole ones, leased ones, and those that arrive.

    ``series``: the copies of other series by name, which are wanted or still read. ``wanted_series``: the names of the
    series that are wanted now; None: not known yet.
    """

    root: Path
    keep: int
    lease_s: float
    clock: Callable[[], float] = time.monotonic
    versions: dict[PolicyVersion, VersionCopy] = field(default_factory=dict)
    series: dict[str, "RelayCopies"] = field(default_factory=dict)
    wanted_series: frozenset[str] | None = None
    _run_id: str = ""
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def load(self) -> None:
        """Find the whole versions that an earlier process left. A later ``begin`` finds its interrupted ones."""
        self.root.mkdir(parents=True, exist_ok=True)
        found = {}
        for version in complete_versions(self.root):
            directory = self.root / str(version)
            try:
                raw = (directory / MANIFEST).read_bytes()
                manifest = WeightManifest.model_validate_json(raw)
                has_delta = manifest.delta is not None and (directory / manifest.delta.file.name).exists()
                copy = VersionCopy.at(directory, manifest, raw, with_delta=has_delta)
                for arriving in copy.files.values():
                    if arriving.path.exists() and arriving.path.stat().st_size == arriving.file.size:
                        arriving.made()
                if all(copy.files[file.name].is_whole for file in copy.manifest.files):
                    copy.ended.set()
                    found[version] = copy
            except (OSError, ValidationError):
                continue
        self.versions |= found

    def belong_to(self, run_id: str) -> bool:
        """Set the run that the copies belong to, and delete those of another or an unknown run.

        Returns whether there were any. Another run of this name numbers its versions from the start, so that leftovers
        would pass for newer ones.
        """
        if run_id == self._run_id:
            return False
        is_other = False
        if (noted := read_run_id(self.root)) != run_id:
            self.root.mkdir(parents=True, exist_ok=True)
            for copies in (self, *self.series.values()):
                copies.versions.clear()
            others = [left for left in self.root.iterdir() if left.is_dir() and not left.name.startswith(GONE)]
            for left in others:
                _put_aside(left, self.root)
            is_other = noted is not None or bool(others)
            write_run_id(self.root, run_id)
        self._run_id = run_id  # last: a call that failed on a full disk is repeated
        return is_other

    def whole(self) -> list[PolicyVersion]:
        """Whole versions, oldest first."""
        return sorted(version for version, copy in self.versions.items() if copy.is_whole)

    def begin(self, manifest: WeightManifest, raw: bytes) -> VersionCopy:
        """Start the copy of a version whose manifest was checked. If its base is here, the copy includes the delta."""
        digest = hashlib.sha256(raw).hexdigest()
        directory = self.root / f"{INCOMING_PREFIX}{manifest.version}-{digest[:16]}"
        directory.mkdir(parents=True, exist_ok=True)
        copy = self.versions[manifest.version] = VersionCopy.at(
            directory, manifest, raw, with_delta=self.base_of(manifest) is not None
        )
        self._wake_waiters()
        return copy

    def _wake_waiters(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def begin_series(self, series: str) -> "RelayCopies":
        """The copies of a series, including those that an earlier process left."""
        if (found := self.series.get(series)) is None:
            found = RelayCopies(self.root / SERIES / series, self.keep, self.lease_s, self.clock)
            await in_thread(found.load)
            self.series[series] = found
            self._wake_waiters()
        return found

    async def find_series(self, series: str, patience_s: float) -> "RelayCopies | None":
        """The copies of a series; waits up to ``patience_s`` for them, since the series may be new."""
        try:
            async with asyncio.timeout(patience_s):
                while series not in self.series:
                    await self._changed.wait()
        except TimeoutError:
            return None
        return self.series[series]

    def base_of(self, manifest: WeightManifest) -> Path | None:
        """The file to which a version's delta applies; None if there is no delta, or its base is not here."""
        if manifest.delta is None or (base := self.versions.get(manifest.delta.base)) is None or not base.is_whole:
            return None
        if hashlib.sha256(base.raw).hexdigest() != manifest.delta.base_manifest_sha256:
            return None
        return base.directory / manifest.delta.target

    def finish(self, copy: VersionCopy) -> None:
        """Give a version its final name, after all its files arrived."""
        (copy.directory / MANIFEST).write_bytes(copy.raw)
        target = self.root / str(copy.version)
        shutil.rmtree(target, ignore_errors=True)  # a version with that number that was not the announced one
        copy.move_to(target)
        copy.ended.set()

    def abandon(self, copy: VersionCopy) -> None:
        """Give up an arriving version, and notify its readers. Its bytes stay until newer versions are whole."""
        if self.versions.get(copy.version) is copy and not copy.is_whole:
            del self.versions[copy.version]
        for arriving in copy.files.values():
            arriving.give_up()
        copy.ended.set()

    async def find(self, version: PolicyVersion, patience_s: float) -> VersionCopy | None:
        """A version. If it is newer than all known ones, waits up to ``patience_s``: it may be announced only now."""
        try:
            async with asyncio.timeout(patience_s):
                while version not in self.versions:
                    if self.is_gone(version):
                        return None
                    await self._changed.wait()
        except TimeoutError:
            return None
        return self.versions[version]

    def is_gone(self, version: PolicyVersion) -> bool:
        """Whether a version is missing while newer ones are here."""
        return version not in self.versions and any(version < other for other in self.versions)

    @contextmanager
    def lease(self, copy: VersionCopy) -> Iterator[None]:
        """A block that reads a version. It is not deleted during the block, nor for ``lease_s`` after it."""
        copy.readers += 1
        try:
            yield
        finally:
            copy.readers -= 1
            copy.read_at = self.clock()

    async def tidy(self) -> None:
        """Delete whole versions that are neither new nor leased, and leftovers of interrupted ones."""
        whole, unwanted = self.whole(), list[Path]()
        for version in whole[: -self.keep]:
            if self._is_free(self.versions[version]):
                unwanted.append(self.versions.pop(version).directory)
        used = {copy.directory for copy in self.versions.values()}
        for left in self.root.glob(f"{INCOMING_PREFIX}*") if whole else ():
            interrupted = version_in(left.name)
            if left not in used and interrupted is not None and interrupted <= whole[-1]:
                unwanted.append(left)
        unwanted += [*self._drop_unwanted_series(), *self.root.glob(f"{GONE}*")]
        # In a thread: deleting gigabytes takes long.
        for directory in unwanted:
            await in_thread(partial(shutil.rmtree, directory, ignore_errors=True))
        for of_series in list(self.series.values()):
            await of_series.tidy()

    def _is_free(self, copy: VersionCopy) -> bool:
        return not copy.readers and self.clock() - copy.read_at >= self.lease_s

    def _drop_unwanted_series(self) -> list[Path]:
        """Drop the series that are not wanted, unless a version is read or arrives; returns directories to delete."""
        if self.wanted_series is None:
            return []
        unwanted = []
        for directory in list((self.root / SERIES).glob("*")):
            series, held = directory.name, self.series.get(directory.name)
            if series.startswith(GONE):
                unwanted.append(directory)
            elif series not in self.wanted_series and (
                held is None or all(copy.is_whole and self._is_free(copy) for copy in held.versions.values())
            ):
                self.series.pop(series, None)
                # The series may be wanted again before all of it is deleted.
                unwanted.append(_put_aside(directory, directory.parent))
        return unwanted


def _put_aside(directory: Path, within: Path) -> Path:
    return directory.rename(within / f"{GONE}{uuid.uuid4().hex[:12]}")
