"""Where checkpoints live: a local directory, or an object store (S3, Google Cloud Storage, Azure, memory; by obstore).

    {root}/lineages/{L}.json                         {prefix}/lineages/{L}.json
    {root}/step_{N}/config.json, model.safetensors,  {prefix}/lineage_{L}/step_{N}/config.json …
           trainer_state/manifest.json …
    {root}/step_{N}-lineage_{L}/…  (kept aside)      {prefix}/lineage_{L}/step_{N}-{I}/…  (a later attempt)
    {root}/pins/{NAME}.json, {root}/rollback.json    {prefix}/pins/{NAME}.json, {prefix}/rollback.json

Both implement ``CheckpointStorage``; ``open_storage`` chooses by the location's text. Knows no tensors. Invariants:
- a_checkpoint_appears_whole: a directory is written under a temporary name, synced, and renamed once. An object store
  has no rename: its manifest is created last, and files without a manifest are not a checkpoint;
- a_newer_checkpoint_is_never_overwritten: a rename onto an existing checkpoint fails, and keys in an object store
  start with the writer's lineage;
- files_of_a_newer_lineage_are_never_cleared: files that look abandoned may belong to a newer trainer that is still
  writing them;
- cleared_files_never_become_a_checkpoint: their writer may already have passed its fence, and its last request may
  arrive at any later time. So a directory is renamed before its files are deleted, and the writer's own rename then
  fails. In an object store a mark is created at the manifest's key: of mark and manifest, the first one stays;
- a_retried_upload_uses_new_keys: when a step is tried again, its files are uploaded under another name, so a late
  request of the first attempt damages nothing.
"""

import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from ipaddress import ip_address
from itertools import chain, count
from os import environ
from pathlib import Path
from typing import TYPE_CHECKING, Protocol
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import MemoryStore, ObjectStore, from_url

from streamrl.consumers.training.checkpoints.manifest import (
    CLEARED,
    MANIFEST,
    MAX_MANIFEST_BYTES,
    STATE,
    CheckpointManifest,
    encode_manifest,
)
from streamrl.schemas.errors import SettingsError
from streamrl.schemas.weights import TEMPORARY_PREFIX

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig


def sync(path: Path) -> None:
    """Force a file or directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY)  # enough for fsync, and the only way in which a directory can be opened
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_leftovers(parent: Path) -> None:
    """Delete the temporary directories that a process left when it died while writing."""
    for path in parent.glob(f"{TEMPORARY_PREFIX}*"):
        shutil.rmtree(path, ignore_errors=True)


REMOTE = re.compile(r"[a-z][a-z0-9+.-]*://.*")


@dataclass(frozen=True)
class Slot:
    """Where one checkpoint is kept; ``lineage`` None: its name does not say which lineage wrote it."""

    name: str
    step: int
    lineage: int | None = None


class CheckpointStorage(Protocol):
    """Storage of one run's checkpoints and lineage claims. Every method may raise ``OSError``."""

    @property
    def scratch(self) -> Path:
        """The local directory whose disk the files are first written to."""

    def claims(self) -> list[int]:
        """Lineage numbers claimed so far, in no order."""

    def claim(self, number: int, content: bytes) -> bool:
        """Claim a number; false if it is taken. Among all claimants of a number, exactly one gets true."""

    def clear_leftovers(self, lineage: int) -> None:
        """Undo unfinished writes of older lineages."""

    def slot(self, lineage: int, step: int) -> Slot:
        """The slot to which the checkpoint of a step is written."""

    def slots(self) -> list[Slot]:
        """Slots that hold files, in no order; whether these are a checkpoint is not checked."""

    def address(self, slot: Slot) -> str:
        """The slot's path or URL, for messages."""

    def manifest(self, slot: Slot) -> bytes | None:
        """The manifest's bytes, or none if there is none."""

    def staging(self, slot: Slot, lineage: int) -> AbstractContextManager[Path]:
        """An empty local directory to write the files into; it is deleted after the block."""

    def secure(self, staged: Path) -> None:
        """Sync a staged file to disk, if the storage keeps it there. Called from several threads."""

    def publish(self, slot: Slot, staged: Path, manifest: CheckpointManifest, fence: Callable[[], None]) -> Slot:
        """Turn the secured files into a durable checkpoint: the manifest becomes visible last, right after ``fence``.

        Returns the slot used: another one of the same step if an earlier attempt used the given one.
        """

    def fetch(self, slot: Slot, manifest: CheckpointManifest) -> Path:
        """A local directory with the checkpoint's files and manifest, not verified."""

    def remove(self, slot: Slot) -> None:
        """Delete a checkpoint, the manifest first."""

    def aside(self, slot: Slot, lineage: int) -> Slot:
        """Where a lineage's checkpoint is kept so that no other lineage can replace it."""

    def set_aside(self, slot: Slot, lineage: int) -> None:
        """Move a lineage's checkpoint there atomically and durably, unless it is there already."""

    def contents(self, slot: Slot, path: str) -> Iterator[bytes]:
        """A file of a checkpoint, piece by piece; no copy is stored."""

    def note(self, name: str) -> bytes | None:
        """The bytes of a small document stored next to the checkpoints; None if there is none."""

    def notes(self, folder: str) -> list[str]:
        """Names of the documents in a folder, without the folder's name, in no order."""

    def put_note(self, name: str, content: bytes) -> None:
        """Write a document atomically and durably, replacing one of that name."""

    def remove_note(self, name: str) -> None:
        """Delete a document, if there is one."""

    def __str__(self) -> str:
        """The location as text, from which ``open_storage`` opens it again."""


