"""Going on with another cluster: by names, since offsets mean nothing there. A whole run is in tests/inspection."""

from collections.abc import Sequence

import pytest

from streamrl.consumers.ingest.frontier import Frontier
from streamrl.consumers.ingest.opening import Translation, finished_records, translate
from streamrl.consumers.ingest.reader import ReaderSnapshot
from streamrl.schemas.errors import DataLossRefused
from streamrl.schemas.reports import RecordRef, SkipReason
from tests.consumers.ingest.reader_harness import ReaderHarness, checkpoint, next_group, refs_of


def translated(finished: Sequence[str], *log: str | None, begins: dict[int, int] | None = None) -> Translation:
    found = Translation(frozenset(finished).__contains__, finished_before=len(finished))
    found.frontier.begin_at(begins or {0: 0})
    for offset, name in enumerate(log, start=(begins or {0: 0})[0]):
        found.add(name, 0, offset)
    return found


def test_trajectories_finished_by_name_stay_finished() -> None:
    found = translated(["a", "b", "c"], "x", "b", None, "a", "b", "y")
    assert found.carried == [RecordRef("b", 0, 1), RecordRef("a", 0, 3)]
    assert [found.frontier.is_done(0, offset) for offset in range(6)] == [False, True, False, True, False, False]
    assert found.known_records[0].offset == 3
    assert found.absent == 1


def test_a_log_that_begins_later_is_read_from_its_beginning() -> None:
    found = translated(["a"], "a", "x", begins={0: 7, 1: 3})
    assert found.frontier.positions() == {0: 7, 1: 3}
    assert found.frontier.is_done(0, 7)
    assert not found.frontier.is_done(0, 8)


def test_finished_records_are_counted_by_a_frontier() -> None:
    frontier = Frontier.from_json({"0": {"low": 4, "done": [6, 9]}, "1": {"low": 2, "done": [], "passed": [[5, 8]]}})
    assert finished_records(frontier) == 4 + 2 + 2 + 3


async def test_missing_finished_records_are_counted() -> None:
    harness = ReaderHarness()
    await harness.publish_group(1)
    before = Frontier.from_json({"0": {"low": 10, "done": []}})
    found = await translate(harness.bus, harness.topic, "t", {"d/1/0/1", "d/9/0/0"}.__contains__, before)
    assert (found.absent, len(found.carried)) == (9, 1)


async def elsewhere(groups: Sequence[int]) -> ReaderHarness:
    """The topic of another cluster: these groups, in this order, in another partition."""
    harness = ReaderHarness()
    for number in groups:
        await harness.publish_group(number, partition=1)
    return harness


async def finished_two() -> tuple[ReaderHarness, ReaderSnapshot]:
    harness = ReaderHarness()
    async with harness.running(harness.reader()) as reader:
        for number in range(3):
            await harness.publish_group(number)
        reader.ledger.mark_trained(refs_of(await next_group(reader)))
        reader.ledger.mark_skipped(await next_group(reader), SkipReason.ZERO_ADVANTAGE, "")
        await reader.flush()
        kept = checkpoint(reader)
    return harness, kept


async def test_another_cluster_is_refused_in_a_line_that_names_the_option() -> None:
    _, kept = await finished_two()
    other = await elsewhere([2, 1, 0, 3])
    reader = other.reader(kept)
    assert await reader.carry_over() is None
    async with other.running(reader):
        with pytest.raises(DataLossRefused, match=r"--ingest\.translate_offsets true") as refused:
            await next_group(reader)
    assert refused.value.exit_code == 4
    assert "\n" not in str(refused.value)


async def test_on_another_cluster_nothing_is_trained_twice_and_nothing_is_lost() -> None:
    _, kept = await finished_two()
    other = await elsewhere([2, 1, 0, 3])
    await other.publish_group(0, partition=0)  # a second copy, which the other cluster did not have
    reader = other.reader(kept, translate_offsets=True)
    found = await reader.carry_over()
    assert found is not None
    assert (len(found.carried), found.absent) == (4, 0)
    async with other.running(reader):
        assert {(await next_group(reader)).group_id for _ in range(2)} == {"d/2/0", "d/3/0"}
        await reader.flush()
        assert [(row.reason, row.trajectory_id) for row in other.skips()] == [
            (SkipReason.DUPLICATE, "d/0/0/0"),
            (SkipReason.DUPLICATE, "d/0/0/1"),
        ]
        again = checkpoint(reader)
    # The next start is on the cluster of its checkpoint: the option does nothing.
    later = other.reader(again, translate_offsets=True)
    assert await later.carry_over() is None
    async with other.running(later):
        assert {(await next_group(later)).group_id for _ in range(2)} == {"d/2/0", "d/3/0"}


async def test_on_the_checkpoint_s_own_cluster_the_option_does_nothing() -> None:
    harness, kept = await finished_two()
    reader = harness.reader(kept, translate_offsets=True)
    assert await reader.carry_over() is None
    async with harness.running(reader):
        assert (await next_group(reader)).group_id == "d/2/0"


async def test_a_finished_trajectory_that_comes_later_is_a_duplicate() -> None:
    """A mirror that lags behind."""
    _, kept = await finished_two()
    other = await elsewhere([2])
    reader = other.reader(kept, translate_offsets=True)
    found = await reader.carry_over()
    assert found is not None
    assert (len(found.carried), found.absent) == (0, 4)
    async with other.running(reader):
        reader.ledger.mark_trained(refs_of(await next_group(reader)))
        await reader.flush()
        kept = checkpoint(reader)
    resumed = other.reader(kept)
    async with other.running(resumed):
        await other.publish_group(1, partition=1)
        await other.publish_group(3, partition=1)
        assert (await next_group(resumed)).group_id == "d/3/0"
        await resumed.flush()
    assert {row.reason for row in other.skips()} == {SkipReason.DUPLICATE}
