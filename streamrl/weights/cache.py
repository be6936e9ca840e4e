"""Fetched weight versions on a host's disk, shared by its workers: each is fetched once, verified once, mapped by all.

    {root}/1-7/manifest.json, model.safetensors …, .lock     a whole version
    {root}/.incoming-1-8-{sha256}/…, .lock                   one that is being fetched, or was until somebody died
    {root}/arms/{name}/…                                     the same of another series
    {root}/.run                                              the id of the run whose weights these are

Whoever fetches a version or deletes it holds its lock alone (``flock``, which the kernel releases with the process);
whoever uses one holds it with others. A worker whose peer is fetching waits; if the peer dies, it goes on with what is
there. The lock's file also says what was verified: inode, size and times of every file, since this boot. While they are
the same, nobody hashes the files again.

Invariants:
- a_version_in_the_cache_is_whole: it gets its name, by a rename, after every byte of it was checked;
- what_is_used_is_not_deleted: nobody deletes a version whose lock another holds.
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
from streamrl.schemas.weights import INCOMING, MANIFEST, SERIES, WeightManifest, note_run, run_noted, version_in

LOCK = ".lock"
DISCARDED = ".discarded-"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""Another after each start of the machine: what was written shortly before a power cut may not be what is there."""


@dataclass
class WeightCache:
    """The versions under ``root``, for one worker. Its calls may block, for as long as it takes to hash a version.

    ``_used``: descriptors of the locks that this worker holds with others, by version.
    """

    root: Path
    _used: dict[PolicyVersion, int] = field(default_factory=dict)

    def find(self, version: PolicyVersion, manifest_sha256: str) -> Path | None:
        """The directory of a version, verified, which stays until ``keep_only`` leaves it out; none if it is not here.

        Hashes what nobody has verified since the machine was started.
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
        """A directory to put the files of a version into, with what is there of them; none if a peer is at it.

        Named by the manifest too: what is left of another version of this number is not mixed into it. With a
        ``suffix`` it is another directory than the peers'.
        """
        directory = self.root / f"{INCOMING}{version}-{manifest_sha256[:16]}{suffix}"
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
                # Of a fetch that got nowhere nothing stays; of another, there are files to go on with. Still locked:
                # a peer that comes meanwhile sees that its lock is of a directory that is gone.
                if not incoming.files:
                    shutil.rmtree(directory, ignore_errors=True)
                os.close(descriptor)

    def size_of_incoming(self, version: PolicyVersion) -> int:
        """Bytes that are there of what is being fetched of a version: they grow while a peer gets anywhere."""
        total = 0
        for path in self.root.glob(f"{INCOMING}{version}-*/*"):
            with contextlib.suppress(FileNotFoundError):
                total += path.stat().st_size
        return total

    def put(self, incoming: "Incoming", version: PolicyVersion, manifest: WeightManifest, raw: bytes) -> Path:
        """Give an incoming directory, of which every file was verified, the version's name; where it is now.

        Raises:
            WeightsError: it was deleted at once, since everybody else is at newer ones.
        """
        if (found := self.find(version, sha256(raw).hexdigest())) is not None:
            shutil.rmtree(incoming.directory, ignore_errors=True)
            return found  # a peer that was thought to hang was faster
        (incoming.directory / MANIFEST).write_bytes(raw)  # last, then the rename: a directory that is there is whole
        _write_stamp(incoming.descriptor, _stamp(incoming.directory, manifest))
        directory = self.root / str(version)
        # What is there is not that version, or is damaged, and a rename would not replace it. Whoever has mapped its
        # files keeps them.
        _discard(directory)
        incoming.directory.rename(directory)
        incoming.is_put = True
        self._use(version, incoming.descriptor)
        try:
            # From now on with others. Changing the kind of a lock may let somebody else in between.
            fcntl.flock(incoming.descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(incoming.descriptor), (directory / LOCK).stat()):
                return directory
        except (BlockingIOError, FileNotFoundError):
            pass
        os.close(self._used.pop(version))
        raise WeightsError(f"expected {version} to stay in {self.root}, got it deleted; there is a newer one")

    def keep_only(self, versions: Iterable[PolicyVersion]) -> None:
        """Use no others from now on, and delete what nobody uses of older ones and of interrupted fetches."""
        kept = set(versions)  # at least one
        for left in self._used.keys() - kept:
            os.close(self._used.pop(left))
        newest = max(kept)
        _delete_unused(self.root, lambda version: version is None or (version not in kept and version < newest))

    def belong_to(self, run_id: str) -> None:
        """Delete what nobody uses of another run of this name, arms included: its versions may have larger numbers than
        any of this one.
        """
        if run_noted(self.root) == run_id:
            return
        self.root.mkdir(parents=True, exist_ok=True)
        for root in (self.root, *(self.root / SERIES).glob("*")):
            _delete_unused(root, lambda version: True)
        note_run(self.root, run_id)

    def release(self) -> None:
        """Use none any more; they stay for others, who delete them with the next version."""
        for version in list(self._used):
            os.close(self._used.pop(version))

    def _use(self, version: PolicyVersion, descriptor: int) -> None:
        if version in self._used:
            os.close(self._used[version])
        self._used[version] = descriptor


@dataclass
class Incoming:
    """A directory that one process puts files into; ``descriptor`` holds its lock."""

    directory: Path
    descriptor: int
    is_put: bool = False

    @property
    def files(self) -> list[Path]:
        """What is there already."""
        return [path for path in self.directory.glob("*") if path.name != LOCK]


def is_linkable(below: str | None, directory: Path) -> bool:
    """Whether files below one directory may have a second name in the other, by what can be told before they exist."""
    try:
        return below is None or os.stat(unquote(below)).st_dev == directory.stat().st_dev
    except (OSError, ValueError):
        return False


def link(source: Path, manifest: WeightManifest, directory: Path) -> set[str]:
    """Those of a version's files that could be linked and are what the manifest says."""
    linked, aside = set[str](), directory / ".linked"
    for file in manifest.files:
        aside.unlink(missing_ok=True)
        os.link(source / file.name, aside, follow_symlinks=False)
        try:
            # Checked under a name that nobody appends to: what is there half is fetched on, and this is the relay's.
            if aside.is_symlink() or aside.stat().st_size != file.size or sha256_of(aside) != file.sha256:
                break
            aside.replace(directory / file.name)
            linked.add(file.name)
        finally:
            aside.unlink(missing_ok=True)
    return linked


