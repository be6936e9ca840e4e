"""Those who look at a run: a scraper of its metrics, a browser's stream of the dashboard, a terminal with `top`."""

import os
import pty
import re
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from streamrl.inspection.dashboard.server import LOOPBACK

SCRAPE_S = 10.0
"""As ``deploy/grafana/prometheus.yaml`` has it."""
END_S = 10
CHUNK = 1 << 16
TERMINAL = {"TERM": "xterm-256color", "COLUMNS": "140", "LINES": "45"}


@contextmanager
def scraper(run: Path) -> Iterator[None]:
    """Read every endpoint that the run's processes tell of, as Prometheus does."""
    over = threading.Event()

    def scrape() -> None:
        while not over.wait(SCRAPE_S):
            for note in run.parent.glob(".prometheus/*.json"):
                with suppress(OSError):  # its process has just ended
                    for target in re.findall(r'"([\d.]+:\d+)"', note.read_text()):
                        urllib.request.urlopen(f"http://{target}/metrics", timeout=SCRAPE_S).read()

    with _thread(scrape, over):
        yield


@contextmanager
def dashboard(run: Path) -> Iterator[int]:
    """``streamrl ui`` with one page open, its process id; what the page costs its browser is not of this machine."""
    command = [sys.executable, "-m", "streamrl.cli.app", "ui", "--run", str(run), "--port", "0", "--no-open"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as serving:
        try:
            assert serving.stdout is not None
            found = re.search(rf"http://({'|'.join(map(re.escape, LOOPBACK))}):\d+/", serving.stdout.readline())
            if found is None:
                raise RuntimeError("expected the dashboard to say where it is, got nothing")
            updates = urllib.request.urlopen(f"{found[0]}api/updates", timeout=60)  # noqa: S310 — checked above
            with updates as stream, _drained(stream.read1):
                yield serving.pid
        finally:
            _end(serving)


@contextmanager
def top(run: Path) -> Iterator[int]:
    """``streamrl top`` on a terminal of its own; its process id."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "streamrl.cli.app", "top", "--run", str(run)]
    with (
        os.fdopen(ours, "rb", buffering=0) as screen,
        subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env={**os.environ, **TERMINAL}) as shown,
    ):
        os.close(theirs)
        with _drained(screen.read):
            try:
                yield shown.pid
            finally:
                _end(shown)


@contextmanager
def _drained(read: Callable[[int], bytes]) -> Iterator[None]:
    """Read a stream to its end in a thread, as whoever looks does."""

    def drain() -> None:
        with suppress(OSError, ValueError, AttributeError):  # what reading raises while another thread closes
            while read(CHUNK):
                pass

    threading.Thread(target=drain, daemon=True).start()
    yield


@contextmanager
def _thread(work: Callable[[], None], over: threading.Event) -> Iterator[None]:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(END_S)


def _end(process: "subprocess.Popen[str] | subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
