"""Expected answers: what the column ``answer`` may hold, and how to find an answer in a completion."""

import json
import re
from ast import literal_eval
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
_UNIT_WORDS = (
    r"cm|mm|km|m|kg|mg|g|lbs?|oz|ft|feet|foot|in|inch(?:es)?|yards?|miles?|mph|kmh|hours?|hrs?|h|minutes?|mins?|"
    r"seconds?|secs?|s|days?|weeks?|months?|years?|degrees?|deg|dollars?|cents?|lit(?:er|re)s?|ml|l|met(?:er|re)s?|"
    r"cups?|pounds?|square units|cubic units|units?"
)
UNIT = re.compile(
    r"(?<=[\d})])(?:\s*\\(?:text\w*|mathrm|mbox)\s*\{[^{}]*\}"
    rf"|\s+(?:(?:square|cubic|sq\.?)\s+)?(?:{_UNIT_WORDS})\.?|\s*(?:cm|mm|km|kg))(?:\s*\^\s*(?:\d|\{{\d\}}))?\s*$"
)
"""The unit after a number, which math_verify does not compare."""
_SIGN = re.compile(r"\\?[$€£]\s*[\d.,]*\d")
_OTHER_UNITS = r"[kMGTmµnc]?(?:N|J|Wh?|V|A|Hz|Pa|mol|B|eV|Ω|L)|°\s*[CF]|K|C|F|rad|bar|atm|tons?|USD|EUR|GBP"
_ONE_UNIT = rf"(?:{_UNIT_WORDS}|{_OTHER_UNITS})"
_LETTERS = re.compile(
    rf"[-+]?[\d.,]*\d\s+(?:{_OTHER_UNITS}|{_ONE_UNIT}(?:\s*[/·*]\s*{_ONE_UNIT}(?:\s*\^\s*-?\d|[²³])?)+)"
)
"""A number with another unit, such as 5 N and 5 km/h."""
_WRITTEN = {
    "a missing value": re.compile(r"nan|NaN|<NA>|NaT|None|NULL|null|\\N"),
    "a whole number with a decimal point, as beside blanks": re.compile(r"-?\d+\.0"),
    "an object of Python": re.compile(r"(?:[a-z]+\.)?(?:array|tensor|\w*int\d+|float\d+|Decimal)\(.*\)", re.DOTALL),
    "bytes of Python": re.compile(r"b(['\"]).*\1", re.DOTALL),
    "a formula of a spreadsheet": re.compile(r'="[^"]*"'),
}
"""Texts that libraries and spreadsheets write for other values."""


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


def drops_unit(answer: str) -> bool:
    """Whether an expected answer is a number with a unit that ``math_verify`` does not compare, as in 5 km and $5."""
    return bool(UNIT.search(answer) or _SIGN.fullmatch(answer))


def has_letters_as_unit(answer: str) -> bool:
    """Whether an expected answer is a number with letters that ``math_verify`` takes for factors, as in 5 N."""
    return bool(_LETTERS.fullmatch(answer)) and not UNIT.search(answer)


def written_form(answer: str) -> str | None:
    """What a text is that a library wrote for another value, such as a list or a float; None if it is just a text."""
    for form, pattern in _WRITTEN.items():
        if pattern.fullmatch(answer):
            return form
    if not answer.startswith(("[", "{")):
        return None
    try:
        found = literal_eval(answer)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        try:
            found = json.loads(answer)
        except (ValueError, RecursionError):
            return None
    if isinstance(found, dict):
        return "a mapping"
    return "a list" if isinstance(found, list) and any(isinstance(one, str | list) for one in found) else None


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
