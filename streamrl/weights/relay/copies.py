"""The versions that a relay holds of another's store, whole or arriving; what has arrived is read at once.

    {root}/1-7/manifest.json, model.safetensors …       whole
    {root}/.incoming-1-8-{sha256}/…                     arriving, or left by a process that died: goes on from there
    {root}/arms/{name}/…                                the same of another series
    {root}/.run                                         the id of the run whose weights these are

Invariants:
- only_checked_chunks_are_passed_on: bytes are readable once the check of their chunk was right;
- nobody_reads_of_what_nobody_brings: who reads of a version that is given up is told, and asks elsewhere;
- copies_are_of_one_run: what another run of this name left is deleted before anything of this one arrives;
- a_copy_is_whole_or_incoming: it gets its name, by a rename, after the sha256 of every file was right;
- what_is_read_stays: a version is not deleted while somebody reads it, nor for the lease after, also when its
  series is wanted no more; but another run's is, of which who has begun to read a file reads on.
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
    INCOMING,
    MANIFEST,
    SERIES,
    WeightFile,
    WeightManifest,
    chunk_bytes_of,
    complete_versions,
    note_run,
    run_noted,
    version_in,
)

GONE = ".gone-"
"""Of a series, or of what another run left, on its way out; its name may come back meanwhile."""


@dataclass
class ArrivingFile:
    """A file of which ``have`` bytes are there and checked; the others come. ``is_given_up``: they do not any more."""

    file: WeightFile
    path: Path
    have: int = 0
    is_whole: bool = False
    is_given_up: bool = False
    _written: int = 0
    _beginnings: int = 0
    _digest: "hashlib._Hash" = field(default_factory=hashlib.sha256)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    @classmethod
    def there(cls, path: Path) -> "ArrivingFile":
        """A file that was always there, unchecked: of the trainer's own store."""
        size = path.stat().st_size
        return cls(WeightFile.model_construct(name=path.name, size=size, sha256=""), path, size, is_whole=True)

    @property
    def chunk_bytes(self) -> int:
        """What is checked, and passed on, at once."""
        return self.file.chunk_bytes or chunk_bytes_of(self.file.size)

    def next_chunk(self) -> int:
        """Length of the chunk that is to be written next; 0: none is."""
        return min(self.chunk_bytes, self.file.size - self._written)

    def resume(self) -> None:
        """Go on from what an earlier process left; what is damaged of it is cut off. Blocks while it reads."""
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
        """Check a chunk and write it behind the others; how many bytes there are now. Blocks while it does.

        Raises:
            ChecksumMismatch: it is damaged; nothing was written.
        """
        if self.file.is_damaged(self._written, chunk):
            raise ChecksumMismatch(
                f"expected bytes {self._written} to {self._written + len(chunk)} of {self.file.name} at {where} with "
                "the check that their manifest names, got others; asking another relay"
            )
        with self.path.open("r+b") as file:
            file.seek(self._written)
            file.write(chunk)
        self._digest.update(chunk)
        self._written += len(chunk)
        return self._written

    def arrived(self, have: int) -> None:
        """So many bytes may be read."""
        self.have = have
        self._tell()

    def give_up(self) -> None:
        """Nobody brings the rest: who awaits it is told."""
        self.is_given_up = True
        self._tell()

    def finish(self, where: str) -> None:
        """All bytes are there.

        Raises:
            ChecksumMismatch: they are not the file's; it begins anew.
        """
        if (found := self._digest.hexdigest()) != self.file.sha256:
            self._digest, self.have, self._written = hashlib.sha256(), 0, 0
            self._beginnings += 1
            self._tell()
            raise ChecksumMismatch(f"expected sha256 {self.file.sha256} of {self.file.name} at {where}, got {found}")
        self.made()

    def made(self) -> None:
        """The file is there, whole and checked."""
        self.have = self._written = self.file.size
        self.is_whole = True
        self._tell()

    async def beyond(self, position: int) -> int:
        """How many bytes are there, once there are more than these or the file is whole.

        Raises:
            ChecksumMismatch: it began anew meanwhile.
            ConnectionResetError: nobody brings them.
        """
        began = self._beginnings
        while self.have <= position and not self.is_whole:
            if self.is_given_up:
                raise ConnectionResetError(f"the rest of {self.file.name} does not come this way")
            await self._changed.wait()
            if self._beginnings != began:
                raise ChecksumMismatch(f"expected {self.file.name} to arrive, got it damaged; it begins anew")
        return self.have

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


@dataclass
class VersionCopy:
    """A version of which the manifest is here. ``files``: what is here of it, or comes; ``ended``: no more comes."""

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
        """With nothing of its files yet."""
        described = [*manifest.files, *([manifest.delta.file] if with_delta and manifest.delta is not None else [])]
        files = {file.name: ArrivingFile(file, directory / file.name) for file in described}
        return cls(manifest.version, manifest, raw, directory, files)

    @property
    def is_whole(self) -> bool:
        """Whether it has its name, and lacks nothing that makes it up."""
        return not self.directory.name.startswith(INCOMING)

    def is_as_announced(self, manifest_sha256: str) -> bool:
        """Whether this is the version of that manifest, whole, and not only of its number."""
        return self.is_whole and hashlib.sha256(self.raw).hexdigest() == manifest_sha256

    @property
    def have(self) -> int:
        """Bytes that are here of its files."""
        return sum(file.have for file in self.files.values())

    def move_to(self, directory: Path) -> None:
        """Rename its directory; who reads of it goes on."""
        self.directory.rename(directory)
        self.directory = directory
        for arriving in self.files.values():
            arriving.path = directory / arriving.file.name


