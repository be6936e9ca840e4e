"""Expected answers: what the column ``answer`` may hold, and how to find an answer in a completion."""

import re
from collections import deque
from typing import Any

_CARRIERS = (
    "{}",
    "<answer>{}</answer>",
    "\\boxed{{{}}}",
    "#### {}",
    "Answer: {}",
    "The answer is {}",
    "<think>\n</think>\n<answer>\n{}\n</answer>",
    "<think>\n</think>\n<answer>\n\\boxed{{{}}}\n</answer>",
    "<think>\n</think>\n\\boxed{{{}}}",
    "<think>\n</think>\n{}",
)
"""Forms in which models are usually asked to give an answer."""


def accepted(answer: Any) -> list[str]:
    """The answers that an entry of the column accepts, as texts: one, or each of a list. Empty: the row has none.

    Raises:
        ValueError: the entry is not text or a number, such as a mapping.
    """
    found = []
    for one in answer if isinstance(answer, list) else [answer]:
        if isinstance(one, bool) or not isinstance(one, str | int | float | None):
            got = f"a mapping with {', '.join(map(repr, one))}" if isinstance(one, dict) else f"{one!r}"
            raise ValueError(
                "expected text, a number or a list of these as answer, got "
                f"{got:.80}; set data.answer_column to a part of it (column.part), or write a reward that reads it"
            )
        if one is not None and (text := str(one).strip()):
            found.append(text)
    return found


def answer_in(text: str, pattern: str | None) -> str | None:
    """The first group of the pattern's last match, or the whole text without a pattern; None if nothing matches."""
    if pattern is None:
        return text
    # re finds matches only from the front, so all are iterated and the last is kept.
    last = deque(re.finditer(pattern, text, re.DOTALL), maxlen=1)
    return last[0][1 if last[0].re.groups else 0] if last else None


def completion_with(answer: str, answer_pattern: str | None, format_pattern: str | None) -> str:
    """A completion that gives an answer: in the first usual form in which the patterns find it; else the answer alone.

    ``format_pattern``: must match the whole completion; None: any form will do.
    """
    forms = [carrier.format(answer) for carrier in _CARRIERS]
    found = [form for form in forms if (answer_in(form, answer_pattern) or "").strip() == answer.strip()]
    whole = [form for form in found or forms if format_pattern and re.fullmatch(format_pattern, form, re.DOTALL)]
    return (whole or found or forms)[0]
