import asyncio

import pytest

from streamrl.producers.rewards.runner import RewardCall, failed_and_suspect_calls


@pytest.fixture
async def calls() -> list[RewardCall]:
    loop = asyncio.get_running_loop()
    return [RewardCall(number, b"", loop.create_future()) for number in range(3)]


async def test_the_first_unanswered_call_of_a_synchronous_function_is_blamed(calls: list[RewardCall]) -> None:
    assert failed_and_suspect_calls(calls, is_async=False) == (calls[:1], [])


async def test_all_concurrent_async_calls_are_only_suspects(calls: list[RewardCall]) -> None:
    assert failed_and_suspect_calls(calls, is_async=True) == ([], calls)


async def test_an_async_call_alone_is_to_blame(calls: list[RewardCall]) -> None:
    assert failed_and_suspect_calls(calls[1:2], is_async=True) == (calls[1:2], [])


async def test_no_call_is_blamed_when_none_ran() -> None:
    assert failed_and_suspect_calls([], is_async=False) == ([], [])
