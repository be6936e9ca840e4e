import random

from hypothesis import given
from hypothesis import strategies as st

from streamrl.consumers.batching.micro_batches import Group, Sample
from streamrl.consumers.ingest.groups import ClosedGroup, GroupAssembler, ReadyGroups, Rejection
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.reports import RecordRef, SkipReason
from tests.consumers.factories import sample, trajectory


def assembler() -> GroupAssembler:
    return GroupAssembler()


def add(groups: GroupAssembler, group_id: str, index: int, *, of: int, usable: bool = True) -> ClosedGroup | None:
    found = sample(group_id, index, of=of, offset=index)
    outcome = found if usable else Rejection(found.ref, SkipReason.POISON, "bad")
    return groups.add(found.trajectory, outcome)


def test_a_group_is_whole_when_every_sample_is_accounted_for() -> None:
    groups = assembler()
    assert add(groups, "d/0/0", 2, of=3) is None
    assert add(groups, "d/0/0", 0, of=3, usable=False) is None
    closed = add(groups, "d/0/0", 1, of=3)
    assert closed is not None
    assert [found.trajectory.sample_index for found in closed.group.samples] == [1, 2]
    assert [rejection.ref.offset for rejection in closed.rejections] == [0]
    assert (closed.missing, closed.is_usable) == (0, True)


def test_fewer_than_two_usable_samples_are_nothing_to_compare_unless_one_was_ordered() -> None:
    groups = assembler()
    add(groups, "d/0/0", 0, of=2, usable=False)
    pair, single = add(groups, "d/0/0", 1, of=2), add(groups, "d/1/0", 0, of=1)
    assert pair is not None
    assert single is not None
    assert (pair.is_usable, single.is_usable) == (False, True)


def test_a_group_is_closed_when_its_newest_order_is_long_past() -> None:
    groups = assembler()
    for group_id, index, number in (("d/0/0", 0, 3), ("d/0/0", 1, 7), ("d/1/0", 0, 3), ("d/2/0", 0, 4)):
        found = sample(group_id, index, of=4, offset=index, admitted_version=PolicyVersion(1, number))
        groups.add(found.trajectory, found)
    assert groups.close_outdated(3) == []
    (first,) = groups.close_outdated(4)
    assert (first.group.group_id, first.missing, first.is_usable) == ("d/1/0", 3, False)
    closed = groups.close_outdated(8)
    assert [(one.group.group_id, one.missing, one.is_usable) for one in closed] == [
        ("d/0/0", 2, True),
        ("d/2/0", 3, False),
    ]


def test_a_group_is_as_old_as_its_oldest_usable_sample() -> None:
    groups = assembler()
    for index, created_at in enumerate((7.0, 5.0)):
        found = sample("d/0/0", index, created_at=created_at)
        closed = groups.add(found.trajectory, found)
    assert closed is not None
    assert closed.group.created_at == 5.0


def test_samples_that_contradict_their_group_are_rejected() -> None:
    groups = assembler()
    add(groups, "d/0/0", 0, of=2)
    reasons = [
        (trajectory("d/0/0", 1), None),
        (trajectory("d/0/0", 0), SkipReason.DUPLICATE),
        (trajectory("d/0/0", 2, of=2), SkipReason.POISON),
        (trajectory("d/0/0", 1, of=3), SkipReason.POISON),
        (trajectory("d/0/0", 1, trajectory_id="other/1"), SkipReason.POISON),
    ]
    for found, reason in reasons:
        objection = groups.objection(found)
        assert (objection[0] if objection else None) is reason


def test_one_group_may_be_ready_twice() -> None:
    ready = ReadyGroups(lambda: 1)
    for offset in (0, 9):
        ready.push(Group("d/0/0", 5.0, (sample("d/0/0", 0, offset=offset),)))
    assert [ready.pop().samples[0].ref.offset for _ in range(2)] == [0, 9]


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 31)), max_size=8), st.integers(0, 10**6))
def test_a_sample_is_in_one_group_once(plan: list[tuple[int, int]], seed: int) -> None:
    """Any order of arrival, any samples refused (bits of the mask)."""
    arrivals = [(f"d/{g}/0", i, of, mask >> i & 1 == 0) for g, (of, mask) in enumerate(plan) for i in range(of)]
    random.Random(seed).shuffle(arrivals)
    groups, closings = assembler(), list[ClosedGroup]()
    for group_id, index, of, usable in arrivals:
        if (closed := add(groups, group_id, index, of=of, usable=usable)) is not None:
            closings.append(closed)
    assert groups.open == {}
    left: list[RecordRef] = [
        *(found.ref for closed in closings for found in closed.group.samples),
        *(rejection.ref for closed in closings for rejection in closed.rejections),
    ]
    assert sorted(ref.trajectory_id for ref in left) == sorted(
        f"{group_id}/{index}" for group_id, index, _, _ in arrivals
    )
    assert all(isinstance(found, Sample) for closed in closings for found in closed.group.samples)
