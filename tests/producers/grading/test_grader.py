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
from tests.producers.grading.stage import PARTITIONS, RUN, Stage, ungraded
from tests.progress import within


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    made = Stage()
    yield made
    made.judge.open.set()
    await made.end()


async def test_a_sample_gets_the_judges_reward_and_stays_in_its_partition(stage: Stage) -> None:
    await stage.put(0, 1, 2, 5)
    stage.start()
    await until(lambda: len(stage.trajectories) == 4)
    for partition, trajectory in stage.trajectories:
        number = int(trajectory.group_id.split("/")[1])
        assert partition == number % PARTITIONS
        assert trajectory.rewards == {"format": 1.0, "judge": 0.5}
        assert trajectory == ungraded(number).graded({"judge": 0.5}, {})
    await until(lambda: stage.committed() == {0: 1, 1: 2, 2: 1})


async def test_nothing_ungraded_is_committed(stage: Stage) -> None:
    stage.judge.open.clear()
    stage.start()
    await stage.put(*range(8))
    await until(lambda: stage.judge.asked.total() == 8)
    await asyncio.sleep(0.6)
    assert stage.committed() == {}
    assert stage.trajectories == []
    stage.judge.open.set()
    await until(lambda: sum(stage.committed().values()) == 8)
    assert len(stage.trajectories) == 8


async def test_what_a_dead_member_had_in_hand_is_graded_by_another_and_nothing_is_lost(stage: Stage) -> None:
    first = stage.start("a")
    await stage.put(*range(8))
    await until(lambda: sum(stage.committed().values()) == 8)
    stage.judge.open.clear()
    await stage.put(*range(8, 16))
    await until(lambda: stage.judge.asked.total() == 16)
    first.cancel()
    await asyncio.wait([first])
    stage.judge.open.set()
    stage.start("b")
    await until(lambda: len(stage.trajectories) == 16)
    await until(lambda: sum(stage.committed().values()) == 16)
    # What was committed is not graded again, and what was not ended by the first is there once.
    assert Counter(trajectory.trajectory_id for _, trajectory in stage.trajectories) == Counter(
        f"toy/{number}/0/0" for number in range(16)
    )
    assert all(stage.judge.asked[f"answer {number}"] == 1 for number in range(8))
    assert all(stage.judge.asked[f"answer {number}"] == 2 for number in range(8, 16))


async def test_members_share_the_partitions_and_take_over_those_of_who_leaves(stage: Stage) -> None:
    stage.judge.open.clear()
    one, _ = stage.start("a"), stage.start("b")
    await until(lambda: len(stage.bus.groups) == 1 and len(next(iter(stage.bus.groups.values()))) == 2)
    await asyncio.sleep(3 * POLL_S)  # until both have heard of it
    await stage.put(*range(8))
    await until(lambda: stage.judge.asked.total() == 8)
    # Each partition has one reader: no completion was asked for twice.
    assert set(stage.judge.asked.values()) == {1}
    stage.stops[one].set()
    await one
    await until(lambda: stage.judge.asked.total() == 12)
    stage.judge.open.set()
    await until(lambda: len(stage.trajectories) == 8)


async def test_a_failing_judge_loses_no_sample(stage: Stage) -> None:
    stage.judge.fails = {"answer 1"}
    await stage.put(0, 1)
    stage.start()
    await until(lambda: len(stage.trajectories) == 2)
    failed = next(found for _, found in stage.trajectories if found.group_id == "toy/1/0")
    assert failed.rewards == {"format": 1.0, "judge": None}
    assert failed.reward_errors == {"judge": "no answer in time"}
    (dead,) = stage.dead_letters
    assert dead["dlq-error-class"] == b"GradingFailed"
    assert (dead["dlq-topic"], dead["dlq-partition"]) == (UNGRADED.full_name(RUN).encode(), b"1")
    await until(lambda: sum(stage.committed().values()) == 2)


async def test_what_does_not_decode_is_dead_lettered_and_passed(stage: Stage) -> None:
    await stage.send(Outgoing(UNGRADED.full_name(RUN), b"\xff", "toy/9/0", 0))
    await stage.put(0)
    stage.start()
    await until(lambda: stage.committed() == {0: 2})
    assert [dead["dlq-error-class"] for dead in stage.dead_letters] == [b"UnknownSchema"]
    assert [found.group_id for _, found in stage.trajectories] == ["toy/0/0"]


async def test_a_sample_whose_prompt_does_not_decode_goes_on_with_the_reason(stage: Stage) -> None:
    made = ungraded(3, prompt_json="{}")
    await stage.send(Outgoing.of(UNGRADED.full_name(RUN), made, key=made.group_id, partition=3))
    stage.start()
    await until(lambda: len(stage.trajectories) == 1)
    ((_, found),) = stage.trajectories
    assert found.reward_errors["judge"].startswith("its prompt does not decode")
    assert len(stage.dead_letters) == 1


async def test_a_busy_partition_does_not_keep_the_others_waiting() -> None:
    stage = Stage(concurrency=2)
    stage.judge.open.clear()
    await stage.put(*[4 * number for number in range(10)], 1, 2)
    stage.start()
    await until(lambda: {"answer 1", "answer 2"} <= stage.judge.asked.keys())
    assert stage.judge.asked.total() < 12
    stage.judge.open.set()
    await until(lambda: len(stage.trajectories) == 12)
    await stage.end()


async def test_headers_that_an_audit_counts_by_go_on_with_the_sample(stage: Stage) -> None:
    made = ungraded(0)
    record = Outgoing.of(UNGRADED.full_name(RUN), made, key=made.group_id, partition=0)
    await stage.send(record._replace(headers=(*record.headers, (CONTINUATIONS_HEADER, b"1"))))
    stage.start()
    await until(lambda: len(stage.trajectories) == 1)
    (sent,) = stage.bus.log(TRAJECTORIES.full_name(RUN)).partitions[0]
    assert dict(sent.headers)[CONTINUATIONS_HEADER] == b"1"
    assert dict(sent.headers)["schema"] == b"trajectory"


async def test_a_member_ends_with_the_run_and_leaves_the_group(stage: Stage) -> None:
    task = stage.start()
    await stage.put(0)
    await until(lambda: stage.trajectories)
    await stage.finish()
    await within(task, 5)
    assert stage.judge.closed
    assert list(stage.bus.groups.values()) == [[]]
    assert stage.committed() == {0: 1}


async def test_a_judge_that_cannot_be_loaded_keeps_the_member_out_of_the_group() -> None:
    stage = Stage()

    async def refuse() -> None:
        raise RewardLoadError("no such module")

    stage.judge.start = refuse  # type: ignore[method-assign]
    with pytest.raises(RewardLoadError):
        await stage.start()
    assert stage.bus.groups == {}


async def test_a_member_goes_on_where_the_group_is(stage: Stage) -> None:
    await stage.put(0, 4, 8)
    stage.bus.committed["r.graders", TopicPartition(UNGRADED.full_name(RUN), 0)] = 2
    stage.start()
    await until(lambda: stage.trajectories)
    await until(lambda: stage.committed() == {0: 3})
    assert [found.group_id for _, found in stage.trajectories] == ["toy/8/0"]
