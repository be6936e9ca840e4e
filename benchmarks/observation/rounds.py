"""Pairs of stretches that share the machine's pace: two demos at once, or one whose viewers are stopped by turns."""

import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import psutil

from benchmarks.observation.trial import MAX_STEPS, METERED, Stretch, demo
from benchmarks.observation.viewers import dashboard, scraper, top

STRETCH_STEPS = 20
BLOCK_STEPS = 5
"""So short that the machine keeps its pace from one block to the next."""


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
    """A demo whose endpoints are scraped, with viewers that are stopped every other stretch.

    What comes while they are stopped is read besides when they go on, so this is rather more than their cost.
    """
    with ExitStack() as stack:
        run = stack.enter_context(demo(folder, f"r{turn}-viewed", MAX_STEPS, seed, (METERED,)))
        viewers = [stack.enter_context(viewer(run.path)) for viewer in (dashboard, top)]
        stack.enter_context(scraper(run.path))
        stack.callback(_send, viewers, signal.SIGCONT)
        run.settled()
        for number in range(pairs):
            found = {}
            for looking in (True, False) if number % 2 else (False, True):
                _send(viewers, signal.SIGCONT if looking else signal.SIGSTOP)
                found[looking] = run.stretch(BLOCK_STEPS, viewers)
            yield Looked(found[False], found[True])


def _send(processes: Sequence[int], what: signal.Signals) -> None:
    """To those who do the work; who waits for them waits on."""
    for process in processes:
        for one in (psutil.Process(process), *psutil.Process(process).children()):
            one.send_signal(what)
