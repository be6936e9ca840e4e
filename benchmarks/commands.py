"""Commands as a user would have them, in processes of their own."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
STREAMRL = (sys.executable, "-m", "streamrl.cli.app")


def output_of(
    command: Sequence[str], environment: Mapping[str, str] | None = None, timeout_s: float | None = None
) -> str:
    """What a command writes, run from the repository's root; ``environment``: beside this process's own.

    Raises:
        RuntimeError: it failed; the text ends with its last words.
        subprocess.TimeoutExpired: it took longer than that.
    """
    ended = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    if ended.returncode:
        said = ended.stdout[-2000:] + ended.stderr[-2000:]
        raise RuntimeError(f"{' '.join(command)} failed with exit code {ended.returncode}: {said}")
    return ended.stdout


def audited(directory: Path, servers: str) -> dict[str, Any]:
    """What ``streamrl audit`` says of the run in a directory, whose topics these servers hold.

    Raises:
        RuntimeError: the books do not balance, or it failed.
    """
    command = [*STREAMRL, "audit", "--run", str(directory.resolve()), "--json"]
    found: dict[str, Any] = json.loads(output_of(command, {"STREAMRL_KAFKA__BOOTSTRAP_SERVERS": servers}))
    return found
