"""The trainer's weights store, as the relay next to it reads it: complete versions, and leases on versions in use."""

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
# Plain names of files in a model directory: no paths, no hidden files.
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}\.(safetensors|json|jinja|txt|model|delta)")


@dataclass
class WeightStore:
    """A directory with one sub-directory per version, named ``<lineage>-<number>``.

    ``lease_s``: seconds for which a version's files stay after a read, if ``keep`` linked them; 0: no leases.
    """

    root: Path
    lease_s: float = 0.0
    clock: Callable[[], float] = time.monotonic
    _leased: dict[PolicyVersion, float] = field(default_factory=dict)
    _readers: Counter[PolicyVersion] = field(default_factory=Counter)
    _linking: threading.Lock = field(default_factory=threading.Lock)

    def find(self, version: str, name: str) -> Path | None:
        """The file to serve; None if a name is malformed, the version incomplete, or the file missing or a link."""
        try:
            # Parsed and formatted again: only two numbers and a dash get from the URL into the path.
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
        """Count a reader during the block. The version's files stay during it, and ``lease_s`` after its end.

        Call ``keep`` before the read: the trainer does not know the readers and may delete the version at any time. So
        the relay keeps hard links to the files, which copies nothing.
        """
        self._readers[version] += 1
        try:
            yield
        finally:
            self._readers[version] -= 1
            if version in self._leased:
                self._leased[version] = self.clock()

    def keep(self, version: PolicyVersion) -> None:
        """Make the hard links to a version's files, if there are none yet. Blocks: it waits for the disk."""
        with self._linking:
            if version in self._leased or not self.lease_s:
                return
            kept = self.root / LEASES / str(version)
            shutil.rmtree(kept, ignore_errors=True)
            try:
                kept.mkdir(parents=True)
                # The manifest last: once it is there, all files that it names are.
                for path in sorted((self.root / str(version)).iterdir(), key=lambda path: path.name == MANIFEST):
                    os.link(path, kept / path.name)
            except OSError as error:  # the version was deleted just now, or the disk has no links
                log.info("weights not leased", version=str(version), error=str(error))
            else:
                self._leased[version] = self.clock()

    def tidy(self) -> None:
        """Delete the links to versions whose leases have expired, and the links that an earlier process left."""
        now = self.clock()
        with self._linking:
            for version, read_at in list(self._leased.items()):
                if not self._readers[version] and now - read_at >= self.lease_s:
                    del self._leased[version]
            for kept in (self.root / LEASES).glob("*"):
                if kept.name not in map(str, self._leased):
                    shutil.rmtree(kept, ignore_errors=True)

    def release(self) -> None:
        """Delete all links. Call it when the relay stops serving: maybe no later process cleans up."""
        with self._linking:
            self._leased.clear()
            shutil.rmtree(self.root / LEASES, ignore_errors=True)

    def is_gone(self, version: str) -> bool:
        """Whether a version is missing while newer ones are there: it was deleted and will not come back."""
        try:
            wanted = PolicyVersion.parse(version)
        except ValueError:
            return False
        complete = self.versions()
        return wanted not in complete and bool(complete) and wanted < complete[-1]

    def versions(self) -> list[PolicyVersion]:
        """Complete versions, oldest first."""
        return complete_versions(self.root)
