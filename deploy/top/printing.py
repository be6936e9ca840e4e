"""Prints a line for every interval, until the run is finished or nobody reads any more."""

import asyncio
import json
import time
from dataclasses import dataclass

from deploy.live.feed import LiveFeed
from deploy.top.lines import line_of, object_of

CATCHING_UP_S = 0.05
LAG_WITHIN_S = 3.0


@dataclass(frozen=True)
class Manner:
    """``once``: one line, then the end."""

    interval_s: float = 2.0
    as_json: bool = False
    once: bool = False


async def print_lines(feed: LiveFeed, manner: Manner, stop: asyncio.Event) -> None:
    """Print what the feed's state says.

    Consumes: the state, which the feed updates. Produces: text on standard output.
    Waits for: the feed's past and the first lag, then for each interval.
    On failure: raises. On stop: prints nothing more; a finished run ends it after its last line.
    """
    await _caught_up(feed, stop)
    told = 0
    while not stop.is_set():
        now = feed.state.moment(time.time())
        feed.state.tick(now)
        if manner.as_json:
            print(json.dumps(object_of(feed.state, now, told), separators=(",", ":"), allow_nan=False), flush=True)
            told = feed.state.log.numbered
        else:
            print(line_of(feed.state, now), flush=True)
        if manner.once or feed.state.finished:
            return
        await stopped_within(stop, manner.interval_s)


async def _caught_up(feed: LiveFeed, stop: asyncio.Event) -> None:
    while not feed.positions and not stop.is_set():
        await stopped_within(stop, CATCHING_UP_S)
    if feed.committed is None or feed.shards is None:
        return
    until = time.monotonic() + LAG_WITHIN_S
    while not feed.state.unfinished and time.monotonic() < until and not stop.is_set():
        await stopped_within(stop, CATCHING_UP_S)


async def stopped_within(stop: asyncio.Event, seconds: float) -> None:
    """Wait so long, or until stopped."""
    try:
        await asyncio.wait_for(stop.wait(), seconds)
    except TimeoutError:
        return
