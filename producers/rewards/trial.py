"""Tries the reward functions on rows of the data before a run: with the row's right answer, and with an empty text."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from streamrl.producers.rewards.runner import RewardRunner, ScoreRequest, Scores
from streamrl.producers.rewards.settings import RewardSettings
from streamrl.schemas.trajectories import Prompt

SAMPLE_COMPLETION = "a sample completion"
ROWS_AT_ONCE = 8
"""Rows scored at the same time, so that a function can wait for several. The time limit is checked in between."""


@dataclass
class RewardTrial:
    """The results of one function. ``pairs``: rewards for the answer and for an empty text, by the prompt's id.

    ``errors``: prompt id and reason of each failed call; ``failed``: ids of the rows with a failed call; ``lost``: ids
    of the rows on which it failed with both completions.
    """

    name: str
    pairs: dict[str, tuple[float | None, float | None]] = field(default_factory=dict)
    errors: list[tuple[str, str]] = field(default_factory=list)
    failed: set[str] = field(default_factory=set)
    lost: set[str] = field(default_factory=set)
    rows: int = 0

    @property
    def share(self) -> float:
        """Share of the rows on which the function failed."""
        return len(self.failed) / max(1, self.rows)

    @property
    def lost_share(self) -> float:
        """Share of the rows on which the function failed with both completions.

        At least this share of a run's trajectories would have no reward.
        """
        return len(self.lost) / max(1, self.rows)

    @property
    def first_error(self) -> str:
        """Prompt id and reason of the first failure."""
        return ": ".join(self.errors[0])

    def note_row(self, prompt: Prompt, scored: Sequence[Scores]) -> None:
        """Note the function's scores of a row."""
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
    """The row's answer as a completion: most rewards score it higher than an empty text."""
    answer = prompt.columns.get("answer")
    return SAMPLE_COMPLETION if answer is None else str(answer)


async def try_rewards(settings: RewardSettings, prompts: Sequence[Prompt], patience_s: float) -> list[RewardTrial]:
    """A trial of each function on these rows, or on as many of the first ones as fit into ``patience_s`` seconds.

    Raises:
        RewardLoadError: a function cannot be loaded.
    """
    runner = RewardRunner(settings)
    trials = [RewardTrial(name) for name in runner.names]
    await runner.start()
    started = time.monotonic()
    try:
        for start in range(0, len(prompts), ROWS_AT_ONCE):
            if start and time.monotonic() - started > patience_s:
                break
            await _try_rows(runner, trials, prompts[start : start + ROWS_AT_ONCE])
    finally:
        await runner.close()
    return trials


async def _try_rows(runner: RewardRunner, trials: Sequence[RewardTrial], prompts: Sequence[Prompt]) -> None:
    # Made-up token ids, one per character, for rewards that depend on their number.
    requests = [
        ScoreRequest(prompt, text, [*range(len(text))]) for prompt in prompts for text in (right_answer(prompt), "")
    ]
    scored = await asyncio.gather(*(runner.score(request) for request in requests))
    for index, prompt in enumerate(prompts):
        for trial in trials:
            trial.note_row(prompt, scored[2 * index : 2 * index + 2])
