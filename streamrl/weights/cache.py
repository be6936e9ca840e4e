"""A host's cache of weight versions, shared by its workers: each version is fetched and verified once, mapped by all.

    {root}/1-7/manifest.json, model.safetensors …, .lock     a whole version
    {root}/.incoming-1-8-{sha256}/…, .lock                   a version that is being fetched, or an interrupted fetch
    {root}/arms/{name}/…                                     the same for another series
    {root}/.run                                              the id of the run whose weights these are

A worker that fetches or deletes a version holds its lock exclusively; workers that use a version share its lock. The
lock is an ``flock``, which the kernel releases when the process ends. A worker waits while a peer fetches the version
that it wants. If the peer dies, the worker continues the fetch. The lock file also records the verified files: inode,
size and times of each, and the boot id. While these are unchanged, no worker hashes the files again.

Invariants:
- a_version_in_the_cache_is_whole: a version gets its name, by a rename, after every byte of it was checked;
- versions_in_use_are_not_deleted: a worker deletes a version only if no other worker holds its lock.
"""

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from streamrl.schemas.errors import WeightsError
from streamrl.schemas.files import sha256_of
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.weights import (
    INCOMING_PREFIX,
    MANIFEST,
    SERIES,
    WeightManifest,
    read_run_id,
    version_in,
    write_run_id,
)

LOCK = ".lock"
DISCARDED = ".discarded-"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""Changes with each boot. After a power cut, files written shortly before may differ from the verified ones."""


@dataclass
class WeightCache:
    """The versions under ``root``, for one worker. A call may block for as long as it takes to hash a version.

    ``_used``: descriptors of the shared locks that this worker holds, by version.
    """

    root: Path
    _used: dict[PolicyVersion, int] = field(default_factory=dict)

    def find(self, version: PolicyVersion, manifest_sha256: str) -> Path | None:
        """The verified directory of a version; None if it is not here. It stays until ``keep_only`` omits the version.

        Hashes files that no worker has verified since the machine booted.
        """
        directory = self.root / str(version)
        descriptor = _lock(directory, fcntl.LOCK_SH)
        if descriptor is None:
            return None
        if not _is_verified(directory, descriptor, manifest_sha256):
            os.close(descriptor)
            return None
        self._use(version, descriptor)
        return directory

    @contextmanager
    def incoming(self, version: PolicyVersion, manifest_sha256: str, suffix: str = "") -> "Iterator[Incoming | None]":
        """A directory for the files of a version, with those fetched so far; None if a peer is fetching the version.

        The manifest's hash is part of the directory's name, so that leftovers of another version with the same number
        do not get mixed in. A ``suffix`` gives a directory that no peer uses.
        """
        directory = self.root / f"{INCOMING_PREFIX}{version}-{manifest_sha256[:16]}{suffix}"
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = _lock(directory, fcntl.LOCK_EX, create=True)
        if descriptor is None:
            yield None
            return
        incoming = Incoming(directory, descriptor)
        try:
            yield incoming
        finally:
            if not incoming.is_put:
                # Files of an interrupted fetch stay, for the next fetch to continue. An empty directory is removed
                # while it is still locked, so that a waiting peer sees that its lock's directory is gone.
                if not incoming.files:
                    shutil.rmtree(directory, ignore_errors=True)
                os.close(descriptor)

    def size_of_incoming(self, version: PolicyVersion) -> int:
        """Bytes that unfinished fetches of a version have received. The number grows while a peer makes progress."""
        total = 0
        for directory in self.root.glob(f"{INCOMING_PREFIX}{version}-*"):
            with contextlib.suppress(FileNotFoundError):  # a peer has all files of it and renames it
                for path in directory.iterdir():
                    total += path.stat().st_size
        return total

    def put(self, incoming: "Incoming", version: PolicyVersion, manifest: WeightManifest, raw: bytes) -> Path:
        """Rename an incoming directory, whose files are all verified, to the version's name; returns the new path.

        Raises:
            WeightsError: a peer deleted the version at once, because all others use newer ones.
        """
        if (found := self.find(version, sha256(raw).hexdigest())) is not None:
            shutil.rmtree(incoming.directory, ignore_errors=True)
            return found  # a peer that seemed to hang was faster
        (incoming.directory / MANIFEST).write_bytes(raw)  # last, before the rename: a named directory is whole
        _write_stamp(incoming.descriptor, _stamp(incoming.directory, manifest))
        directory = self.root / str(version)
        # A directory of that name holds other or damaged files, and a rename would not replace it. Processes that have
        # mapped its files keep them.
        _discard(directory)
        incoming.directory.rename(directory)
        incoming.is_put = True
        self._use(version, incoming.descriptor)
        try:
            # From now on the lock is shared. Between the two kinds of lock, a peer may take it.
            fcntl.flock(incoming.descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(incoming.descriptor), (directory / LOCK).stat()):
                return directory
        except (BlockingIOError, FileNotFoundError):
            pass
        os.close(self._used.pop(version))
        raise WeightsError(f"expected {version} to stay in {self.root}, got it deleted; there is a newer one")

    def keep_only(self, versions: Iterable[PolicyVersion]) -> None:
        """Release all other versions. Delete older versions and interrupted fetches that no worker uses.

        ``versions``: at least one.
        """
        kept = set(versions)
        for left in self._used.keys() - kept:
            os.close(self._used.pop(left))
        newest = max(kept)
        _delete_unused(self.root, lambda version: version is None or (version not in kept and version < newest))

    def belong_to(self, run_id: str) -> None:
        """Delete the unused versions of another run with this name, in all series: they may have larger numbers than
        this run's.
        """
        if read_run_id(self.root) == run_id:
            return
        self.root.mkdir(parents=True, exist_ok=True)
        for root in (self.root, *(self.root / SERIES).glob("*")):
            _delete_unused(root, lambda version: True)
        write_run_id(self.root, run_id)

    def release(self) -> None:
        """Release all versions. They stay for other workers, which delete them when they adopt the next version."""
        for version in list(self._used):
            os.close(self._used.pop(version))

    def _use(self, version: PolicyVersion, descriptor: int) -> None:
        if version in self._used:
            os.close(self._used[version])
        self._used[version] = descriptor


@dataclass
class Incoming:
    """A directory that one process fetches files into; ``descriptor`` holds its lock."""

    directory: Path
    descriptor: int
    is_put: bool = False

    @property
    def files(self) -> list[Path]:
        """The files fetched so far."""
        return [path for path in self.directory.glob("*") if path.name != LOCK]


def is_linkable(below: str | None, directory: Path) -> bool:
    """Whether hard links from files under ``below`` into ``directory`` look possible: both are on one file system.

    ``below`` is percent-encoded and may not exist here. None, a relay that does not say, counts as possible.
    """
    try:
        return below is None or os.stat(unquote(below)).st_dev == directory.stat().st_dev
    except (OSError, ValueError):
        return False


def link(source: Path, manifest: WeightManifest, directory: Path) -> set[str]:
    """Link a version's files into ``directory``; the names of those that match the manifest."""
    linked, aside = set[str](), directory / ".linked"
    for file in manifest.files:
        aside.unlink(missing_ok=True)
        os.link(source / file.name, aside, follow_symlinks=False)
        try:
            # Checked under a separate name: a fetch would append to a half file, and this file is the relay's.
            if aside.is_symlink() or aside.stat().st_size != file.size or sha256_of(aside) != file.sha256:
                break
            aside.replace(directory / file.name)
            linked.add(file.name)
        finally:
            aside.unlink(missing_ok=True)
    return linked


