"""The trainer's store of weights as its relay reads it: complete versions, and leases on those that are read."""

import os
import re
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.weights import MANIFEST, complete_versions

log = structlog.get_logger()

LEASES = ".leases"
# A plain name of a kind that a model directory has: no path, no hidden file.
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}\.(safetensors|json|jinja|txt|model|delta)")


@dataclass
class WeightStore:
    """A directory with one sub-directory per version, named ``<lineage>-<number>``."""

    root: Path
    lease_s: float = 0.0
    clock: Callable[[], float] = time.monotonic
    _leased: dict[PolicyVersion, float] = field(default_factory=dict)
    _readers: Counter[PolicyVersion] = field(default_factory=Counter)
    _linking: threading.Lock = field(default_factory=threading.Lock)

    def find(self, version: str, name: str) -> Path | None:
        """The file to serve, or none if version or name is not plain, not complete, a link, or not there."""
        try:
            # Parsed and written anew: two numbers and a dash are all that gets from the URL into the path.
            wanted = PolicyVersion.parse(version)
        except ValueError:
            return None
        directory = self.root / str(wanted)
        if wanted in self._leased and not (directory / MANIFEST).is_file():
            directory = self.root / LEASES / str(wanted)
        if _NAME.fullmatch(name) is None or not (directory / MANIFEST).is_file():
            return None
        path = directory / name
        inside = path.resolve().is_relative_to(self.root.resolve())
        return path if inside and path.is_file() and not path.is_symlink() and not directory.is_symlink() else None

    @contextmanager
    def lease(self, version: PolicyVersion) -> Iterator[None]:
        """Somebody reads of a version: its files stay until ``lease_s`` later.

        The trainer knows nothing of readers and may delete it meanwhile; so the files are linked, which copies nothing.
        """
        self._readers[version] += 1
        try:
            yield
        finally:
            self._readers[version] -= 1
            if version in self._leased:
                self._leased[version] = self.clock()

    def keep(self, version: PolicyVersion) -> None:
        """Link the files of a version that is read, the first time. Blocks."""
        with self._linking:
            if version in self._leased or not self.lease_s:
                return
            kept = self.root / LEASES / str(version)
            shutil.rmtree(kept, ignore_errors=True)
            try:
                kept.mkdir(parents=True)
                # The manifest last: then whatever it names is there.
                for path in sorted((self.root / str(version)).iterdir(), key=lambda path: path.name == MANIFEST):
                    os.link(path, kept / path.name)
            except OSError as error:  # deleted at this moment, or a disk without links
                log.info("weights not leased", version=str(version), error=str(error))
            else:
                self._leased[version] = self.clock()

    def tidy(self) -> None:
        """Let go of what nobody has read of for the length of a lease, and of what an earlier process held."""
        now = self.clock()
        with self._linking:
            for version, read_at in list(self._leased.items()):
                if not self._readers[version] and now - read_at >= self.lease_s:
                    del self._leased[version]
            for kept in (self.root / LEASES).glob("*"):
                if kept.name not in map(str, self._leased):
                    shutil.rmtree(kept, ignore_errors=True)

    def release(self) -> None:
        """Let go of everything, once nobody can read any more: another process may never come and do it."""
        with self._linking:
            self._leased.clear()
            shutil.rmtree(self.root / LEASES, ignore_errors=True)

    def is_gone(self, version: str) -> bool:
        """Whether a version is not there, and newer ones are: it was deleted and will not come back."""
        try:
            wanted = PolicyVersion.parse(version)
        except ValueError:
            return False
        there = self.versions()
        return wanted not in there and bool(there) and wanted < there[-1]

    def versions(self) -> list[PolicyVersion]:
        """Complete versions, oldest first."""
        return complete_versions(self.root)
