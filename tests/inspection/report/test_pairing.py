import itertools
import random
from pathlib import Path

import numpy as np
import pytest

from streamrl.inspection.report.gathering import MOST_GROUPS, rewards_by_group
from streamrl.inspection.report.pairing import (
    LEAST_PAIRS,
    held_out_scores,
    late_rewards,
    mean_interval,
    paired_difference,
    paired_differences,
    signed_rank_p,
)
from streamrl.inspection.report.record import RunFacts, RunRecord, StepTable, TopicDigest
from streamrl.observability.run_state.trajectory_summary import TrajectorySummary
from streamrl.schemas.identifiers import PolicyVersion


def by_enumeration(differences: list[float]) -> float:
    """The two-sided p of the signed-rank test: the share of all signs at least as lopsided; no ties, no zeros."""
    ranks = np.argsort(np.argsort(np.abs(differences))) + 1
    middle = ranks.sum() / 2
    observed = ranks[np.array(differences) > 0].sum()
    sums = [
        sum(rank for rank, up in zip(ranks, signs, strict=True) if up)
        for signs in itertools.product((0, 1), repeat=len(ranks))
    ]
    as_lopsided = [total for total in sums if abs(total - middle) >= abs(observed - middle)]
    return len(as_lopsided) / len(sums)


@pytest.mark.parametrize("shift", [0.0, 0.3, 2.0])
def test_the_test_is_the_share_of_signs_that_are_as_lopsided(shift: float) -> None:
    chance = random.Random(5)
    differences = [chance.gauss(shift, 1.0) for _ in range(10)]
    assert signed_rank_p(np.array(differences)) == pytest.approx(by_enumeration(differences))


def test_chance_alone_is_called_a_difference_about_as_often_as_the_level_says_and_the_interval_holds_the_mean() -> None:
    random_ = np.random.default_rng(1)
    rounds = [random_.normal(0.0, 1.0, 40) + random_.exponential(1.0, 40) - 1.0 for _ in range(120)]
    assert 0 <= sum(signed_rank_p(each - np.median(each)) < 0.05 for each in rounds) <= 8
    covered = sum(low <= 0.0 <= high for low, high in map(mean_interval, rounds[:40]))
    assert covered >= 34


def test_only_prompts_that_both_have_count_and_few_are_not_judged() -> None:
    ours = {f"p/{n}": n / 10 for n in range(10)}
    theirs = {f"p/{n}": n / 10 + 0.2 + (n % 3) / 100 for n in range(5, 15)}
    few = paired_difference("reward", ("a", ours), ("b", theirs))
    assert few is not None
    assert few.prompts == 5 < LEAST_PAIRS
    assert (few.p, few.low, few.is_significant) == (None, None, False)
    assert "too few to judge" in few.text
    assert paired_difference("reward", ("a", ours), ("b", {"q/1": 1.0})) is None
    many = paired_difference("reward", ("a", ours), ("b", {name: value + 0.2 for name, value in ours.items()}))
    assert many is not None
    assert (many.prompts, many.difference, many.low, many.high) == pytest.approx((10, 0.2, 0.2, 0.2))
    assert many.is_significant
    same = paired_difference("reward", ("a", ours), ("b", ours))
    assert same is not None
    assert (same.p, same.difference, same.is_significant) == (1.0, 0.0, False)


def summary(group: str, reward: float | None, at: float) -> TrajectorySummary:
    version = PolicyVersion(1, 0)
    return TrajectorySummary(
        f"{group}/0", group, "w", 0, 1, 1, reward, version, version, "stop", "", at, at, 0, 0, "", 0, False
    )


def test_rewards_are_kept_by_group_with_their_time_and_of_many_the_same_ones_in_every_run() -> None:
    kept = rewards_by_group(
        [
            summary("a", 1.0, 0.0),
            summary("b", 0.5, 1.0),
            summary("a", 0.0, 2.0),
            summary("c", None, 3.0),
            summary("d", 2.0, 4.0),
        ]
    )
    assert kept == {"b": (0.5, 0.0), "a": (0.5, 0.25), "d": (2.0, 0.75)}
    short, long = (
        rewards_by_group([summary(f"p/{n}/0", 1.0, float(n)) for n in range(first, count)])
        for first, count in ((0, MOST_GROUPS + 500), (0, 3 * MOST_GROUPS))
    )
    assert len(short) == len(long) == MOST_GROUPS
    # Of two runs of which one is longer, what is kept of the longer one is kept of the shorter one, where it has it.
    assert {group for group in long if int(group.split("/")[1]) < MOST_GROUPS + 500} <= short.keys()


def record(name: str, rewards: dict[str, tuple[float, float]], after: tuple[dict[str, object], ...] = ()) -> RunRecord:
    topics = TopicDigest(held=1, read=1, rewards=rewards)
    facts = RunFacts.model_validate({"topics": topics, "evaluated": {"after": after}})
    return RunRecord(name, Path(name), StepTable(), facts=facts)


def test_runs_are_held_against_the_first_one_in_their_second_halves_and_on_held_out_questions() -> None:
    rows = tuple({"question": f"q{n}", "answer": "x", "correct": n % 2 == 0} for n in range(8))
    first = record("a", {f"p/{n}/0": (0.1 * (n % 4), n / 20) for n in range(20)}, rows)
    other = record("b", {f"p/{n}/0": (0.1 * (n % 4) + 0.05 + n / 1000, n / 20) for n in range(20)}, rows)
    assert late_rewards(first).keys() == {f"p/{n}/0" for n in range(10, 20)}
    assert held_out_scores(first)["q1"] == 0.0
    held_out, reward, *rest = paired_differences([first, other, first])
    assert (held_out.of, held_out.prompts, held_out.p) == ("held-out score", 8, 1.0)
    assert (reward.of, reward.first, reward.other, reward.prompts) == ("reward, second half", "a", "b", 10)
    assert reward.difference == pytest.approx(0.05 + 14.5 / 1000)
    assert reward.is_significant
    assert [each.other for each in rest] == ["a", "a"]
    assert paired_differences([record("a", {}), record("b", {})]) == []