@dataclass
class RelayCopies:
    """The versions under ``root``: the newest ``keep`` whole ones, what is leased, and what arrives.

    ``series``: the same of other series, by name, that are wanted, or were and are read still. ``wanted_series``: those
    that are wanted now; None: nobody has said.
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
        """Find what an earlier process left whole. What it left of others is found when they arrive again."""
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
        """Whether there were copies of another run, or of nobody knows which: then none is left.

        Another run of this name counts its versions anew: what is left would pass for newer ones.
        """
        if run_id == self._run_id:
            return False
        is_other = False
        if (noted := run_noted(self.root)) != run_id:
            self.root.mkdir(parents=True, exist_ok=True)
            for copies in (self, *self.series.values()):
                copies.versions.clear()
            others = [left for left in self.root.iterdir() if left.is_dir() and not left.name.startswith(GONE)]
            for left in others:
                _put_aside(left, self.root)
            is_other = noted is not None or bool(others)
            note_run(self.root, run_id)
        self._run_id = run_id  # last: what a full disk stopped is done again
        return is_other

    def whole(self) -> list[PolicyVersion]:
        """Whole versions, oldest first."""
        return sorted(version for version, copy in self.versions.items() if copy.is_whole)

    def begin(self, manifest: WeightManifest, raw: bytes) -> VersionCopy:
        """A version whose manifest was checked arrives: whole, or as a delta to one that is here."""
        digest = hashlib.sha256(raw).hexdigest()
        directory = self.root / f"{INCOMING}{manifest.version}-{digest[:16]}"
        directory.mkdir(parents=True, exist_ok=True)
        copy = self.versions[manifest.version] = VersionCopy.at(
            directory, manifest, raw, with_delta=self.base_of(manifest) is not None
        )
        self._tell()
        return copy

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def begin_series(self, series: str) -> "RelayCopies":
        """Those of a series, with what an earlier process left of them."""
        if (found := self.series.get(series)) is None:
            found = RelayCopies(self.root / SERIES / series, self.keep, self.lease_s, self.clock)
            await in_thread(found.load)
            self.series[series] = found
            self._tell()
        return found

    async def find_series(self, series: str, patience_s: float) -> "RelayCopies | None":
        """Those of a series, within that time: it may be wanted since just now."""
        try:
            async with asyncio.timeout(patience_s):
                while series not in self.series:
                    await self._changed.wait()
        except TimeoutError:
            return None
        return self.series[series]

    def base_of(self, manifest: WeightManifest) -> Path | None:
        """The file here that its delta is applied to, if there are both."""
        if manifest.delta is None or (base := self.versions.get(manifest.delta.base)) is None or not base.is_whole:
            return None
        if hashlib.sha256(base.raw).hexdigest() != manifest.delta.base_manifest_sha256:
            return None
        return base.directory / manifest.delta.target

    def finish(self, copy: VersionCopy) -> None:
        """All files of a version are there."""
        (copy.directory / MANIFEST).write_bytes(copy.raw)
        target = self.root / str(copy.version)
        shutil.rmtree(target, ignore_errors=True)  # of that number, and not what was announced
        copy.move_to(target)
        copy.ended.set()

    def abandon(self, copy: VersionCopy) -> None:
        """Nobody brings the rest of it; what is there stays until newer versions are whole."""
        if self.versions.get(copy.version) is copy and not copy.is_whole:
            del self.versions[copy.version]
        for arriving in copy.files.values():
            arriving.give_up()
        copy.ended.set()

    async def find(self, version: PolicyVersion, patience_s: float) -> VersionCopy | None:
        """A version, within that time if it is newer than all that are known: it may have been announced just now."""
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
        """Whether it is not there, and newer ones are."""
        return version not in self.versions and any(version < other for other in self.versions)

    @contextmanager
    def lease(self, copy: VersionCopy) -> Iterator[None]:
        """Somebody reads of a version."""
        copy.readers += 1
        try:
            yield
        finally:
            copy.readers -= 1
            copy.read_at = self.clock()

    async def tidy(self) -> None:
        """Delete whole versions that are neither new nor leased, and what is left of interrupted ones."""
        whole, gone = self.whole(), list[Path]()
        for version in whole[: -self.keep]:
            if self._is_free(self.versions[version]):
                gone.append(self.versions.pop(version).directory)
        used = {copy.directory for copy in self.versions.values()}
        for left in self.root.glob(f"{INCOMING}*") if whole else ():
            of = version_in(left.name)
            if left not in used and of is not None and of <= whole[-1]:
                gone.append(left)
        gone += [*self._series_that_are_over(), *self.root.glob(f"{GONE}*")]
        # In a thread: gigabytes take long.
        for directory in gone:
            await in_thread(partial(shutil.rmtree, directory, ignore_errors=True))
        for of_series in list(self.series.values()):
            await of_series.tidy()

    def _is_free(self, copy: VersionCopy) -> bool:
        return not copy.readers and self.clock() - copy.read_at >= self.lease_s

    def _series_that_are_over(self) -> list[Path]:
        """Directories of series that nobody wants now, and of which nothing is read or arrives: to be deleted."""
        if self.wanted_series is None:
            return []
        gone = []
        for directory in list((self.root / SERIES).glob("*")):
            series, held = directory.name, self.series.get(directory.name)
            if series.startswith(GONE):
                gone.append(directory)
            elif series not in self.wanted_series and (
                held is None or all(copy.is_whole and self._is_free(copy) for copy in held.versions.values())
            ):
                self.series.pop(series, None)
                # The series may be wanted again before all of it is deleted.
                gone.append(_put_aside(directory, directory.parent))
        return gone


def _put_aside(directory: Path, within: Path) -> Path:
    return directory.rename(within / f"{GONE}{uuid.uuid4().hex[:12]}")
