"""Tries the reward functions on rows of the data before a run: with the row's right answer, and with nothing."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from streamrl.producers.rewards.runner import RewardRunner, ScoreRequest, Scores
from streamrl.producers.rewards.settings import RewardSettings
from streamrl.schemas.trajectories import Prompt

SAMPLE_COMPLETION = "a sample completion"
ROWS_AT_ONCE = 8
"""Rows scored together: a function that waits for something waits for several, and patience is looked at in between."""


@dataclass
class RewardTrial:
    """How one function judged: ``pairs``, its rewards for the answer and for nothing, by the prompt's id.

    ``errors``: of those calls that failed, with the prompt's id; ``failed``: ids of the rows with such a call;
    ``lost``: of those on which it failed whatever the completion.
    """

    name: str
    pairs: dict[str, tuple[float | None, float | None]] = field(default_factory=dict)
    errors: list[tuple[str, str]] = field(default_factory=list)
    failed: set[str] = field(default_factory=set)
    lost: set[str] = field(default_factory=set)
    rows: int = 0

    @property
    def share(self) -> float:
        """Of the rows that it failed on."""
        return len(self.failed) / max(1, self.rows)

    @property
    def lost_share(self) -> float:
        """Of the rows that it failed on in any case: at least so many trajectories of a run would be without reward."""
        return len(self.lost) / max(1, self.rows)

    @property
    def first_error(self) -> str:
        """Where it failed first, and how."""
        return ": ".join(self.errors[0])

    def note_row(self, prompt: Prompt, scored: Sequence[Scores]) -> None:
        """What it said of a row."""
        self.rows += 1
        failures = [(prompt.prompt_id, one.errors[self.name]) for one in scored if self.name in one.errors]
        if failures:
            self.failed.add(prompt.prompt_id)
            self.errors += failures
            if len(failures) == len(scored):
                self.lost.add(prompt.prompt_id)
        else:
            answer, nothing = (one.rewards[self.name] for one in scored)
            self.pairs[prompt.prompt_id] = (answer, nothing)


def right_answer(prompt: Prompt) -> str:
    """A completion that ought to please: most rewards tell the row's answer from nothing."""
    answer = prompt.columns.get("answer")
    return SAMPLE_COMPLETION if answer is None else str(answer)


async def try_rewards(settings: RewardSettings, prompts: Sequence[Prompt], patience_s: float) -> list[RewardTrial]:
    """A trial of each function on these rows, or on as many of the first ones as there is patience for.

    Raises:
        RewardLoadError: one cannot be loaded.
    """
    runner = RewardRunner(settings)
    trials = [RewardTrial(name) for name in runner.names]
    await runner.start()
    began = time.monotonic()
    try:
        for start in range(0, len(prompts), ROWS_AT_ONCE):
            if start and time.monotonic() - began > patience_s:
                break
            await _try_rows(runner, trials, prompts[start : start + ROWS_AT_ONCE])
    finally:
        await runner.close()
    return trials


async def _try_rows(runner: RewardRunner, trials: Sequence[RewardTrial], prompts: Sequence[Prompt]) -> None:
    # Made-up token ids, one a character, for rewards that look at their number.
    requests = [
        ScoreRequest(prompt, text, [*range(len(text))]) for prompt in prompts for text in (right_answer(prompt), "")
    ]
    scored = await asyncio.gather(*(runner.score(request) for request in requests))
    for index, prompt in enumerate(prompts):
        for trial in trials:
            trial.note_row(prompt, scored[2 * index : 2 * index + 2])
