import asyncio
import json
import time

import pytest

from streamrl.inspection.terminal.command import LineOptions, print_lines
from streamrl.observability.run_state.feed import RunFeed
from streamrl.observability.run_state.state import RunState
from tests.observability.run_state.made_up_run import MadeUpRun
from tests.observability.run_state.writing import append, topics_of
from tests.progress import patience

RUN = "printed"


def a_feed() -> RunFeed:
    bus, now = topics_of(RUN), time.time()
    for happening in MadeUpRun(now - 20).happenings():
        if happening.at > now:
            break
        append(bus, RUN, happening)
    return RunFeed(bus, RunState(RUN))


async def printed(options: LineOptions, capsys: pytest.CaptureFixture[str], seconds: float = 5.0) -> list[str]:
    feed, stop = a_feed(), asyncio.Event()
    reading = asyncio.create_task(feed.run(stop))
    asyncio.get_running_loop().call_later(seconds, stop.set)
    await print_lines(feed, options, stop)
    stop.set()
    await reading
    return capsys.readouterr().out.splitlines()


async def test_once_is_one_line_with_the_past_in_it(capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = await printed(LineOptions(once=True), capsys)
    assert line.startswith(f"{RUN} running  step ")
    assert "step 0" not in line


async def test_a_line_comes_every_interval_until_stopped(capsys: pytest.CaptureFixture[str]) -> None:
    lines = await printed(LineOptions(interval_s=0.1, as_json=True), capsys, seconds=0.8)
    assert 3 <= len(lines) <= 9
    objects = [json.loads(line) for line in lines]
    assert all(each["run"] == RUN and each["loop"]["step"] > 0 for each in objects)
    assert objects[0]["events"]
    assert not objects[1]["events"]


async def test_the_end_of_the_run_is_the_end_of_its_lines(capsys: pytest.CaptureFixture[str]) -> None:
    feed, stop = a_feed(), asyncio.Event()
    reading = asyncio.create_task(feed.run(stop))
    asyncio.get_running_loop().call_later(0.4, setattr, feed.state.progress, "finished", True)
    async with patience(5):
        await print_lines(feed, LineOptions(interval_s=0.1), stop)
    stop.set()
    await reading
    assert "finished" in capsys.readouterr().out.splitlines()[-1]
