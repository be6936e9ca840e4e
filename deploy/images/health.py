"""``python -m deploy.images.health``: whether the process of this container answers. Knows no role.

Without an argument it asks the metrics endpoint, whose address the process left in a note in the runs directory; with
one, that address. Exit code 0: it answered. Imports nothing but the standard library: it runs every few seconds.
"""

import json
import os
import socket
import sys
import urllib.error
import urllib.request
from pathlib import Path

TIMEOUT_S = 15.0
"""Together with the start of a Python, within that of the images' health checks: a machine that is busy is not ill."""


def main(arguments: list[str]) -> int:
    """Ask, and say in a line what is wrong."""
    host = os.environ.get("STREAMRL_METRICS__HOST") or os.environ.get("HOSTNAME") or socket.gethostname()
    address = arguments[0] if arguments else metrics_address(notes_directory(), host)
    if address is None:
        print(f"expected a note of the metrics of {host} in {notes_directory()}, found none yet")
        return 1
    try:
        with urllib.request.urlopen(address, timeout=TIMEOUT_S):  # noqa: S310 - the address is the operator's own
            return 0
    except (urllib.error.URLError, OSError, ValueError) as error:
        print(f"expected an answer from {address}, got: {error}")
        return 1


def notes_directory() -> Path:
    """Where the processes of all runs leave notes for Prometheus."""
    return Path(os.environ.get("STREAMRL_RUN__DIRECTORY", "runs")) / ".prometheus"


def metrics_address(notes: Path, host: str) -> str | None:
    """The endpoint that a process on a host told of last."""
    # Newest first: a container that was restarted has left the notes of its earlier lives.
    for note in sorted(notes.glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True):
        for entry in json.loads(note.read_text()):
            for target in entry["targets"]:
                if target.rpartition(":")[0] == host:
                    return f"http://{target}/metrics"
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
