"""Whether the answer in a completion equals the expected one as mathematics, judged by the math-verify library.

Its time-outs are alarm signals: it must run in a main thread, which that of a reward process is. What holds an alarm
up ends with the process, after ``rewards.timeout_s``.
"""

from collections.abc import Sequence
from typing import Any

from producers.rewards.builtin.answers import Reward, accepted, answer_in, expected_ones, texts_of

PARSING_TIMEOUT_S = 3
COMPARING_TIMEOUT_S = 3
"""Hundreds of times what an ordinary answer takes: a busy machine must not make a right one wrong."""
MAX_CHARACTERS = 20_000
"""Of a completion, the last so many are searched for an answer: the search is quadratic at worst."""


def math_verify(answer_pattern: str | None = None) -> Reward:
    """Makes the reward: 1 if the last formula or number is equal to the expected one, else 0; loads the library.

    None where the data set expects nothing that can be parsed.
    """
    from math_verify import verify

    def judge(text: str, wanted: Any) -> float | None:
        golds = [parsed for one in accepted(wanted) if (parsed := _parsed(one))]
        if wanted is None or not golds:
            return None
        found = answer_in(text, answer_pattern)
        target = _parsed(found[-MAX_CHARACTERS:]) if found else []
        return float(any(verify(gold, target, timeout_seconds=COMPARING_TIMEOUT_S) for gold in golds if target))

    def score(completions: Sequence[Any], answer: Sequence[Any] | None = None, **_columns: Any) -> list[float | None]:
        return [judge(text, wanted) for text, wanted in zip(texts_of(completions), expected_ones(answer), strict=True)]

    judge("$x^2 + 2x + 1$", "$(x+1)^2$")  # the first symbolic comparison loads and makes tables for a second or more
    return score


def _parsed(text: str) -> list[Any]:
    """What the library finds; LaTeX that is not marked as such is taken for a formula as a whole."""
    from math_verify import parse
    from math_verify.errors import TimeoutException

    marked = any(mark in text for mark in ("$", "\\boxed", "\\(", "\\["))
    try:
        parsed: list[Any] = parse(
            text if marked or "\\" not in text else f"${text}$", parsing_timeout=PARSING_TIMEOUT_S
        )
    except TimeoutException:
        return []
    return parsed
