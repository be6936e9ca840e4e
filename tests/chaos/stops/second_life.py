"""Starts a role again after it was stopped or cancelled, and checks that it goes on."""

import asyncio
from collections.abc import Awaitable, Callable

from tests.chaos.stops.moment import END_S

LONGEST_S = 15.0
"""A second life has this long to finish what the first one left."""


async def second_life(
    run: Callable[[asyncio.Event], Awaitable[None]],
    load: Callable[[], Awaitable[None]],
    left_to_do: Callable[[], list[str]],
    longest_s: float = LONGEST_S,
) -> list[str]:
    """Run the role again under load until nothing is left to do, then stop it; return the problems.

    ``left_to_do``: one sentence for each thing that the second life has still to do. A sentence that is left after
    ``longest_s`` seconds is a problem.
    """
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    running, playing = asyncio.ensure_future(run(stop)), asyncio.ensure_future(load())
    deadline = loop.time() + longest_s
    while (left := left_to_do()) and not (running.done() or playing.done()) and loop.time() < deadline:
        await asyncio.sleep(0.01)
    stop.set()
    await asyncio.wait({running}, timeout=END_S)
    problems = [f"a second life: {one}" for one in left]
    if not running.done():
        problems.append(f"a second life does not end within {END_S} s")
    for name, task in (("a second life", running), ("its load", playing)):
        task.cancel()
        await asyncio.wait({task}, timeout=END_S)
        if task.done() and not task.cancelled() and (error := task.exception()) is not None:
            problems.insert(0, f"{name} ended with {error!r:.500}")
    return problems