def open_storage(location: str | Path, cache: Path, patience: timedelta | None = None) -> CheckpointStorage:
    """The storage at a directory or an object store's URL.

    URLs: ``s3://bucket/prefix``, ``gs://…``, ``az://…``, ``memory://name``. Endpoint and credentials come from the
    usual environment (``AWS_ENDPOINT_URL``, ``AWS_ACCESS_KEY_ID`` …). ``cache`` holds files on their way to or from an
    object store. ``memory://`` lives as long as the process. ``patience``: how long a failed request is retried.

    Raises:
        SettingsError: the URL names no known store, or lacks something that the store needs.
    """
    if isinstance(location, str) and REMOTE.fullmatch(location):
        return open_objects(location, cache, patience or RETRY)
    return LocalStorage(Path(location))


def check_storage(location: str | Path) -> None:
    """Check, before a run relies on it, that the storage opens and can be listed.

    Raises:
        SettingsError: it cannot be opened, does not answer, or refuses access.
    """
    try:
        open_storage(location, Path(), CHECK_PATIENCE).claims()
    except OSError as error:
        raise SettingsError(
            f"expected to list training.checkpoint_location = {str(location)!r}, got: {error}; "
            "check the address, the network, and the credentials in the environment (AWS_..., GOOGLE_..., AZURE_...)"
        ) from error


CLAIMS = "lineages"
REPLACED = f"{TEMPORARY_PREFIX}old-"
LEFT_OVER = re.compile(rf"{re.escape(TEMPORARY_PREFIX)}(old-)?([0-9]+)-(step_.+)")
"""A directory that a writer of a lineage was still working on."""
NAMED = re.compile(r"step_([0-9]+)(?:-lineage_([0-9]+))?")
PIECE = 1 << 20


