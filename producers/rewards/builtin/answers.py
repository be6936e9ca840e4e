"""The answer in a completion, and whether it is the expected one to the letter. Knows no mathematics."""

import re
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

Reward = Callable[..., list[float | None]]


def texts_of(completions: Sequence[Any]) -> list[str]:
    """Completions as text: plain ones as they are, of conversational ones what the assistant said."""
    return [completion if isinstance(completion, str) else completion[0]["content"] for completion in completions]


def answer_in(text: str, pattern: str | None) -> str | None:
    """The first group of the pattern's last match; without a pattern the whole text; None: no match."""
    if pattern is None:
        return text
    last = deque(re.finditer(pattern, text, re.DOTALL), maxlen=1)
    return last[0][1 if last[0].re.groups else 0] if last else None


def expected_ones(answers: Sequence[Any] | None) -> Sequence[Any]:
    """The column of answers.

    Raises:
        ValueError: there is none.
    """
    if answers is None:
        raise ValueError("expected a column 'answer', got none; set data.answer_column")
    return answers


def accepted(answer: Any) -> list[str]:
    """The texts that an entry of the column accepts: one, or each of a list."""
    return [str(one).strip() for one in (answer if isinstance(answer, list) else [answer])]


def exact_match(answer_pattern: str | None = None) -> Reward:
    """Makes the reward: 1 if the answer is the expected one but for white space around it, else 0.

    None where the data set expects nothing.
    """

    def score(completions: Sequence[Any], answer: Sequence[Any] | None = None, **_columns: Any) -> list[float | None]:
        found = [answer_in(text, answer_pattern) for text in texts_of(completions)]
        return [
            None if wanted is None else float(one is not None and one.strip() in accepted(wanted))
            for one, wanted in zip(found, expected_ones(answer), strict=True)
        ]

    return score
