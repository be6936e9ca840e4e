"""When a trainer that skips every group ends."""

import pytest
from structlog.testing import capture_logs

from streamrl.consumers.ingest.limits import IntakeLimits
from streamrl.consumers.ingest.skip_streak import ADVICE, SkipStreak
from streamrl.schemas.errors import NothingToTrain
from streamrl.schemas.reports import SkipReason
from streamrl.schemas.settings import LoopSettings

EQUAL = (SkipReason.ZERO_ADVANTAGE, "all rewards of the group are equal: 0")


def test_a_run_that_finds_nothing_to_train_ends() -> None:
    streak = SkipStreak(8)
    with capture_logs() as logged:
        for number in range(7):
            streak.add(f"p/{number}/0", *EQUAL)
        with pytest.raises(NothingToTrain) as ended:
            streak.add("p/7/0", SkipReason.FILTERED, "truncated")
    assert str(ended.value).startswith(
        "expected groups that can be trained, got 8 skipped in a row (7 zero_advantage, 1 filtered), "
        "the latest p/7/0: truncated; give prompts whose samples earn different rewards"
    )
    assert ended.value.exit_code == 4
    assert [line["log_level"] for line in logged] == ["warning"] * 4
    assert "p/1/0: all rewards of the group are equal: 0" in logged[0]["event"]


def test_a_group_that_can_be_trained_ends_the_streak() -> None:
    streak = SkipStreak(3)
    for number in range(20):
        streak.add(f"p/{number}/0", *EQUAL)
        streak.add(f"q/{number}/0", *EQUAL)
        streak.end()


@pytest.mark.parametrize("reason", sorted(set(SkipReason) - set(ADVICE)))
def test_groups_that_are_too_old_end_no_run(reason: SkipReason) -> None:
    streak = SkipStreak(3)
    for number in range(20):
        streak.add(f"p/{number}/0", reason, "too old")
    assert streak.groups == 0


def test_the_limit_grows_with_the_groups_of_a_step() -> None:
    limits = IntakeLimits(max_skipped_groups=400, max_skipped_steps=20)
    small, large = LoopSettings(groups_per_step=20), LoopSettings(groups_per_step=512)
    stale = LoopSettings(groups_per_step=20, mode="trajectory_async", max_staleness=19)
    assert [limits.end_after(loop) for loop in (small, large, stale)] == [400, 10_240, 800]
