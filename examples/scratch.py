"""The directory in which an example works."""

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def working_directory() -> Iterator[Path]:
    """The directory that the command line names, made if it is missing; without one, a temporary directory."""
    if len(sys.argv) > 1:
        # Absolute, because the run's settings store paths below it, and the notebook reads them from another directory.
        directory = Path(sys.argv[1]).absolute()
        directory.mkdir(parents=True, exist_ok=True)
        yield directory
    else:
        with tempfile.TemporaryDirectory(prefix="streamrl-example-") as scratch:
            print(f"working in {scratch}, which is deleted at the end; to keep the run, name a directory")
            yield Path(scratch)
