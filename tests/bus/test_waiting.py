import asyncio

import pytest

from bus.waiting import happens_within


async def test_what_happens_is_seen_at_once_and_what_does_not_is_waited_for_so_long() -> None:
    event, loop = asyncio.Event(), asyncio.get_running_loop()
    began = loop.time()
    assert not await happens_within(event, 0.05)
    assert 0.04 < loop.time() - began < 2
    loop.call_later(0.01, event.set)
    assert await happens_within(event, 60)
    assert await happens_within(event, 0.0)
    assert loop.time() - began < 10


async def test_a_cancellation_is_none_of_its_time_outs() -> None:
    waiting = asyncio.create_task(happens_within(asyncio.Event(), 60))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
