"""``python -m deploy.images.health [ADDRESS]``: checks that this container's process answers; works for all roles.

Without an address it asks the metrics endpoint, which the process has noted in a file in the runs directory. Exit code
0: it answered. It imports only the standard library, because it runs every few seconds.
"""

import json
import os
import socket
import sys
import urllib.error
import urllib.request
from pathlib import Path

TIMEOUT_S = 15.0
"""With Python's start it stays within the time-out of the images' health checks; a busy machine is not unhealthy."""


def main(arguments: list[str]) -> int:
    """Check the endpoint and print one line about an error; returns the exit code."""
    host = os.environ.get("STREAMRL_METRICS__HOST") or os.environ.get("HOSTNAME") or socket.gethostname()
    address = arguments[0] if arguments else metrics_address(notes_directory(), host)
    if address is None:
        print(f"expected a file with the metrics address of {host} in {notes_directory()}, found none yet")
        return 1
    try:
        with urllib.request.urlopen(address, timeout=TIMEOUT_S):  # noqa: S310 - the address is the operator's own
            return 0
    except (urllib.error.URLError, OSError, ValueError) as error:
        print(f"expected an answer from {address}, got: {error}")
        return 1


def notes_directory() -> Path:
    """The directory in which the processes of all runs leave their addresses for Prometheus."""
    return Path(os.environ.get("STREAMRL_RUN__DIRECTORY", "runs")) / ".prometheus"


def metrics_address(notes: Path, host: str) -> str | None:
    """The metrics endpoint of the newest process on a host; None if there is no note of one."""
    # Newest first, because a restarted container has left notes of its earlier processes.
    for note in sorted(notes.glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True):
        for entry in json.loads(note.read_text()):
            for target in entry["targets"]:
                if target.rpartition(":")[0] == host:
                    return f"http://{target}/metrics"
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
