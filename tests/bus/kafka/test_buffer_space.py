import asyncio

import pytest

from streamrl.bus.kafka.publisher import BufferSpace


async def test_space_is_granted_in_the_order_in_which_it_was_asked_for() -> None:
    space = BufferSpace(10)
    assert space.take(8)
    granted: list[int] = []

    async def ask(size: int) -> None:
        await space.wait(size, 5)
        granted.append(size)

    tasks = [asyncio.create_task(ask(size)) for size in (6, 1, 2)]
    await asyncio.sleep(0)
    assert not space.take(1), "a newcomer does not overtake those who wait"
    space.release(8)
    await asyncio.gather(*tasks)
    assert granted == [6, 1, 2]
    assert space.used == 9


async def test_a_piece_larger_than_the_limit_gets_in_when_nothing_else_is_held() -> None:
    space = BufferSpace(10)
    assert space.take(25)
    assert not space.take(1)
    space.release(25)
    assert space.take(1)


async def test_a_wait_that_times_out_takes_nothing_and_lets_the_next_in() -> None:
    space = BufferSpace(10)
    space.take(6)
    large = asyncio.create_task(space.wait(8, 0.02))
    small = asyncio.create_task(space.wait(4, 5))
    with pytest.raises(TimeoutError):
        await large
    await small
    assert space.used == 10


async def test_a_wait_cancelled_just_when_it_is_granted_gives_the_space_back() -> None:
    space = BufferSpace(10)
    space.take(10)
    waiting = asyncio.create_task(space.wait(10, 5))
    await asyncio.sleep(0)
    space.release(10)
    waiting.cancel()
    await asyncio.wait([waiting])
    assert space.used == 0
