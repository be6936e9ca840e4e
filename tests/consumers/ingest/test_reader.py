import asyncio
import time
from dataclasses import replace

import pytest

from streamrl.bus.port import Outgoing, TopicPartition
from streamrl.consumers.ingest.limits import IntakeLimits
from streamrl.schemas.errors import BadInput, BusUnavailable, LifecycleError
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.reports import SkipReason
from streamrl.schemas.trajectories import aborted_trajectory
from tests.consumers.factories import V0, trajectory
from tests.consumers.ingest.reader_harness import LOOP, ReaderHarness, checkpoint, next_group, refs_of
from tests.fakes.subscription import PacedBus
from tests.producers.dispatch.dispatcher_harness import order
from tests.progress import within

FULL = IntakeLimits(max_poll_records=2, high_water_bytes=2, low_water_bytes=1)
"""Reading pauses as soon as a group is ready."""


async def test_groups_are_handed_out_oldest_first_whatever_their_arrival() -> None:
    harness = ReaderHarness()
    for number in (3, 1, 2):
        await harness.publish_group(number, partition=number)
    async with harness.running(harness.reader()) as reader:
        await harness.until_read(reader, 6)
        assert [(await next_group(reader)).group_id for _ in range(3)] == ["d/1/0", "d/2/0", "d/3/0"]


async def test_interleaved_groups_come_whole_and_in_sample_order() -> None:
    harness = ReaderHarness()
    order = [(0, 3), (1, 0), (0, 1), (1, 2), (0, 0), (1, 3), (1, 1), (0, 2)]
    await harness.publish(*(trajectory(f"d/{group}/0", index, of=4) for group, index in order))
    async with harness.running(harness.reader()) as reader:
        for _ in range(2):
            group = await next_group(reader)
            assert [found.trajectory.sample_index for found in group.samples] == [0, 1, 2, 3]
            assert {found.trajectory.group_id for found in group.samples} == {group.group_id}


async def test_a_group_waits_for_its_siblings_however_long_they_take() -> None:
    harness = ReaderHarness()
    async with harness.running(harness.reader()) as reader:
        await harness.publish(trajectory("d/0/0", 0))
        await harness.until_read(reader, 1)
        for _ in range(3):
            harness.now += 1e6
            await asyncio.sleep(0.21)
        assert reader.ready_group() is None
        await harness.publish(trajectory("d/0/0", 1))
        assert len((await next_group(reader)).samples) == 2
    assert harness.skips() == []


async def test_a_group_that_is_given_up_is_trained_with_what_there_is_of_it() -> None:
    harness = ReaderHarness()
    async with harness.running(harness.reader()) as reader:
        await harness.publish(*(trajectory("d/0/0", index, of=3) for index in (0, 2)), trajectory("d/1/0", 0))
        for group_id, samples, missing in (("d/0/0", 3, 1), ("d/1/0", 2, 1)):
            given_up = order(group_id, samples=samples).replace(admitted_version=V0)
            await harness.publish(aborted_trajectory(given_up, missing, "given up", rewards=(), now=0.0))
        group = await next_group(reader)
        assert [found.trajectory.sample_index for found in group.samples] == [0, 2]
        reader.ledger.mark_trained(refs_of(group))
        await reader.flush()
    assert harness.reasons() == {
        "d/0/0/1": SkipReason.POISON,
        "d/1/0/0": SkipReason.GROUP_INCOMPLETE,
        "d/1/0/1": SkipReason.POISON,
    }
    assert reader.ledger.counts().pending == 0


