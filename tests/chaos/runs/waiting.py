"""Waiting for the processes of a run, and what of them is left at its end."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from streamrl.deploy.local.supervisor import Child

TICK_S = 0.05


class FleetFailed(AssertionError):
    """A process could not be kept alive, or did not do in time what it should have done."""


async def tick() -> None:
    """Let the others work."""
    await asyncio.sleep(TICK_S)


async def until(
    condition: Callable[[], bool], what: str, timeout_s: float, meanwhile: Callable[[], Awaitable[object]] = tick
) -> None:
    """Return once the condition holds; ``meanwhile`` is done again and again before.

    Raises:
        FleetFailed: it did not come to hold in time; or whatever ``meanwhile`` raises.
    """
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise FleetFailed(f"no {what} in {timeout_s:g} s")
        await meanwhile()


def expect_running(*children: Child) -> None:
    """Raise FleetFailed if one of these processes has ended."""
    for child in children:
        if (code := child.process.returncode) is not None:
            raise FleetFailed(f"{child.spec.name} ended by itself with {code}: {child.last_line()}")


def processes_with(mark: str) -> dict[int, str]:
    """The command lines of all processes in whose environment this text is, by pid."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in path.read_bytes():
                found[int(path.parent.name)] = (path.parent / "cmdline").read_text().replace("\0", " ")
        except OSError:
            continue  # it has ended, or is a stranger's
    return found
