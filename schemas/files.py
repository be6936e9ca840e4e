"""Checksums of files, and writing a file atomically."""

import hashlib
import os
from pathlib import Path


def sha256_of(path: Path) -> str:
    """Checksum of a file's content, in hex.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_atomically(path: Path, text: str) -> None:
    """Write a text file atomically: a reader finds the old file or the new one, never a part of either.

    Raises:
        OSError: it cannot be written.
    """
    # The name has the process id, so that two processes that write at the same time use two files.
    new = path.with_name(f".{path.name}.{os.getpid()}.new")
    new.write_text(text)
    new.replace(path)