async def test_a_group_that_cannot_be_completed_is_closed_and_late_samples_are_skipped() -> None:
    harness = ReaderHarness()
    async with harness.running(harness.reader()) as reader:
        await harness.publish(*(trajectory("d/0/0", index, of=4) for index in (0, 1)), trajectory("d/1/0", 0, of=4))
        await harness.until_read(reader, 3)
        await _pass_by(harness, 2 * (LOOP.max_staleness + 1))
        assert reader.ready_group() is None
        await _pass_by(harness, 2 * (LOOP.max_staleness + 1) + 1)
        group = await next_group(reader)
        assert len(group.samples) == 2
        await harness.until(lambda: harness.reasons() == {"d/1/0/0": SkipReason.GROUP_INCOMPLETE})
        await harness.publish(trajectory("d/0/0", 2, of=4), trajectory("d/1/0", 1, of=4))
        await harness.until(lambda: len(harness.skips()) == 2)
        reader.ledger.mark_trained(refs_of(group))
        await reader.flush()
    assert harness.reasons() == dict.fromkeys(("d/1/0/0", "d/1/0/1", "d/0/0/2"), SkipReason.GROUP_INCOMPLETE)
    assert reader.ledger.counts().pending == 0


async def _pass_by(harness: ReaderHarness, steps: int) -> None:
    """So many steps are taken; then back, so that the samples are not too old for the rest of the test."""
    harness.version = PolicyVersion(1, steps)
    await asyncio.sleep(0.3)
    harness.version = V0


async def test_one_sample_too_old_at_hand_out_ages_its_whole_group_out() -> None:
    """A baseline over the siblings that are left would lean to short completions, which are the younger ones."""
    harness = ReaderHarness()
    old, new = PolicyVersion(1, 0), PolicyVersion(1, 2)
    async with harness.running(harness.reader()) as reader:
        for index, versions in enumerate(((new,), (old, new), (new,))):
            await harness.publish(trajectory("d/0/0", index, of=3, versions=versions))
        await harness.publish_group(1, versions=(new,))
        await harness.until_read(reader, 5)
        harness.version = PolicyVersion(1, 3)
        assert (await next_group(reader)).group_id == "d/1/0"
        await reader.flush()
    assert harness.reasons() == dict.fromkeys((f"d/0/0/{index}" for index in range(3)), SkipReason.STALE)
    assert {skip.detail for skip in harness.skips()} == {
        "d/0/0/1 is outdated, and its group with it: expected at most 2 steps of staleness, got 3"
    }
    assert reader.ledger.counts().pending == 2


async def test_one_sample_too_old_when_it_is_read_ages_its_whole_group_out() -> None:
    harness = ReaderHarness(version=PolicyVersion(1, 3))
    new = PolicyVersion(1, 2)
    async with harness.running(harness.reader()) as reader:
        await harness.publish(*(trajectory("d/0/0", index, of=4, versions=(new,)) for index in range(2)))
        await harness.publish(trajectory("d/0/0", 2, of=4, versions=(V0, new)))
        await harness.until_read(reader, 3)
        await reader.flush()
        # All records of a group are finished together, with the last of them.
        assert harness.skips() == []
        await harness.publish(trajectory("d/0/0", 3, of=4, versions=(new,)))
        await harness.until(lambda: len(harness.skips()) == 4)
        assert reader.ready_group() is None
    assert harness.reasons() == dict.fromkeys((f"d/0/0/{index}" for index in range(4)), SkipReason.STALE)
    assert reader.ledger.counts().pending == 0


async def test_samples_without_reward_leave_the_others_to_be_trained() -> None:
    harness = ReaderHarness()
    async with harness.running(harness.reader()) as reader:
        await harness.publish(*(trajectory("d/0/0", index, of=3) for index in (0, 1)))
        await harness.publish(trajectory("d/0/0", 2, of=3, rewards={}, reward_errors={"exact": "no"}))
        group = await next_group(reader)
        assert [sample.ref.trajectory_id for sample in group.samples] == ["d/0/0/0", "d/0/0/1"]
        reader.ledger.mark_trained(refs_of(group))
        await reader.flush()
    assert harness.reasons() == {"d/0/0/2": SkipReason.POISON}


async def test_a_group_that_became_too_old_is_skipped_at_hand_out() -> None:
    harness = ReaderHarness()
    async with harness.running(harness.reader()) as reader:
        await harness.publish_group(0, versions=(PolicyVersion(1, 0), PolicyVersion(1, 1)))
        await harness.publish_group(1, versions=(PolicyVersion(1, 1),))
        await harness.until_read(reader, 4)
        harness.version = PolicyVersion(1, 3)
        assert (await next_group(reader)).group_id == "d/1/0"
    assert harness.reasons() == {"d/0/0/0": SkipReason.STALE, "d/0/0/1": SkipReason.STALE}


