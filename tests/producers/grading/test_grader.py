import asyncio
from collections import Counter
from collections.abc import AsyncIterator

import pytest

from streamrl.bus.port import Outgoing, TopicPartition
from streamrl.producers.grading.grader import POLL_S
from streamrl.schemas.codec import CONTINUATIONS_HEADER
from streamrl.schemas.errors import RewardLoadError
from streamrl.schemas.topics import TRAJECTORIES, UNGRADED
from tests.fakes.waiting import until
from tests.producers.grading.grader_harness import PARTITIONS, RUN, GraderHarness, ungraded
from tests.progress import within


@pytest.fixture
async def harness() -> AsyncIterator[GraderHarness]:
    made = GraderHarness()
    yield made
    made.judge.open.set()
    await made.end()


async def test_a_sample_gets_the_judges_reward_and_stays_in_its_partition(harness: GraderHarness) -> None:
    await harness.put(0, 1, 2, 5)
    harness.start()
    await until(lambda: len(harness.trajectories) == 4)
    for partition, trajectory in harness.trajectories:
        number = int(trajectory.group_id.split("/")[1])
        assert partition == number % PARTITIONS
        assert trajectory.rewards == {"format": 1.0, "judge": 0.5}
        assert trajectory == ungraded(number).graded({"judge": 0.5}, {})
    await until(lambda: harness.committed() == {0: 1, 1: 2, 2: 1})


async def test_only_graded_records_are_committed(harness: GraderHarness) -> None:
    harness.judge.open.clear()
    harness.start()
    await harness.put(*range(8))
    await until(lambda: harness.judge.asked.total() == 8)
    await asyncio.sleep(0.6)
    assert harness.committed() == {}
    assert harness.trajectories == []
    harness.judge.open.set()
    await until(lambda: sum(harness.committed().values()) == 8)
    assert len(harness.trajectories) == 8


async def test_samples_of_a_dead_grader_are_graded_by_another(harness: GraderHarness) -> None:
    first = harness.start("a")
    await harness.put(*range(8))
    await until(lambda: sum(harness.committed().values()) == 8)
    harness.judge.open.clear()
    await harness.put(*range(8, 16))
    await until(lambda: harness.judge.asked.total() == 16)
    first.cancel()
    await asyncio.wait([first])
    harness.judge.open.set()
    harness.start("b")
    await until(lambda: len(harness.trajectories) == 16)
    await until(lambda: sum(harness.committed().values()) == 16)
    # What was committed is not graded again, and what was not ended by the first is there once.
    assert Counter(trajectory.trajectory_id for _, trajectory in harness.trajectories) == Counter(
        f"toy/{number}/0/0" for number in range(16)
    )
    assert all(harness.judge.asked[f"answer {number}"] == 1 for number in range(8))
    assert all(harness.judge.asked[f"answer {number}"] == 2 for number in range(8, 16))


async def test_members_share_the_partitions_and_take_over_those_of_who_leaves(harness: GraderHarness) -> None:
    harness.judge.open.clear()
    one, _ = harness.start("a"), harness.start("b")
    await until(lambda: len(harness.bus.groups) == 1 and len(next(iter(harness.bus.groups.values()))) == 2)
    await asyncio.sleep(3 * POLL_S)  # until both have heard of it
    await harness.put(*range(8))
    await until(lambda: harness.judge.asked.total() == 8)
    # Each partition has one reader: no completion was asked for twice.
    assert set(harness.judge.asked.values()) == {1}
    harness.stops[one].set()
    await one
    await until(lambda: harness.judge.asked.total() == 12)
    harness.judge.open.set()
    await until(lambda: len(harness.trajectories) == 8)


