"""The math-verify library, called as the reward process calls it, and in a reward process itself."""

from typing import Any

import pytest

from streamrl.producers.rewards.builtin import math_verify
from streamrl.producers.rewards.runner import RewardRunner, ScoreRequest
from streamrl.producers.rewards.settings import RewardSettings
from streamrl.schemas.trajectories import Prompt


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("The answer is $\\frac{2}{4}$.", "1/2", 1.0),
        ("so it is \\boxed{0.5}", "\\frac{1}{2}", 1.0),
        ("I think 72", "48/2 = 24 clips, 48+24 = 72\n#### 72", 1.0),
        ("It is 73", "72", 0.0),
        ("no idea", "72", 0.0),
        ("", "72", 0.0),
        ("$x^2 + 2x + 1$", "$(x+1)^2$", 1.0),
        ("42", 42, 1.0),
        ("5", ["3", "5"], 1.0),
        ("5", None, None),
        ("5", "", None),
    ],
)
def test_equal_mathematics_is_right_however_it_is_written(completion: str, answer: Any, reward: float | None) -> None:
    assert math_verify()(completions=[completion], answer=[answer]) == [reward]


def test_only_what_the_pattern_finds_is_judged() -> None:
    score = math_verify(r"<answer>(.*?)</answer>")
    texts = ["<answer>1/2</answer> or 3", "1/2", "<answer></answer>"]
    assert score(completions=texts, answer=["0.5"] * 3) == [1.0, 0.0, 0.0]


@pytest.mark.processes
async def test_hostile_completions_end_in_time_and_harm_no_other() -> None:
    """Deep nesting, endless LaTeX, a number of more digits than there are atoms."""
    settings = RewardSettings(functions=("math_verify", "format"), timeout_s=3.0)
    texts = ["$1/2$", "(" * 30_000 + ")" * 30_000, "$$" + "\\frac{" * 3_000, "$9^{9^{9^9}}$", "$0.5$"]
    runner = RewardRunner(settings)
    await runner.start()
    try:
        results = [await runner.score(_request(text)) for text in texts]
    finally:
        await runner.close()
    rewards = [result.rewards["math_verify"] for result in results]
    assert rewards[0] == rewards[4] == 1.0
    assert set(rewards[1:4]) <= {0.0, None}
    assert all(result.rewards["format"] == 0.0 for result in results)


def _request(text: str) -> ScoreRequest:
    return ScoreRequest(Prompt(prompt_id="d/0", dataset="d", content="?", columns={"answer": "1/2"}), text, [1])
