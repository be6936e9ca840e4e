"""Which whole groups are taken next, by name and number; and what a reader makes of it."""

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.consumers.batching.micro_batches import Group
from streamrl.consumers.ingest.groups import ReadyGroups
from streamrl.consumers.ingest.sampling import SampledGroups, Window, absolute_advantage, open_window
from streamrl.consumers.ingest.settings import IngestSettings
from streamrl.schemas.errors import SettingsError
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.reports import SkipReason
from streamrl.schemas.settings import LoopSettings
from tests.consumers.factories import sample
from tests.consumers.ingest.reader_harness import LOOP, ReaderHarness, checkpoint, next_group, refs_of

FRESHEST = IngestSettings(sampling="freshest")


def group(number: int, version: int, created_at: float = 0.0, **changes: Any) -> Group:
    versions = [PolicyVersion(1, version)]
    one, two = (sample(f"d/{number}/0", index, versions=versions, **changes) for index in range(2))
    return Group(f"d/{number}/0", created_at, (one, two))


def names(window: SampledGroups | ReadyGroups, count: int) -> list[str]:
    return [window.pop().group_id.split("/")[1] for _ in range(count)]


def test_the_oldest_first_is_what_it_was_before_there_was_a_choice() -> None:
    capped = IngestSettings(sampling="capped", staleness_cap=0)
    for settings in (IngestSettings(), capped):
        assert isinstance(open_window(LOOP, settings, lambda: 1), ReadyGroups)
    fixed = LoopSettings(mode="one_step_async")
    assert isinstance(open_window(fixed, FRESHEST, lambda: 1), ReadyGroups)


def filled(passed_over: str) -> SampledGroups | ReadyGroups:
    """Bound 2, steps of 2, step 3 to come: the last that may train what version 0 sampled."""
    settings = IngestSettings(sampling="freshest", passed_over=passed_over)
    window = open_window(LOOP, settings, lambda: 3)
    for number, (version, created_at) in enumerate([(0, 0.0), (1, 0.0), (2, 1.0), (2, 2.0)]):
        window.push(group(number, version, created_at))
    return window


def test_the_freshest_go_first() -> None:
    assert names(filled("skip"), 4) == ["3", "2", "1", "0"]


def test_groups_that_need_every_place_up_to_their_last_step_go_before_fresher_ones() -> None:
    window = filled("train")
    window.push(group(4, 0))
    assert {window.pop(places).group_id for places in (2, 1)} == {"d/0/0", "d/4/0"}
    assert names(window, 3) == ["3", "2", "1"]


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9)), max_size=30), st.booleans(), st.integers(1, 3))
def test_each_group_is_handed_out_once(groups: list[tuple[int, int]], keeps: bool, size: int) -> None:
    window = Window[int](size, keeps)
    for item, (last, liking) in enumerate(groups):
        window.push(item, last, (liking, str(item)))
    assert sorted(window.pop(2, 1) for _ in groups) == list(range(len(groups)))
    assert not window


@given(st.integers(1, 4), st.integers(0, 4), st.integers(0, 1 << 32))
def test_every_complete_group_is_handed_out_by_its_last_step(size: int, bound: int, seed: int) -> None:
    """Arrivals whenever the steps up to each last step still have places for all, as admission sees to."""
    chance, window = random.Random(seed), Window[int](size, keeps_places=True)
    held: Counter[int] = Counter()
    step, places = 1, size
    for _ in range(150):
        last = step + chance.randint(0, bound)
        needed = {end: sum(held[each] for each in range(end + 1)) for end in range(last, step + bound + 1)}
        if chance.random() < 0.7 and all(n < places + (end - step) * size for end, n in needed.items()):
            window.push(last, last, (chance.random(), ""))
            held[last] += 1
        elif window:
            taken = window.pop(step, places)
            assert taken >= step
            held[taken] -= 1
            if chance.random() < 0.9:  # else it was skipped, and another takes its place
                places -= 1
            if not places:
                step, places = step + 1, size


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 9)), min_size=1, max_size=20), st.booleans())
def test_expired_groups_are_handed_out_first(groups: list[tuple[int, int]], keeps: bool) -> None:
    window = Window[int](2, keeps)
    for last, liking in groups:
        window.push(last, last, (liking, ""))
    out = [window.pop(3, 2) for _ in groups]
    over = sum(last < 3 for last, _ in groups)
    assert all(last < 3 for last in out[:over])


