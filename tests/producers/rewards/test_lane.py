import asyncio

import pytest

from producers.rewards.runner import Job, offenders


@pytest.fixture
async def jobs() -> list[Job]:
    loop = asyncio.get_running_loop()
    return [Job(number, b"", loop.create_future()) for number in range(3)]


async def test_of_a_synchronous_function_the_first_unanswered_job_is_to_blame(jobs: list[Job]) -> None:
    assert offenders(jobs, is_async=False) == (jobs[:1], [])


async def test_of_several_async_jobs_all_are_only_suspects(jobs: list[Job]) -> None:
    assert offenders(jobs, is_async=True) == ([], jobs)


async def test_an_async_job_alone_is_to_blame(jobs: list[Job]) -> None:
    assert offenders(jobs[1:2], is_async=True) == (jobs[1:2], [])


async def test_nobody_is_to_blame_when_nothing_ran() -> None:
    assert offenders([], is_async=False) == ([], [])