def _lock(directory: Path, how: int, *, create: bool = False) -> int | None:
    """A descriptor that locks a directory until it is closed; none if it is not there or others lock it otherwise."""
    path = directory / LOCK
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o644)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
        # Between opening and locking it may have been renamed or deleted: then this lock is of another directory.
        if os.path.samestat(os.fstat(descriptor), path.stat()):
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError as error:
        os.close(descriptor)
        raise WeightsError(
            f"expected a disk on which files can be locked for {directory.parent}, got: {error.strerror}; "
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
    # Those who use the version with us may be writing the same.
    content = json.dumps(stamp).encode()
    os.pwrite(descriptor, content, 0)
    os.ftruncate(descriptor, len(content))


def _read(descriptor: int) -> Any:
    try:
        return json.loads(os.pread(descriptor, 1 << 20, 0))
    except ValueError:
        return None


def _stamp(directory: Path, manifest: WeightManifest) -> dict[str, Any]:
    """What shows that files are the ones that were verified."""
    boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
    found = {file.name: (directory / file.name).stat() for file in manifest.files}
    return {
        "boot": boot,
        "files": {name: [s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns] for name, s in found.items()},
    }


def _delete_unused(root: Path, is_old: Callable[[PolicyVersion | None], bool]) -> None:
    """Of what is whole or incoming, what is old and locked by nobody; None: a name that is no version's."""
    for directory in root.glob("*"):
        if not directory.is_dir():
            continue
        if directory.name.startswith(DISCARDED):
            shutil.rmtree(directory, ignore_errors=True)
            continue
        version = version_in(directory.name)
        if (version is None and not directory.name.startswith(INCOMING)) or not is_old(version):
            continue
        if not (directory / LOCK).exists():
            _discard(directory)
        elif (descriptor := _lock(directory, fcntl.LOCK_EX)) is not None:
            _discard(directory)
            os.close(descriptor)


def _discard(directory: Path) -> None:
    """Take a directory out of the way, so that nobody finds half of it, and delete it."""
    aside = directory.parent / f"{DISCARDED}{directory.name}-{os.getpid()}"
    with contextlib.suppress(FileNotFoundError):
        directory.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)
