"""Files that are compared by their content, or written whole."""

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


def write_whole(path: Path, text: str) -> None:
    """Put a text in its place at once: a reader finds the old file or the new one, never a part of either.

    Raises:
        OSError: it cannot be written.
    """
    # By process: two that write at the same time do not write one file.
    new = path.with_name(f".{path.name}.{os.getpid()}.new")
    new.write_text(text)
    new.replace(path)
