"""Starts the reward functions and lets each score the first prompt's own answer, and nothing."""

from deploy.settings.tree import Settings
from deploy.starting.checks.check import Check
from producers.rewards.runner import RewardRunner, ScoreRequest, Scores
from schemas.messages.prompts import Prompt

SAMPLE = "a sample completion"


async def check_rewards(settings: Settings, prompt: Prompt) -> list[Check]:
    """What each function says.

    Raises:
        RewardLoadError: one cannot be loaded.
    """
    answer = prompt.columns.get("answer")
    text = SAMPLE if answer is None else str(answer)
    runner = RewardRunner(settings.rewards)
    await runner.start()
    try:
        scored = [await runner.score(ScoreRequest(prompt, one, [*range(len(one))])) for one in (text, "")]
    finally:
        await runner.close()
    what = "a sample completion" if answer is None else f"the answer of {prompt.prompt_id}"
    return [_of(name, scored, what) for name in runner.names]


def _of(name: str, scored: list[Scores], what: str) -> Check:
    for scores in scored:
        if name in scores.errors:
            return Check("rewards", "fail", f"{name}: {scores.errors[name]}")
    values = [scores.rewards[name] for scores in scored]
    if values == [None, None]:
        return Check("rewards", "note", f"{name} gives no reward (None) for {what}, nor for nothing")
    said = f"{name} gives {_shown(values[0])} for {what}, {_shown(values[1])} for nothing"
    if values[0] == values[1]:
        return Check("rewards", "note", f"{said}: can it tell a good completion from a bad one?")
    return Check("rewards", "ok", said)


def _shown(value: float | None) -> str:
    return "none" if value is None else f"{value:g}"
