import asyncio
import json

from streamrl.inspection.dashboard.updates import SLOW, UpdateStream
from streamrl.observability.run_state.pace import OFTEN_S
from streamrl.observability.run_state.state import RunState
from tests.schemas.examples import examples


async def test_the_state_is_rendered_once_for_all_browsers() -> None:
    clock = [1000.0]
    stream, stop = UpdateStream(RunState("r"), lambda: clock[0]), asyncio.Event()
    first, second = stream.updates(stop), stream.updates(stop)
    one, two = await anext(first), await anext(second)
    assert one == two
    assert stream._tick == 1
    await first.aclose()
    await second.aclose()


async def test_only_what_changed_is_sent_and_slow_sections_wait_for_their_turn() -> None:
    clock = [1000.0]
    stream, stop = UpdateStream(RunState("r"), lambda: clock[0]), asyncio.Event()
    updates = stream.updates(stop)
    assert "curves" in await anext(updates)
    stream.state.observe_message(examples()["step-report"].replace(finished=False, sent_at=1000.0))
    turns = []
    for _ in range(SLOW["curves"] + 1):
        clock[0] += OFTEN_S
        turns.append(json.loads((await anext(updates)).removeprefix("data: ")))
    assert all("loop" in turn for turn in turns[:1])
    assert sum("curves" in turn for turn in turns) == 1
    assert not any("lengths" in turn for turn in turns)
    stop.set()
    assert [event async for event in updates] == []
