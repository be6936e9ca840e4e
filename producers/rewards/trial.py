"""Tries the reward functions on rows of the data before a run: each row is paid for its own answer, for another row's
answer, and for an empty text. A row without an answer gets another row's too: a function may fail on it only then.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from streamrl.producers.rewards.answers import completion_with
from streamrl.producers.rewards.runner import RewardRunner, ScoreRequest, Scores
from streamrl.producers.rewards.settings import RewardSettings
from streamrl.schemas.trajectories import Prompt

SAMPLE_COMPLETION = "a sample completion"
ROWS_AT_ONCE = 8
"""Rows scored at the same time, so that a function can wait for several. The time limit is checked in between."""
JUDGES_OF_ROWS = ("math_verify", "exact_match", "code_tests")
"""Functions whose reward is None because of the row, for any completion."""
Completion = tuple[str, Sequence[int]]
"""A completion's text as rewards see it, and its token ids."""
Writer = Callable[[str], Completion]
"""Makes a completion of a text, as if the model had written it."""


def made_up(text: str) -> Completion:
    """The text unchanged, with made-up token ids, one for each character: some rewards depend on their number."""
    return text, range(len(text))


@dataclass(frozen=True)
class TriedRow:
    """A row and the completions tried on it. ``own``: with the row's answer; ``other``: with another row's answer.

    ``text``: the own completion before it was tokenised. ``other`` is None if no other row has another answer.
    """

    prompt: Prompt
    text: str
    own: Completion
    other: Completion | None

    @property
    def answer(self) -> str:
        """The row's answer as text, or the first of several; empty without one."""
        return _answer_of(self.prompt) or ""

    @property
    def has_answer(self) -> bool:
        """Whether the own completion gives the row's answer."""
        return bool(self.answer)

    @property
    def is_changed(self) -> bool:
        """Whether the tokenizer changes the own completion's text."""
        return self.own[0].strip() != self.text.strip()


RowRewards = tuple[float | None, ...]
"""Rewards of a row's own answer, of an empty text and, if there is one, of another row's answer."""


@dataclass
class RewardTrial:
    """The results of one function, named ``name``. ``rewards``: by the prompt's id, of rows without a failed call.

    ``errors``: prompt id and reason of each failed call; ``failed``: ids of the rows with a failed call; ``lost``: ids
    of the rows on which it failed with every completion.
    """

    function: str
    name: str
    rewards: dict[str, RowRewards] = field(default_factory=dict)
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
        """Share of the rows on which the function failed with every completion.

        At least this share of a run's trajectories would have no reward.
        """
        return len(self.lost) / max(1, self.rows)

    @property
    def first_error(self) -> str:
        """Prompt id and reason of the first failure."""
        return ": ".join(self.errors[0])

    @property
    def unpaid(self) -> list[str]:
        """Ids of the rows whose own answer gets 0 or no reward."""
        return [prompt_id for prompt_id, rewards in self.rewards.items() if not rewards[0]]

    @property
    def deceived(self) -> list[str]:
        """Ids of the rows on which another row's answer gets as much as their own."""
        return [
            prompt_id
            for prompt_id, (own, _, *others) in self.rewards.items()
            if own and any(other is not None and other >= own > 0 for other in others)
        ]

    @property
    def pays_empty(self) -> bool:
        """Whether an empty text gets as much as the row's own answer on every row, and more than nothing."""
        return all(own and empty == own for own, empty, *_ in self.rewards.values())

    @property
    def is_constant(self) -> bool:
        """Whether all completions of all rows got the same reward."""
        return len({reward for rewards in self.rewards.values() for reward in rewards}) == 1

    def means(self) -> list[float]:
        """Mean rewards of own answers, empty texts and, if any were tried, other rows' answers; None counts as 0."""
        tried: tuple[list[float], ...] = ([], [], [])
        for rewards in self.rewards.values():
            for place, reward in enumerate(rewards):
                tried[place].append(reward or 0.0)
        return [sum(each) / len(each) for each in tried if each]

    def note_row(self, prompt_id: str, scored: Sequence[Scores]) -> None:
        """Note the function's scores of a row's completions, in the order of ``RowRewards``."""
        self.rows += 1
        failures = [(prompt_id, one.errors[self.name]) for one in scored if self.name in one.errors]
        if failures:
            self.failed.add(prompt_id)
            self.errors += failures
            if len(failures) == len(scored):
                self.lost.add(prompt_id)
        else:
            self.rewards[prompt_id] = tuple(one.rewards[self.name] for one in scored)


