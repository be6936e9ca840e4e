import pytest

from streamrl.observability.run_state.rewards import (
    BARS,
    HARDEST,
    PROMPTS_KEPT,
    REWARDS_KEPT,
    PromptDifficulty,
    RecentRewards,
    RewardHistory,
)


def test_few_values_have_a_bar_each_and_many_share_bars_of_equal_width() -> None:
    rewards = RecentRewards()
    for reward in (0.0, 1.0, 1.0, 0.5):
        rewards.add(reward)
    assert rewards.bars() == [(0.0, 0.0, 1), (0.5, 0.5, 1), (1.0, 1.0, 2)]
    for number in range(101):
        rewards.add(number / 100)
    bars = rewards.bars()
    assert len(bars) == BARS
    assert sum(bar.number for bar in bars) == len(rewards.newest)
    assert (bars[0].low, bars[-1].high) == (0.0, 1.0)
    assert {round(bar.high - bar.low, 6) for bar in bars} == {0.1}


def test_the_rewards_of_a_long_run_stay_bounded() -> None:
    rewards, difficulty = RecentRewards(), PromptDifficulty()
    for number in range(3 * PROMPTS_KEPT):
        rewards.add(float(number))
        difficulty.add(f"math/{number}/0", 0.0, solved=False)
    assert len(rewards.newest) == REWARDS_KEPT
    assert len(difficulty.prompts) == PROMPTS_KEPT
    assert len([*difficulty.hardest()]) == HARDEST


def test_prompts_are_solved_always_sometimes_or_never_over_all_their_groups() -> None:
    rewards_of = RewardHistory()
    difficulty = rewards_of.by_prompt
    given = {"easy": (1.0, 1.0), "mixed": (0.0, 1.0), "hard": (0.0, 0.2), "none": (None, None)}
    for prompt, rewards in given.items():
        for round_, reward in enumerate(rewards):
            rewards_of.add(f"math/{prompt}/{round_}", reward, solved=reward == 1.0)
    assert list(rewards_of.recent.newest) == [1.0, 1.0, 0.0, 1.0, 0.0, 0.2]
    assert difficulty.counts() == {"always": 1, "sometimes": 1, "never": 1}
    assert [(name, each.mean, each.samples) for name, each in difficulty.hardest()] == [
        ("math/hard", pytest.approx(0.1), 2),
        ("math/mixed", 0.5, 2),
    ]
