"""The last version's wire, beside today's: its package ``streamrl.schemas`` stands in ``last_version.zip``.

``python -m tests.contract.last_version COMMIT`` puts another version there, when one is released.
"""

import functools
import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import streamrl.schemas.codec

ARCHIVE = Path(__file__).parent / "last_version.zip"
MODULES = ("codec", "control", "messages")


class LastVersion(NamedTuple):
    """Its ``schemas.codec`` and ``schemas.control``, and its wire version."""

    codec: ModuleType
    control: ModuleType
    wire: int


@functools.cache
def last_version() -> LastVersion:
    """What the archive holds, imported once."""
    ours = _modules()
    for name in ours:
        del sys.modules[name]
    path, schemas = streamrl.__path__, streamrl.schemas
    streamrl.__path__ = [str(ARCHIVE / "streamrl")]
    try:
        codec, control, messages = (importlib.import_module(f"streamrl.schemas.{name}") for name in MODULES)
        return LastVersion(codec, control, messages.WIRE_VERSION)
    finally:
        streamrl.__path__, streamrl.schemas = path, schemas
        for name in _modules():
            del sys.modules[name]
        sys.modules.update(ours)


def _modules() -> dict[str, ModuleType]:
    return {name: module for name, module in sys.modules.items() if name.startswith("streamrl.schemas")}


def record(commit: str) -> None:
    """Archive a version's package; git writes the commit into the archive's comment."""
    prefix, output = "--prefix=streamrl/", f"--output={ARCHIVE}"
    subprocess.run(["git", "archive", "--format=zip", "-9", prefix, output, commit, "schemas"], check=True)


if __name__ == "__main__":
    record(sys.argv[1])