async def test_every_record_read_is_trained_skipped_or_pending() -> None:
    harness = ReaderHarness()
    async with harness.running(harness.reader()) as reader:
        for number in range(6):
            await harness.publish_group(number, partition=number % LOOP.trajectory_partitions)
        await harness.send(Outgoing(harness.topic, b"junk", None, 1))
        await harness.publish_group(0)
        await harness.publish(trajectory("d/9/0", 0))
        reader.ledger.mark_trained(refs_of(await next_group(reader)))
        reader.ledger.mark_skipped(await next_group(reader), SkipReason.ZERO_ADVANTAGE, "equal")
        await harness.until_read(reader, 16)
        await reader.flush()
        counts = reader.ledger.counts()
        assert (counts.read, counts.trained, counts.skipped, counts.pending) == (16, 2, 5, 9)
        assert reader.ledger.rejections.tally.reasons == {"zero_advantage": 2, "poison": 1, "duplicate": 2}
        assert counts.read == sum(len(log) for log in harness.bus.log(harness.topic).partitions)
        assert len(harness.skips()) == counts.skipped


async def test_a_resumed_reader_neither_repeats_nor_loses() -> None:
    harness = ReaderHarness()
    names = [f"d/{number}/0" for number in range(8)]
    # Siblings lie far apart, so that groups end out of order.
    for index in (0, 1):
        await harness.publish(*(trajectory(name, index, created_at=float(at)) for at, name in enumerate(names)))
    async with harness.running(harness.reader()) as first:
        await harness.until_read(first, 16)
        trained = [await next_group(first) for _ in range(3)]
        first.ledger.mark_trained(refs_of(trained[0], trained[2]))
        first.ledger.mark_skipped(trained[1], SkipReason.ZERO_ADVANTAGE, "equal")
        await first.flush()
        kept = checkpoint(first)
        first.ledger.mark_trained(refs_of(await next_group(first)))
    async with harness.running(harness.reader(kept)) as second:
        groups = [await next_group(second) for _ in range(5)]
        await harness.publish(trajectory("d/0/0", 1), trajectory("d/1/0", 1))
        await harness.until(lambda: second.ledger.counts().skipped == 2)
    assert [group.group_id for group in groups] == names[3:]
    assert [skip.reason for skip in harness.skips()[-2:]] == [SkipReason.DUPLICATE] * 2


async def test_a_restart_finds_no_part_of_a_group() -> None:
    """A refused sibling and a late one are read again together with the group they belong to."""
    harness = ReaderHarness()
    bad = trajectory("d/0/0", 0, of=3, rewards={})
    async with harness.running(harness.reader()) as first:
        await harness.publish(bad, trajectory("d/0/0", 1, of=3), trajectory("d/0/0", 2, of=3))
        assert len((await next_group(first)).samples) == 2
        await first.flush()
        kept = checkpoint(first)
    assert kept.frontier.lows()[0] == 0
    async with harness.running(harness.reader(kept)) as second:
        assert len((await next_group(second)).samples) == 2
    assert harness.skips() == []


async def test_a_late_sibling_of_a_finished_group_founds_no_second_group() -> None:
    harness = ReaderHarness()
    async with harness.running(harness.reader()) as first:
        await harness.publish(*(trajectory("d/0/0", index, of=4) for index in (0, 1)))
        await harness.until_read(first, 2)
        await _pass_by(harness, 100)
        first.ledger.mark_trained(refs_of(await next_group(first)))
        kept = checkpoint(first)
    async with harness.running(harness.reader(kept)) as second:
        await harness.publish(*(trajectory("d/0/0", index, of=4) for index in (2, 3)))
        await harness.until(lambda: second.ledger.counts().skipped == 2)
    assert set(harness.reasons().values()) == {SkipReason.GROUP_INCOMPLETE}


