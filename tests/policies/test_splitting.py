"""Which worker samples for which arm of a split, and which orders of one are carried out."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.policies.splitting import arm_of, counts_of, deal_workers, decide_split
from streamrl.schemas.control import ArmShare, InstanceState, OperatorCommand

NAMES = ("a", "b", "c")
ATTACHED = {
    name: InstanceState(sequence=0, sent_at=0.0, policy=name, mode="detached" if name == "c" else "run")
    for name in NAMES
}


@st.composite
def some_shares(draw: st.DrawFn) -> dict[str, float]:
    """Of up to three arms; the served policy has the rest, or nothing."""
    weights = draw(st.lists(st.integers(1, 20), min_size=1, max_size=3))
    rest = draw(st.integers(0, 20))
    return {name: weight / (sum(weights) + rest) for name, weight in zip(NAMES, weights, strict=False)}


@given(some_shares(), st.integers(0, 40))
def test_every_arm_has_a_worker_and_workers_are_dealt_in_proportion(shares: dict[str, float], workers: int) -> None:
    counts = counts_of(shares, workers)
    assert sum(counts.values()) == workers
    assert set(counts) - {""} == set(shares)
    assert ("" in counts) == (sum(shares.values()) < 1 - 1e-9)
    if workers >= len(counts):
        assert min(counts.values()) >= 1
    wanted = {"": 1 - sum(shares.values())} | shares
    # A worker more than the one that each has is owed: nobody else was more in want of it.
    for arm in counts:
        for other in counts:
            if counts[arm] > 1:
                assert wanted[other] / (2 * counts[other] + 1) <= wanted[arm] / (2 * counts[arm] - 1) + 1e-9


@given(some_shares(), st.sets(st.integers(0, 30), min_size=1), st.sets(st.integers(0, 30), min_size=1))
def test_few_workers_change_arms(shares: dict[str, float], before: set[int], after: set[int]) -> None:
    first = deal_workers(shares, [f"w{n}" for n in before], {})
    there = [f"w{n}" for n in after]
    second = deal_workers(shares, there, first)
    assert deal_workers(shares, there, second) == second
    counts = counts_of(shares, len(there))
    assert Counter(second.get(worker, "") for worker in there) == {arm: n for arm, n in counts.items() if n}
    stayed = Counter(first.get(worker, "") for worker in there if first.get(worker, "") == second.get(worker, ""))
    had = Counter(first.get(worker, "") for worker in there)
    assert all(stayed[arm] == min(had[arm], counts.get(arm, 0)) for arm in {*had, *counts})


def test_without_arms_all_workers_follow_the_served_policy() -> None:
    assert deal_workers({}, ["w0", "w1"], {"w0": "a"}) == {}


@pytest.mark.parametrize(
    ("shares", "wanted"),
    [
        ([("a", 0.25)], {"a": 0.25}),
        ([("a", 0.25), ("policy", 0.75)], {"a": 0.25, "policy": 0.75}),
        ([], {}),
        ([("a", 0.5)], None),  # as it is
        ([("a", 0.7), ("policy", 0.4)], None),
        ([("a", 0.3), ("a", 0.3)], None),
        ([("b", 0.3)], None),  # served
        ([("c", 0.3)], None),  # detached
        ([("d", 0.3)], None),  # unknown
    ],
)
def test_a_split_is_of_policies_that_are_there_and_of_one_at_most(
    shares: list[tuple[str, float]], wanted: dict[str, float] | None
) -> None:
    arms = tuple(ArmShare(policy=name, share=share) for name, share in shares)
    decision = decide_split(OperatorCommand(action="split", shares=arms, sent_at=0.0), ATTACHED, "b", {"a": 0.5})
    assert (None if decision is None else decision.shares) == wanted


def test_arms_have_their_shares_of_the_groups_and_a_group_keeps_its_arm() -> None:
    groups = [f"gsm8k/{number}/0" for number in range(4000)]
    shares = {"a": 0.25, "b": 0.125}
    arms = [arm_of(group, shares) for group in groups]
    for arm, share in {**shares, "": 0.625}.items():
        assert abs(arms.count(arm) / len(groups) - share) < 0.03
    assert arms[:8] == ["b", "", "", "b", "a", "", "a", ""]  # the same in every process and release
    # Another arm behind them takes groups from the served policy alone.
    more = [arm_of(group, {**shares, "c": 0.3}) for group in groups]
    assert all(now == before or (before, now) == ("", "c") for before, now in zip(arms, more, strict=True))
    assert {arm_of(group, {"a": 0.5, "b": 0.5}) for group in groups} == {"a", "b"}