@dataclass(frozen=True)
class LocalStorage:
    """``root`` need not exist yet."""

    root: Path

    def __str__(self) -> str:
        return str(self.root)

    @property
    def scratch(self) -> Path:
        """The root: files are written next to the checkpoints."""
        return self.root

    def claims(self) -> list[int]:
        """Lineage numbers claimed so far, in no order."""
        return [int(path.stem) for path in (self.root / CLAIMS).glob("*.json") if path.stem.isdecimal()]

    def claim(self, number: int, content: bytes) -> bool:
        """Create the claim's file, which must not exist."""
        folder = self.root / CLAIMS
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{number}.json"
        try:
            with path.open("xb") as file:  # O_EXCL: the file system lets only one process create it
                file.write(content)  # for people: the name is the claim, so a crash before this leaves a valid one
        except FileExistsError:
            return False
        # A file's name is durable only once its directory is synced. Otherwise a power failure could undo the claim,
        # and another trainer could get the same number.
        for made in (path, folder, self.root):
            sync(made)
        return True

    def clear_leftovers(self, lineage: int) -> None:
        """Put back a checkpoint whose replacement never arrived, and delete unfinished writes."""
        for path in self.root.glob(f"{TEMPORARY_PREFIX}*"):
            found = LEFT_OVER.fullmatch(path.name)
            if found is not None and int(found[2]) >= lineage:
                continue
            # ``publish`` died between its two renames: the name is free, and the old checkpoint has a temporary name.
            if found is not None and found[1] and not (target := self.root / found[3]).exists():
                path.rename(target)
            else:
                self._take_away(path, f"{lineage}-{path.name.removeprefix(TEMPORARY_PREFIX)}")

    def slot(self, lineage: int, step: int) -> Slot:
        """One slot for each step: a newer lineage replaces the checkpoint of an abandoned one."""
        return Slot(f"step_{step}", step)

    def slots(self) -> list[Slot]:
        """Directories named as checkpoints."""
        named = ((path.name, NAMED.fullmatch(path.name)) for path in self.root.glob("step_*"))
        return [
            Slot(name, int(match[1]), None if match[2] is None else int(match[2]))
            for name, match in named
            if match is not None
        ]

    def address(self, slot: Slot) -> str:
        """The directory."""
        return str(self.root / slot.name)

    def manifest(self, slot: Slot) -> bytes | None:
        """The manifest's bytes, or none if there is none."""
        path = self.root / slot.name / STATE / MANIFEST
        try:
            with path.open("rb") as file:
                return file.read(MAX_MANIFEST_BYTES)  # a larger one is cut, and its seal does not match
        except (FileNotFoundError, NotADirectoryError):
            return None

    @contextmanager
    def staging(self, slot: Slot, lineage: int) -> Iterator[Path]:
        """A directory on the same file system, named after the lineage: two trainers never share one."""
        temporary = self.root / f"{TEMPORARY_PREFIX}{lineage}-{slot.name}"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        try:
            yield temporary
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def secure(self, staged: Path) -> None:
        """Sync the file."""
        sync(staged)

    def publish(self, slot: Slot, staged: Path, manifest: CheckpointManifest, fence: Callable[[], None]) -> Slot:
        """Sync manifest and directories, then rename; a checkpoint of an abandoned lineage is replaced."""
        written = staged / STATE / MANIFEST
        written.write_bytes(encode_manifest(manifest))
        # The manifest, then the directories that name the files: after this only the rename remains.
        for path in (written, *(path for path in staged.rglob("*") if path.is_dir()), staged):
            sync(path)
        fence()
        target, aside = self.root / slot.name, self.root / f"{REPLACED}{manifest.lineage}-{slot.name}"
        if target.exists():
            shutil.rmtree(aside, ignore_errors=True)
            target.rename(aside)
        try:
            fence()  # again: moving the old one aside may have taken long
            # If a newer trainer still publishes between these lines, this rename fails, because the directory is not
            # empty. The newer checkpoint stays.
            staged.rename(target)
        except Exception:
            if aside.exists() and not target.exists():
                aside.rename(target)
            raise
        # In this order: the old checkpoint is deleted only after the new one's name is on disk.
        sync(self.root)
        shutil.rmtree(aside, ignore_errors=True)
        return slot

    def fetch(self, slot: Slot, manifest: CheckpointManifest) -> Path:
        """The checkpoint's own directory: it is on this machine already."""
        return self.root / slot.name

    def remove(self, slot: Slot) -> None:
        """Rename it first, so that no half-deleted directory has a checkpoint's name."""
        self._take_away(self.root / slot.name, slot.name)

    def _take_away(self, path: Path, name: str) -> None:
        """Rename, then delete: a writer that still wants to publish this directory finds it missing, not half empty."""
        gone = self.root / f"{TEMPORARY_PREFIX}gone-{name}"
        shutil.rmtree(gone, ignore_errors=True)
        try:
            path.rename(gone)
        except FileNotFoundError:
            return
        shutil.rmtree(gone, ignore_errors=True)

    def aside(self, slot: Slot, lineage: int) -> Slot:
        """A directory with the lineage in its name; no trainer writes under such a name."""
        return Slot(f"step_{slot.step}-lineage_{lineage}", slot.step, lineage)

    def set_aside(self, slot: Slot, lineage: int) -> None:
        """Rename once, and sync."""
        aside = self.aside(slot, lineage)
        if slot != aside:
            (self.root / slot.name).rename(self.root / aside.name)
            sync(self.root)

    def contents(self, slot: Slot, path: str) -> Iterator[bytes]:
        """Read the file in place."""
        with (self.root / slot.name / path).open("rb") as file:
            while piece := file.read(PIECE):
                yield piece

    def note(self, name: str) -> bytes | None:
        """The file's bytes, if it is there."""
        try:
            return (self.root / f"{name}.json").read_bytes()
        except FileNotFoundError:
            return None

    def notes(self, folder: str) -> list[str]:
        """Names of the folder's files; none if the folder does not exist."""
        return [path.stem for path in (self.root / folder).glob("*.json") if not path.name.startswith(TEMPORARY_PREFIX)]

    def put_note(self, name: str, content: bytes) -> None:
        """Write a temporary file, sync it, and rename it once."""
        path = self.root / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        # A name of its own: two operators may write the same note at the same time.
        temporary = path.with_name(f"{TEMPORARY_PREFIX}{uuid.uuid4().hex}-{path.name}")
        temporary.write_bytes(content)
        sync(temporary)
        temporary.rename(path)
        for folder in {path.parent, self.root}:
            sync(folder)

    def remove_note(self, name: str) -> None:
        """Delete the file."""
        (self.root / f"{name}.json").unlink(missing_ok=True)


