"""The last version's wire, beside today's: its package ``schemas`` stands in ``last_version.zip``, as git archived it.

``python -m tests.contract.last_version COMMIT`` puts another version there, when one is released.
"""

import functools
import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

ARCHIVE = Path(__file__).parent / "last_version.zip"
MODULES = ("codec", "control", "messages")


class LastVersion(NamedTuple):
    """Its ``schemas.codec`` and ``schemas.control``, and its wire version: 1 where it says none."""

    codec: ModuleType
    control: ModuleType
    wire: int


@functools.cache
def last_version() -> LastVersion:
    """What the archive holds, imported once."""
    ours = _modules()
    for name in ours:
        del sys.modules[name]
    sys.path.insert(0, str(ARCHIVE))
    try:
        codec, control, messages = (importlib.import_module(f"schemas.{name}") for name in MODULES)
        return LastVersion(codec, control, getattr(messages, "WIRE_VERSION", 1))
    finally:
        sys.path.remove(str(ARCHIVE))
        for name in _modules():
            del sys.modules[name]
        sys.modules.update(ours)


def _modules() -> dict[str, ModuleType]:
    return {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "schemas"}


def record(commit: str) -> None:
    """Archive a version's package; git writes the commit into the archive's comment."""
    subprocess.run(["git", "archive", "--format=zip", "-9", "-o", str(ARCHIVE), commit, "schemas"], check=True)


if __name__ == "__main__":
    record(sys.argv[1])