def test_a_priority_goes_before_age_and_equal_ones_do_not_depend_on_arrival() -> None:
    assert absolute_advantage([0.0, 1.0, 1.0, 0.0], []) == 0.5
    settings = IngestSettings(sampling="absolute_advantage")
    orders = set()
    for seed in range(6):
        window = open_window(LOOP, settings, lambda: 1)
        groups = [group(0, 0, 0.0), group(1, 0, 1.0), group(2, 0, 1.0)]
        flat = Group("d/3/0", 0.0, tuple(sample("d/3/0", 0, offset=offset) for offset in (1, 2)))  # equal rewards
        groups.append(flat)
        random.Random(seed).shuffle(groups)
        for each in groups:
            window.push(each)
        orders.add("".join(names(window, 4)))
    assert orders == {"0123"}


def shortest(rewards: Any, trajectories: Any) -> float:
    return -float(sum(len(trajectory.token_ids) for trajectory in trajectories))


def unable(rewards: Any, trajectories: Any) -> float:
    raise KeyError("nothing")


def test_a_priority_of_ones_own_is_a_function_by_its_path() -> None:
    here = "tests.consumers.ingest.test_sampling"
    window = open_window(LOOP, IngestSettings(sampling=f"{here}:shortest"), lambda: 1)
    for number, tokens in enumerate((9, 3, 5)):
        window.push(group(number, 0, tokens=tokens))
    assert names(window, 3) == ["1", "2", "0"]
    with pytest.raises(SettingsError, match=r"finite number for group d/7/0, got KeyError: 'nothing'; correct"):
        open_window(LOOP, IngestSettings(sampling=f"{here}:unable"), lambda: 1).push(group(7, 0))
    with pytest.raises(SettingsError, match="expected a function 'none'"):
        open_window(LOOP, IngestSettings(sampling=f"{here}:none"), lambda: 1)


async def publish(harness: ReaderHarness, *versions: int) -> None:
    for number, version in enumerate(versions):
        await harness.publish_group(number, versions=[PolicyVersion(1, version)], partition=number % 2)


async def test_a_reader_skips_what_was_passed_over_for_too_long_and_a_restart_takes_none_of_it_twice() -> None:
    harness = ReaderHarness(version=PolicyVersion(1, 2))
    await publish(harness, 0, 2, 2, 1)
    first = harness.reader(sampling="freshest", passed_over="skip")
    async with harness.running(first):
        await harness.until_read(first, 8)
        taken = [await next_group(first) for _ in range(2)]
        assert [found.group_id for found in taken] == ["d/2/0", "d/1/0"]
        first.ledger.mark_trained(refs_of(*taken))
        harness.version = PolicyVersion(1, 3)
        assert (await next_group(first)).group_id == "d/3/0"
        await first.flush()
        assert first.ready_group() is None
        rows = {skip.trajectory_id: skip for skip in harness.skips()}
    assert set(rows) == {"d/0/0/0", "d/0/0/1"}
    assert {row.reason for row in rows.values()} == {SkipReason.STALE}
    assert "expected at most 2 steps of staleness, got 3" in rows["d/0/0/0"].detail
    second = harness.reader(after=checkpoint(first), sampling="freshest", passed_over="skip")
    async with harness.running(second):
        assert (await next_group(second)).group_id == "d/3/0"
        assert second.ready_group() is None
        assert second.ledger.counts().skipped == 0


async def test_the_last_step_of_passed_over_groups_keeps_a_place_for_them() -> None:
    harness = ReaderHarness(version=PolicyVersion(1, 2))
    await publish(harness, 0, 2, 2, 2)
    reader = harness.reader(sampling="freshest")
    async with harness.running(reader):
        await harness.until_read(reader, 8)
        assert (await reader.next_group(2)).group_id == "d/3/0"
        assert (await reader.next_group(1)).group_id == "d/0/0"
        assert (await reader.next_group(2)).group_id == "d/2/0"
    assert harness.skips() == []


async def test_groups_beyond_the_staleness_cap_are_skipped_at_reading_and_at_taking() -> None:
    harness = ReaderHarness(version=PolicyVersion(1, 2))
    await publish(harness, 0, 1, 2)
    reader = harness.reader(sampling="capped", staleness_cap=1)
    async with harness.running(reader):
        await harness.until_read(reader, 6)
        harness.version = PolicyVersion(1, 3)
        assert (await next_group(reader)).group_id == "d/2/0"
        await reader.flush()
    assert Counter(skip.group_id for skip in harness.skips()) == {"d/0/0": 2, "d/1/0": 2}
    assert {skip.reason for skip in harness.skips()} == {SkipReason.STALE}