SCHEMES = ("s3://", "gs://", "az://")
MIN_PART_BYTES, MAX_UPLOAD_PARTS = 8 << 20, 9_000
"""Least bytes in a part of an upload, and most parts in one: S3 accepts 10,000 parts for an object."""
RETRY = timedelta(seconds=60)
"""How long a failed request is retried: a checkpoint may be late, but the trainer waits for it."""
CHECK_PATIENCE = timedelta(seconds=5)
"""The same for the check before a start: a user may be waiting at a terminal."""
CHECKPOINT = re.compile(r"(lineage_([0-9]+)/step_([0-9]+)(?:-[0-9]+)?)/.+")
STAGED = re.compile(rf"{re.escape(TEMPORARY_PREFIX)}lineage_([0-9]+)-step_[0-9]+(?:-[0-9]+)?")
RESTORED = "restored"
MEMORY = "memory://"
_memories: dict[str, MemoryStore] = {}  # by URL: opening it again in this process gives the same store


def open_objects(url: str, cache: Path, patience: timedelta) -> "ObjectStorage":
    """The storage of a URL; plain HTTP is allowed to this machine only, unless ``AWS_ALLOW_HTTP`` is ``true``.

    Raises:
        SettingsError: the URL names no known store, or lacks something that the store needs.
    """
    if url.startswith(MEMORY):
        return ObjectStorage(_memories.setdefault(url.rstrip("/"), MemoryStore()), url, cache)
    options: ClientConfig = {"allow_http": True} if _may_be_plain() else {}
    retry: RetryConfig = {"retry_timeout": patience}
    try:
        if not url.startswith(SCHEMES):
            raise ValueError("no such kind of store")
        store = from_url(url, client_options=options, retry_config=retry)
    except (BaseError, ValueError) as error:
        raise SettingsError(
            f"expected a directory or an s3://, gs:// or az:// URL of an object store, got {url!r}: {_line(error)}"
        ) from error
    return ObjectStorage(store, url, cache)


