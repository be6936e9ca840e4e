"""The live view on the terminal of `streamrl run`, while the run goes on behind it.

The view is a process of its own, so that neither its work nor its end concerns the run. While it has the terminal, what
the run would print goes to ``logs/run.log``.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from settings.run_directory import RunDirectory

LEAVING_S = 5.0
LOG = "run.log"
INTERRUPTED = 130
"""Exit code of a view that was left by Ctrl-C."""

Progress = Callable[[asyncio.Event], Awaitable[None]]


async def watch(directory: RunDirectory, address: str, progress: Progress, stop: asyncio.Event) -> None:
    """Show the live view, if there is a terminal; once it is left, or without one, the run's own progress.

    Consumes: nothing; the view reads the run's topics. Produces: what the two show.
    Waits for: the view's end, or the run's. On failure: a view that ends badly is left. On stop: ends the view.
    Ctrl-C in the view is meant for the run.
    """
    if is_screen():
        command = (sys.executable, "-m", "streamrl.cli.app", "top", str(directory.path))
        view = await asyncio.create_subprocess_exec(*command, f"--bootstrap-servers={address}")
        with printing_into(directory.logs / LOG):
            await _ended(view, stop)
        if view.returncode == INTERRUPTED:
            signal.raise_signal(signal.SIGINT)
    await progress(stop)


def is_screen() -> bool:
    """Whether there is a terminal that can show more than lines."""
    return sys.stdout.isatty() and sys.stdin.isatty() and os.environ.get("TERM", "dumb") != "dumb"


@contextmanager
def printing_into(path: Path) -> Iterator[None]:
    """Within, this process's standard output and error are appended to a file."""
    _flush()
    kept = os.dup(1), os.dup(2)
    with path.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        _flush()
        for number, original in enumerate(kept, 1):
            os.dup2(original, number)
            os.close(original)


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()


async def _ended(view: asyncio.subprocess.Process, stop: asyncio.Event) -> None:
    ends = {asyncio.create_task(view.wait()), asyncio.create_task(stop.wait())}
    try:
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if view.returncode is None:
            view.terminate()
            await asyncio.wait_for(view.wait(), LEAVING_S)
    except TimeoutError:
        view.kill()
    finally:
        for task in ends:
            task.cancel()
        await asyncio.gather(*ends, return_exceptions=True)