async def test_reading_pauses_above_the_high_water_mark() -> None:
    harness = ReaderHarness()
    for number in range(20):
        await harness.publish_group(number)
    one = len(harness.bus.log(harness.topic).partitions[0][0].value or b"")
    limits = IntakeLimits(max_poll_records=2, high_water_bytes=7 * one, low_water_bytes=3 * one)
    async with harness.running(harness.reader(limits=limits)) as reader:
        await harness.until_read(reader, 8)
        await asyncio.sleep(0.3)
        assert reader.ledger.counts().read <= 8
        assert reader.ledger.pending_bytes > 7 * one
        for _ in range(3):
            reader.ledger.mark_trained(refs_of(await next_group(reader)))
        await harness.until_read(reader, 10)
        for _ in range(17):
            reader.ledger.mark_trained(refs_of(await next_group(reader)))
        assert (reader.ledger.pending_bytes, reader.ledger.counts().pending) == (0, 0)


async def test_a_memory_full_of_incomplete_groups_is_read_over() -> None:
    harness = ReaderHarness()
    for index in (0, 1):
        await harness.publish(*(trajectory(f"d/{number}/0", index) for number in range(20)))
    async with harness.running(harness.reader(limits=FULL)) as reader:
        names = {(await next_group(reader)).group_id for _ in range(20)}
    assert len(names) == 20


async def test_no_group_is_closed_while_its_siblings_cannot_be_read() -> None:
    harness = ReaderHarness()
    await harness.publish(trajectory("d/0/0", 0))
    await harness.publish_group(1)
    async with harness.running(harness.reader(limits=replace(FULL, max_poll_records=3))) as reader:
        await harness.until_read(reader, 3)
        await harness.publish(trajectory("d/0/0", 1))
        await _pass_by(harness, 100)
        assert reader.ledger.counts().read == 3
        reader.ledger.mark_trained(refs_of(await next_group(reader)))
        assert len((await next_group(reader)).samples) == 2
    assert harness.skips() == []


def test_pausing_needs_a_ready_group_and_lasts_until_the_low_mark() -> None:
    limits = IntakeLimits(high_water_bytes=100, low_water_bytes=50)
    cases = {(False, 101, True): True, (False, 100, True): False, (True, 50, True): True, (True, 49, True): False}
    for (paused, held, ready), expected in cases.items():
        assert limits.should_pause(paused, held, has_ready=ready) is expected
    assert not limits.should_pause(True, 10_000, has_ready=False)


async def test_the_reader_s_failure_reaches_the_trainer_as_it_was() -> None:
    harness = ReaderHarness()
    reader = harness.reader(limits=IntakeLimits(max_consecutive_faults=3))
    async with harness.running(reader):
        waiting = asyncio.create_task(reader.next_group())
        for _ in range(4):
            await harness.publish(trajectory(rewards={}, group_id=f"d/{_}/0"))
        with pytest.raises(BadInput, match="trajectories without reward, got 4 in a row"):
            await within(waiting, 5)
        with pytest.raises(BadInput, match="in a row"):
            await next_group(reader)


async def test_a_topic_that_is_not_there_reaches_the_trainer() -> None:
    harness = ReaderHarness()
    del harness.bus.logs[harness.topic]
    reader = harness.reader()
    async with harness.running(reader):
        with pytest.raises(BusUnavailable):
            await next_group(reader)


async def test_a_stopped_reader_hands_out_nothing() -> None:
    harness = ReaderHarness()
    await harness.publish_group(0)
    async with harness.running(harness.reader()) as reader:
        await harness.until_read(reader, 2)
    with pytest.raises(LifecycleError, match="stopped"):
        await next_group(reader)