def _lock(directory: Path, how: int, *, create: bool = False) -> int | None:
    """A descriptor that locks a directory until it is closed; None if it does not exist or a peer's lock conflicts."""
    path = directory / LOCK
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o644)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
        # Between open and lock the directory may have been renamed or deleted: then this lock is for another one.
        if os.path.samestat(os.fstat(descriptor), path.stat()):
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError as error:
        os.close(descriptor)
        raise WeightsError(
            f"expected a disk that can lock files for {directory.parent}, got: {error.strerror}; "
            "set generation.weights_cache to a directory on a local disk"
        ) from error
    os.close(descriptor)
    return None


def _is_verified(directory: Path, descriptor: int, manifest_sha256: str) -> bool:
    try:
        raw = (directory / MANIFEST).read_bytes()
        if sha256(raw).hexdigest() != manifest_sha256:
            return False
        manifest = WeightManifest.model_validate_json(raw)
        stamp = _stamp(directory, manifest)
        if stamp["boot"] and _read(descriptor) == stamp:
            return True
        if any(sha256_of(directory / file.name) != file.sha256 for file in manifest.files):
            return False
    except (OSError, ValueError):
        return False
    _write_stamp(descriptor, stamp)
    return True


def _write_stamp(descriptor: int, stamp: dict[str, Any]) -> None:
    # Other workers that share the version may be writing the same content.
    content = json.dumps(stamp).encode()
    os.pwrite(descriptor, content, 0)
    os.ftruncate(descriptor, len(content))


def _read(descriptor: int) -> Any:
    try:
        return json.loads(os.pread(descriptor, 1 << 20, 0))
    except ValueError:
        return None


def _stamp(directory: Path, manifest: WeightManifest) -> dict[str, Any]:
    """Identifies the verified files: the boot id, and inode, size and times of each."""
    boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
    found = {file.name: (directory / file.name).stat() for file in manifest.files}
    return {
        "boot": boot,
        "files": {name: [s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns] for name, s in found.items()},
    }


def _delete_unused(root: Path, is_old: Callable[[PolicyVersion | None], bool]) -> None:
    """Delete the whole and incoming versions that ``is_old`` and that no worker has locked.

    ``is_old`` gets None for an incoming directory whose name has no version.
    """
    for directory in root.glob("*"):
        if not directory.is_dir():
            continue
        if directory.name.startswith(DISCARDED):
            shutil.rmtree(directory, ignore_errors=True)
            continue
        version = version_in(directory.name)
        if (version is None and not directory.name.startswith(INCOMING_PREFIX)) or not is_old(version):
            continue
        if not (directory / LOCK).exists():
            _discard(directory)
        elif (descriptor := _lock(directory, fcntl.LOCK_EX)) is not None:
            _discard(directory)
            os.close(descriptor)


def _discard(directory: Path) -> None:
    """Rename a directory, so that no worker finds half of it, then delete it."""
    aside = directory.parent / f"{DISCARDED}{directory.name}-{os.getpid()}"
    with contextlib.suppress(FileNotFoundError):
        directory.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)