@dataclass(frozen=True)
class RewardTrials:
    """The rows that were tried, and the results of each function."""

    rows: list[TriedRow]
    functions: list[RewardTrial]

    @property
    def unrewarded(self) -> list[str]:
        """Ids of the rows whose completions can never get a reward: no function applies, or one always fails."""
        return [row.prompt.prompt_id for row in self.rows if self._is_unrewarded(row.prompt.prompt_id)]

    def unrewarded_rows(self) -> str:
        """How many rows get no reward, with the first of them and its answer."""
        first = next(row.prompt for row in self.rows if row.prompt.prompt_id == self.unrewarded[0])
        answer = f"{first.columns.get('answer')!r:.80}"
        return f"{len(self.unrewarded)} of {len(self.rows)} rows, first {first.prompt_id} with answer {answer}"

    def _is_unrewarded(self, prompt_id: str) -> bool:
        if any(prompt_id in trial.lost for trial in self.functions):
            return True
        return all(
            trial.function in JUDGES_OF_ROWS and set(trial.rewards.get(prompt_id, ())) == {None}
            for trial in self.functions
        )


async def try_rewards(
    settings: RewardSettings, prompts: Sequence[Prompt], patience_s: float, writer: Writer = made_up
) -> RewardTrials:
    """A trial of each function on these rows, or on as many of the first ones as fit into ``patience_s`` seconds.

    Raises:
        RewardLoadError: a function cannot be loaded.
    """
    runner = RewardRunner(settings)
    trials = RewardTrials([], [RewardTrial(*pair) for pair in zip(settings.functions, settings.names, strict=True)])
    rows = tried_rows(settings, prompts, writer)
    await runner.start()
    started = time.monotonic()
    try:
        for start in range(0, len(rows), ROWS_AT_ONCE):
            if start and time.monotonic() - started > patience_s:
                break
            await _try_rows(runner, trials, rows[start : start + ROWS_AT_ONCE])
    finally:
        await runner.close()
    return trials


def tried_rows(settings: RewardSettings, prompts: Sequence[Prompt], writer: Writer = made_up) -> list[TriedRow]:
    """The rows with the completions to try, in the form that the settings' patterns ask for."""
    answers = [_answer_of(prompt) for prompt in prompts]
    shape = settings.format_pattern if "format" in settings.functions else None
    texts = [
        SAMPLE_COMPLETION if answer is None else completion_with(answer, settings.answer_pattern, shape)
        for answer in answers
    ]
    written = [writer(text) for text in texts]
    rows = []
    for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        after = (at % len(prompts) for at in range(index + 1, index + len(prompts)))
        other = next((at for at in after if answers[at] not in (None, answer)), None)
        rows.append(TriedRow(prompt, texts[index], written[index], None if other is None else written[other]))
    return rows


def _answer_of(prompt: Prompt) -> str | None:
    """The row's answer as text, or the first of several; None without one that can be written down."""
    answer = prompt.columns.get("answer")
    first = answer[0] if isinstance(answer, list) and answer else answer
    is_written = isinstance(first, str | int | float) and not isinstance(first, bool)
    return str(first).strip() or None if is_written else None


async def _try_rows(runner: RewardRunner, trials: RewardTrials, rows: Sequence[TriedRow]) -> None:
    requests = [
        [ScoreRequest(row.prompt, *completion) for completion in (row.own, ("", []), row.other) if completion]
        for row in rows
    ]
    scored = await asyncio.gather(*(runner.score(request) for of_row in requests for request in of_row))
    results = iter(scored)
    for row, of_row in zip(rows, requests, strict=True):
        scores = [next(results) for _ in of_row]
        trials.rows.append(row)
        for trial in trials.functions:
            trial.note_row(row.prompt.prompt_id, scores)
