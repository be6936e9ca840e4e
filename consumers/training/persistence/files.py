"""Directories that appear whole or not at all, and checksums of files."""

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TEMPORARY = ".tmp-"


def sha256_of(path: Path) -> str:
    """Checksum of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def appearing_directory(target: Path) -> Iterator[Path]:
    """A temporary directory that becomes ``target`` when the block ends well, replacing what was there.

    Not synced to the disk.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.parent / f"{TEMPORARY}{target.name}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        shutil.rmtree(target, ignore_errors=True)
        temporary.rename(target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def sync(path: Path) -> None:
    """Force a file or directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_leftovers(parent: Path) -> None:
    """Delete temporary directories of a process that died while writing."""
    for path in parent.glob(f"{TEMPORARY}*"):
        shutil.rmtree(path, ignore_errors=True)
