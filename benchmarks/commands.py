"""``streamrl audit`` of a run, as a user would have it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def audited(directory: Path, servers: str) -> dict[str, Any]:
    """What it says of the run in a directory, whose topics these servers hold.

    Raises:
        RuntimeError: the books do not balance, or it failed.
    """
    command = [sys.executable, "-m", "streamrl.cli.app", "audit", str(directory), "--json"]
    environment = {**os.environ, "STREAMRL_KAFKA__BOOTSTRAP_SERVERS": servers}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        said = ended.stdout[-4000:] + ended.stderr[-4000:]
        raise RuntimeError(f"expected a balanced audit, got exit code {ended.returncode}: {said}")
    found: dict[str, Any] = json.loads(ended.stdout)
    return found
