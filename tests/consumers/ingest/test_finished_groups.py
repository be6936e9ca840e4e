import json

from hypothesis import given
from hypothesis import strategies as st

from streamrl.consumers.ingest.ledger import CHUNK, FinishedGroups
from streamrl.consumers.ingest.limits import IntakeLimits
from streamrl.schemas.trajectories import FinishReason
from tests.consumers.factories import trajectory
from tests.consumers.ingest.reader_harness import ReaderHarness, checkpoint, next_group, refs_of


def through_json(groups: FinishedGroups) -> FinishedGroups:
    return FinishedGroups.from_json(json.loads(json.dumps(groups.to_json())))


NAMES = st.tuples(st.sampled_from(("a", "b/c", "")), st.integers(0, 3 * CHUNK), st.integers(0, 3))


SAMPLES = st.integers(1, 4).flatmap(lambda wanted: st.tuples(st.sets(st.integers(0, wanted - 1)), st.just(wanted)))


@given(st.dictionaries(NAMES, SAMPLES))
def test_a_finished_sample_is_never_forgotten(groups: dict[tuple[str, int, int], tuple[set[int], int]]) -> None:
    found = FinishedGroups()
    names = {f"{dataset}/{index}/{data_pass}": came for (dataset, index, data_pass), came in groups.items()}
    for name, (came, wanted) in names.items():
        assert name not in found
        found.finish(name, came, wanted)
    for kept in (found, through_json(found)):
        for name, (came, wanted) in names.items():
            assert name in kept
            assert [kept.has_sample(name, index) for index in range(wanted)] == [n in came for n in range(wanted)]
        assert "a/4/9" not in kept
        assert not kept.has_sample("a/4/9", 0)


def test_a_copy_does_not_change() -> None:
    groups = FinishedGroups()
    groups.finish("d/0/0", [0], 2)
    copy = groups.copy()
    groups.finish("d/1/0", [0, 1], 2)
    groups.add_sample("d/0/0", 1)
    assert ("d/1/0" in copy, copy.has_sample("d/0/0", 1)) == (False, False)
    assert groups.has_sample("d/0/0", 1)


def test_names_that_differ_are_different_groups() -> None:
    groups = FinishedGroups()
    for name in ("d/7/0", "no number", "d/07/1", f"d/{'9' * 40}/0"):
        groups.finish(name, [0], 1)
    for name in ("d/7/0", "no number", "d/07/1", f"d/{'9' * 40}/0"):
        assert name in groups
    for name in ("d/07/0", "d/7/1", "d/7/00", "d/7/0/0", "d/0/7", "", "/"):
        assert name not in groups


def test_a_hundred_thousand_groups_take_a_few_kilobytes_of_a_checkpoint() -> None:
    groups = FinishedGroups()
    for number in range(100_000):
        groups.finish(f"gsm8k/{number}/0", range(8), 8)
    assert len(json.dumps(groups.to_json())) < 20_000


async def test_every_repeat_is_found_since_every_sample_of_a_closed_group_is_recognised() -> None:
    """After thousands of groups that end without a step, and after a restart as well."""
    harness, count = ReaderHarness(), 1_100
    first = [trajectory("d/0/0", index) for index in range(2)]
    limits = IntakeLimits(max_skipped_groups=count)
    async with harness.running(harness.reader(limits=limits)) as reader:
        await harness.publish(*first)
        reader.ledger.mark_trained(refs_of(await next_group(reader)))
        for number in range(1, count):
            group = [trajectory(f"d/{number}/0", index, finish_reason=FinishReason.ABORT) for index in range(2)]
            await harness.publish(*group)
        await harness.until(lambda: reader.ledger.counts().skipped == 2 * (count - 1))
        await harness.publish(*first)
        await harness.until_read(reader, 2 * count + 2)
        kept = checkpoint(reader)
        await reader.flush()
    async with harness.running(harness.reader(kept)) as reader:
        await harness.publish(*first)
        await harness.until_read(reader, 2)
        assert reader.ready_group() is None
        await reader.flush()
    repeats = [(row.trajectory_id, row.offset) for row in harness.skips() if row.reason.value == "duplicate"]
    assert repeats == [(f"d/0/0/{index}", 2 * count + 2 * turn + index) for turn in range(2) for index in range(2)]