async def test_a_failing_judge_loses_no_sample(harness: GraderHarness) -> None:
    harness.judge.fails = {"answer 1"}
    await harness.put(0, 1)
    harness.start()
    await until(lambda: len(harness.trajectories) == 2)
    failed = next(found for _, found in harness.trajectories if found.group_id == "toy/1/0")
    assert failed.rewards == {"format": 1.0, "judge": None}
    assert failed.reward_errors == {"judge": "no answer in time"}
    (dead,) = harness.dead_letters
    assert dead["dlq-error-class"] == b"GradingFailed"
    assert (dead["dlq-topic"], dead["dlq-partition"]) == (UNGRADED.full_name(RUN).encode(), b"1")
    await until(lambda: sum(harness.committed().values()) == 2)


async def test_a_record_that_does_not_decode_becomes_a_dead_letter(harness: GraderHarness) -> None:
    await harness.send(Outgoing(UNGRADED.full_name(RUN), b"\xff", "toy/9/0", 0))
    await harness.put(0)
    harness.start()
    await until(lambda: harness.committed() == {0: 2})
    assert [dead["dlq-error-class"] for dead in harness.dead_letters] == [b"UnknownSchema"]
    assert [found.group_id for _, found in harness.trajectories] == ["toy/0/0"]


async def test_a_sample_whose_prompt_does_not_decode_goes_on_with_the_reason(harness: GraderHarness) -> None:
    made = ungraded(3, prompt_json="{}")
    await harness.send(Outgoing.of(UNGRADED.full_name(RUN), made, key=made.group_id, partition=3))
    harness.start()
    await until(lambda: len(harness.trajectories) == 1)
    ((_, found),) = harness.trajectories
    assert found.reward_errors["judge"].startswith("its prompt does not decode")
    assert len(harness.dead_letters) == 1


async def test_a_busy_partition_does_not_keep_the_others_waiting() -> None:
    harness = GraderHarness(concurrency=2)
    harness.judge.open.clear()
    await harness.put(*[4 * number for number in range(10)], 1, 2)
    harness.start()
    await until(lambda: {"answer 1", "answer 2"} <= harness.judge.asked.keys())
    assert harness.judge.asked.total() < 12
    harness.judge.open.set()
    await until(lambda: len(harness.trajectories) == 12)
    await harness.end()


async def test_headers_that_an_audit_counts_by_go_on_with_the_sample(harness: GraderHarness) -> None:
    made = ungraded(0)
    record = Outgoing.of(UNGRADED.full_name(RUN), made, key=made.group_id, partition=0)
    await harness.send(record._replace(headers=(*record.headers, (CONTINUATIONS_HEADER, b"1"))))
    harness.start()
    await until(lambda: len(harness.trajectories) == 1)
    (sent,) = harness.bus.log(TRAJECTORIES.full_name(RUN)).partitions[0]
    assert dict(sent.headers)[CONTINUATIONS_HEADER] == b"1"
    assert dict(sent.headers)["schema"] == b"trajectory"


async def test_a_member_ends_with_the_run_and_leaves_the_group(harness: GraderHarness) -> None:
    task = harness.start()
    await harness.put(0)
    await until(lambda: harness.trajectories)
    await harness.finish()
    await within(task, 5)
    assert harness.judge.closed
    assert list(harness.bus.groups.values()) == [[]]
    assert harness.committed() == {0: 1}


async def test_a_judge_that_cannot_be_loaded_keeps_the_member_out_of_the_group() -> None:
    harness = GraderHarness()

    async def refuse() -> None:
        raise RewardLoadError("no such module")

    harness.judge.start = refuse  # type: ignore[method-assign]
    with pytest.raises(RewardLoadError):
        await harness.start()
    assert harness.bus.groups == {}


async def test_a_member_goes_on_where_the_group_is(harness: GraderHarness) -> None:
    await harness.put(0, 4, 8)
    harness.bus.committed["r.graders", TopicPartition(UNGRADED.full_name(RUN), 0)] = 2
    harness.start()
    await until(lambda: harness.trajectories)
    await until(lambda: harness.committed() == {0: 3})
    assert [found.group_id for _, found in harness.trajectories] == ["toy/8/0"]