@dataclass(frozen=True)
class ObjectStorage:
    """``store`` is already narrowed to the URL's prefix; ``cache`` is a local directory for files in transit.

    ``_attempted``: names of slots that this process has uploaded to, even if the store lists nothing there.
    """

    store: ObjectStore
    url: str
    cache: Path
    _attempted: set[str] = field(default_factory=set, compare=False, repr=False)

    def __str__(self) -> str:
        return self.url

    @property
    def scratch(self) -> Path:
        """The cache: files are written there, then uploaded."""
        return self.cache

    def claims(self) -> list[int]:
        """Lineage numbers claimed so far, in no order."""
        names = (key.rpartition("/")[2].removesuffix(".json") for key in self._sizes(CLAIMS))
        return [int(name) for name in names if name.isdecimal()]

    def claim(self, number: int, content: bytes) -> bool:
        """Put an object that must not exist.

        Raises:
            SettingsError: the store overwrites an object where a create was requested, so claims are worthless.
        """
        key = f"{CLAIMS}/{number}.json"
        if not self._create(key, content):
            return False
        # Some S3 servers silently ignore the condition. A second create shows it, before two trainers own the run.
        if self._create(key, content):
            raise SettingsError(
                f"expected {self.url} to honour 'If-None-Match: *', but it overwrote {key}: "
                "two trainers could claim the same lineage; use a store with conditional writes"
            )
        return True

    def clear_leftovers(self, lineage: int) -> None:
        """Delete older lineages' files in the cache, and their uploads without a manifest."""
        for path in self.cache.glob(f"{TEMPORARY_PREFIX}lineage_*"):
            if (found := STAGED.fullmatch(path.name)) is not None and int(found[1]) < lineage:
                shutil.rmtree(path, ignore_errors=True)
        shutil.rmtree(self.cache / RESTORED, ignore_errors=True)
        self._sweep(self._uploads(), lineage)  # last: these credentials may lack the right to delete

    def slot(self, lineage: int, step: int) -> Slot:
        """A slot for each pair of lineage and step."""
        return Slot(f"lineage_{lineage}/step_{step}", step, lineage)

    def slots(self) -> list[Slot]:
        """Slots with a manifest; the others are unfinished uploads."""
        return [slot for slot, sizes in self._uploads().items() if self._is_finished(slot, sizes)]

    def address(self, slot: Slot) -> str:
        """The URL."""
        return f"{self.url.rstrip('/')}/{slot.name}"

    def manifest(self, slot: Slot) -> bytes | None:
        """The manifest's bytes, or none if there is none."""
        try:
            with _as_os_error():
                result = obstore.get(self.store, _manifest_key(slot))
                return bytes(result.bytes()) if result.meta["size"] <= MAX_MANIFEST_BYTES else b""
        except FileNotFoundError:
            return None

    @contextmanager
    def staging(self, slot: Slot, lineage: int) -> Iterator[Path]:
        """A directory in the cache."""
        with self._temporary(slot) as directory:
            yield directory

    def secure(self, staged: Path) -> None:
        """Nothing to do: ``publish`` uploads the file."""

    def publish(self, slot: Slot, staged: Path, manifest: CheckpointManifest, fence: Callable[[], None]) -> Slot:
        """Delete what failed attempts of this lineage left, upload the files, then create the manifest."""
        uploads = self._uploads(f"lineage_{slot.lineage}")
        with suppress(OSError):  # credentials that cannot delete may still write; no manifest names the leftovers
            self._sweep(uploads, manifest.lineage + 1)
        slot = self._unused(slot, uploads)
        for file in manifest.files:
            part = max(MIN_PART_BYTES, file.size // MAX_UPLOAD_PARTS)
            with _as_os_error():
                obstore.put(self.store, f"{slot.name}/{file.path}", staged / file.path, chunk_size=part)
        content = encode_manifest(manifest)
        fence()
        # If the answer to a create came too late, the retry may have found its own manifest there: that is success.
        if not self._create(_manifest_key(slot), content) and self.manifest(slot) != content:
            raise FileExistsError(f"a newer writer has cleared {self.address(slot)}, or written its own manifest there")
        return slot

    def fetch(self, slot: Slot, manifest: CheckpointManifest) -> Path:
        """Download into the cache."""
        target = self.cache / RESTORED / slot.name
        with self._temporary(slot) as directory:
            for file in manifest.files:
                self._download(f"{slot.name}/{file.path}", directory / file.path, file.size)
            self._download(_manifest_key(slot), directory / STATE / MANIFEST, MAX_MANIFEST_BYTES)
            shutil.rmtree(target, ignore_errors=True)
            target.parent.mkdir(parents=True, exist_ok=True)
            directory.rename(target)
        return target

    def remove(self, slot: Slot) -> None:
        """Delete the manifest, then everything else under the checkpoint's prefix."""
        self._delete([_manifest_key(slot)])
        self._delete(self._sizes(slot.name))

    def aside(self, slot: Slot, lineage: int) -> Slot:
        """The slot itself: no other lineage writes there."""
        return slot

    def set_aside(self, slot: Slot, lineage: int) -> None:
        """Nothing to do: it is there already."""

    def contents(self, slot: Slot, path: str) -> Iterator[bytes]:
        """Stream the object; nothing is stored."""
        with _as_os_error():
            for piece in obstore.get(self.store, f"{slot.name}/{path}").stream():
                yield bytes(piece)

    def note(self, name: str) -> bytes | None:
        """The object's bytes, if there is one."""
        try:
            with _as_os_error():
                return bytes(obstore.get(self.store, f"{name}.json").bytes())
        except FileNotFoundError:
            return None

    def notes(self, folder: str) -> list[str]:
        """Objects under the folder's prefix."""
        return [key.removeprefix(f"{folder}/").removesuffix(".json") for key in self._sizes(folder)]

    def put_note(self, name: str, content: bytes) -> None:
        """Write one object, which appears atomically."""
        with _as_os_error():
            obstore.put(self.store, f"{name}.json", content)

    def remove_note(self, name: str) -> None:
        """Delete the object."""
        self._delete([f"{name}.json"])

    @contextmanager
    def _temporary(self, slot: Slot) -> Iterator[Path]:
        directory = self.cache / f"{TEMPORARY_PREFIX}{slot.name.replace('/', '-')}"
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        try:
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    def _sweep(self, uploads: Mapping[Slot, Mapping[str, int]], before: int) -> None:
        """Delete unfinished uploads of lineages below ``before``; a mark at the manifest's key stays for good."""
        for slot, sizes in uploads.items():
            mark = _manifest_key(slot)
            pieces = [key for key in sizes if key != mark]
            if not pieces or (slot.lineage or 0) >= before or self._is_finished(slot, sizes):
                continue
            # A manifest may have arrived since the listing, or may arrive later. Creating the mark detects the first
            # case and prevents the second.
            if mark in sizes or self._create(mark, CLEARED) or self.manifest(slot) == CLEARED:
                self._delete(pieces)

    def _unused(self, slot: Slot, uploads: Iterable[Slot]) -> Slot:
        """The slot, or the next one of its step to which nothing was uploaded."""
        taken = self._attempted | {each.name for each in uploads}
        names = chain([slot.name], (f"{slot.name}-{attempt}" for attempt in count(2)))
        name = next(name for name in names if name not in taken)
        self._attempted.add(name)
        return replace(slot, name=name)

    def _uploads(self, prefix: str | None = None) -> dict[Slot, dict[str, int]]:
        """Objects under checkpoints' names: for each slot, bytes by key."""
        found: dict[Slot, dict[str, int]] = {}
        for key, size in self._sizes(prefix).items():
            if match := CHECKPOINT.match(key):
                found.setdefault(Slot(match[1], int(match[3]), int(match[2])), {})[key] = size
        return found

    def _is_finished(self, slot: Slot, sizes: Mapping[str, int]) -> bool:
        """Whether there is a manifest; ``sizes``: bytes of the slot's objects by key."""
        size = sizes.get(_manifest_key(slot))
        # The size nearly always tells a manifest from a mark, without a request.
        return size is not None and (size != len(CLEARED) or self.manifest(slot) != CLEARED)

    def _sizes(self, prefix: str | None = None) -> dict[str, int]:
        # Iterated to the end in here: each page of the listing is a request, which may fail.
        with _as_os_error():
            return {item["path"]: item["size"] for chunk in obstore.list(self.store, prefix) for item in chunk}

    def _create(self, key: str, content: bytes) -> bool:
        try:
            with _as_os_error():
                obstore.put(self.store, key, content, mode="create")
        except FileExistsError:
            return False
        return True

    def _delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            try:
                with _as_os_error():
                    obstore.delete(self.store, key)
            except FileNotFoundError:
                continue

    def _download(self, key: str, path: Path, most: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _as_os_error(), path.open("wb") as file:
            result = obstore.get(self.store, key)
            # Checked before the first byte: an object larger than its manifest says cannot verify, and could fill the
            # disk.
            if result.meta["size"] > most:
                raise OSError(f"expected at most {most} bytes in {key}, got {result.meta['size']}")
            for chunk in result.stream():
                file.write(chunk)


# ``CheckpointStorage`` promises OSError. Obstore's errors derive from Exception, except that a missing key raises a
# FileNotFoundError, whose text has several lines.
@contextmanager
def _as_os_error() -> Iterator[None]:
    try:
        yield
    except AlreadyExistsError as error:
        raise FileExistsError(_line(error)) from error
    except FileNotFoundError as error:
        raise FileNotFoundError(_line(error)) from error
    except BaseError as error:
        raise OSError(_line(error)) from error


def _line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _manifest_key(slot: Slot) -> str:
    return f"{slot.name}/{STATE}/{MANIFEST}"


def _may_be_plain() -> bool:
    host = urlsplit(environ.get("AWS_ENDPOINT_URL", "")).hostname or ""
    try:
        is_loopback = host == "localhost" or ip_address(host).is_loopback
    except ValueError:  # another host name, or none: it is not resolved
        is_loopback = False
    return is_loopback or environ.get("AWS_ALLOW_HTTP", "").lower() == "true"