async def test_lag_counts_what_is_not_finished_by_partition_and_bucket() -> None:
    harness = ReaderHarness()
    await harness.publish_group(0, partition=3)
    await harness.publish_group(1, partition=0)
    async with harness.running(harness.reader()) as reader:
        reader.ledger.mark_trained(refs_of(await next_group(reader)))
        await harness.until_read(reader, 4)
        assert await reader.lag() == {TopicPartition(harness.topic, number): 2 * (number == 0) for number in range(4)}
        metrics = await reader.metrics()
        assert (metrics["kafka/lag/bucket_0"], metrics["kafka/lag/bucket_1"]) == (2.0, 0.0)
        assert (metrics["kafka/finished/bucket_0"], metrics["kafka/finished/bucket_1"]) == (0.0, 2.0)
        assert reader.offsets() == {TopicPartition(harness.topic, 3): 2}


async def times_its_decoding() -> float:
    """Processor time of 1,000 records through a reader, as a multiple of decoding them, measured a moment before."""
    harness = ReaderHarness()
    for number in range(1000):
        await harness.publish_group(number)
    records = harness.bus.log(harness.topic).partitions[0]
    began = time.process_time()
    for record in records:
        record.message()
    decoding = time.process_time() - began
    async with harness.running(harness.reader()) as reader:
        began = time.process_time()
        for _ in range(1000):
            reader.ledger.mark_trained(refs_of(await next_group(reader)))
        return (time.process_time() - began) / decoding


async def test_a_record_costs_the_event_loop_little_beyond_its_decoding() -> None:
    # The least of three: what else runs on the machine disturbs one of them, and both of its parts unequally.
    found = [await times_its_decoding() for _ in range(3)]
    assert min(found) < 8, found


async def test_no_group_is_handed_out_before_the_backlog_is_read() -> None:
    harness = ReaderHarness(PacedBus(max_records=1))
    for number in (5, 4, 3, 2):
        await harness.publish_group(number)
    async with harness.running(harness.reader()) as reader:
        assert (await next_group(reader)).group_id == "d/2/0"
        assert reader.ledger.counts().read == 8


async def test_a_group_for_a_later_step_waits_for_it() -> None:
    """Whole first and created first, it leaves the step to come to the group that is for it."""
    harness = ReaderHarness()
    async with harness.running(harness.reader()) as reader:
        await harness.publish_group(1, due_step=2)
        await harness.until_read(reader, 2)
        await asyncio.sleep(0.05)
        assert reader.ready_group() is None
        await harness.publish_group(2, due_step=1)
        assert (await next_group(reader)).group_id == "d/2/0"
        assert reader.ready_group() is None
        harness.version = PolicyVersion(1, 1)
        assert (await next_group(reader)).group_id == "d/1/0"


async def test_a_memory_full_of_groups_for_later_steps_is_read_over() -> None:
    harness = ReaderHarness()
    for number in range(5):
        await harness.publish_group(number, due_step=2)
    await harness.publish_group(9, due_step=1)
    async with harness.running(harness.reader(limits=FULL)) as reader:
        assert (await next_group(reader)).group_id == "d/9/0"


async def test_a_full_memory_ends_the_waiting_for_what_was_there() -> None:
    harness = ReaderHarness(PacedBus(max_records=1))
    for number in (5, 4, 3, 2):
        await harness.publish_group(number)
    async with harness.running(harness.reader(limits=replace(FULL, max_poll_records=500))) as reader:
        assert (await next_group(reader)).group_id == "d/5/0"


async def test_whether_a_group_ages_out_does_not_depend_on_when_it_was_read() -> None:
    """Read before or after two of its samples became too old, none of it is handed out."""
    old, new = (PolicyVersion(1, 0),), (PolicyVersion(1, 2),)
    for becomes_old_while_held in (True, False):
        harness = ReaderHarness(version=PolicyVersion(1, 2 if becomes_old_while_held else 3))
        await harness.publish(*(trajectory("d/0/0", i, of=4, versions=old if i < 2 else new) for i in range(4)))
        await harness.publish_group(1, versions=new)
        async with harness.running(harness.reader()) as reader:
            await harness.until_read(reader, 6)
            harness.version = PolicyVersion(1, 3)
            assert (await next_group(reader)).group_id == "d/1/0"
            await reader.flush()
        assert harness.reasons() == dict.fromkeys((f"d/0/0/{index}" for index in range(4)), SkipReason.STALE)
