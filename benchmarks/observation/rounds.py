"""Pairs of stretches that share the machine's pace: two demos at once, or one whose viewers come and go."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from benchmarks.observation.trial import MAX_STEPS, METERED, Demo, Stretch, demo
from benchmarks.observation.viewers import dashboard, scraper, top

STRETCH_STEPS = 20
VISIT_STEPS = 40
"""Long beside the steps in which those who come settle, short beside the changes of the machine's pace."""


class Looked(NamedTuple):
    """A pair."""

    without: Stretch
    having: Stretch


def two_at_once(folder: Path, turn: int, seed: int, stretches: int) -> Iterator[Looked]:
    """A demo without endpoints beside one whose endpoints are scraped."""
    ways: dict[str, tuple[str, ...]] = {"metered": (METERED,), "plain": ()}
    with ExitStack() as stack, ThreadPoolExecutor() as pool:
        runs = {
            way: stack.enter_context(demo(folder, f"r{turn}-{way}", MAX_STEPS, seed, ways[way]))
            for way in sorted(ways, reverse=bool(turn % 2))
        }
        stack.enter_context(scraper(runs["metered"].path))
        for run in runs.values():
            run.settled()
        for _ in range(stretches):
            off, on = (pool.submit(runs[way].stretch, STRETCH_STEPS) for way in ("plain", "metered"))
            yield Looked(off.result(), on.result())


def looked_at_by_turns(folder: Path, turn: int, seed: int, pairs: int) -> Iterator[Looked]:
    """A demo whose endpoints are scraped, and viewers who come for every other stretch and go after it."""
    with ExitStack() as stack:
        run = stack.enter_context(demo(folder, f"r{turn}-viewed", MAX_STEPS, seed, (METERED,)))
        stack.enter_context(scraper(run.path))
        run.settled()
        for number in range(pairs):
            found = {}
            for looking in (True, False) if number % 2 else (False, True):
                found[looking] = _visited(run) if looking else run.stretch(VISIT_STEPS)
            yield Looked(found[False], found[True])


def _visited(run: Demo) -> Stretch:
    """What viewers cost who are there already; that they start and read what was before them is not measured."""
    with dashboard(run.path) as page, top(run.path) as terminal:
        run.settled()
        return run.stretch(VISIT_STEPS, (page, terminal))
