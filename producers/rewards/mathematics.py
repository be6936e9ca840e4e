"""Answers as mathematics: an expected answer is read as a whole, and the answer of a completion is found and compared.

The library math-verify parses and compares. It searches a text for the last formula or number, which is right for a
completion and wrong for an expected answer: it reads ``2x+1`` as 2, and ``(2, -3)`` as -3. So an expected answer is
either a number as a whole, or one formula as a whole. Importing this module loads the library, which takes seconds.

Invariants:
- an_expected_answer_is_read_whole_or_refused: no part of its text is left out, and words, choices and dates are no
  mathematics;
- a_time_out_is_no_verdict: a text that takes too long to read or to compare raises, so the reward is None.

The library's time-outs are alarm signals, so everything here must run in a main thread.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from latex2sympy2_extended.math_normalization import NormalizationConfig
from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
from math_verify.errors import TimeoutException
from math_verify.parser import extract_expr, get_extraction_regexes
from math_verify.utils import timeout
from sympy import Eq, Integer, Number, Rational, Tuple, simplify

from streamrl.producers.rewards.answers import UNIT

TIMEOUT_S = 3
"""Seconds for one parse or comparison: hundreds of times what an ordinary answer takes, so that right answers are not
without reward on a busy machine."""
MAX_CHARACTERS = 1000
"""Most characters of an answer that is read as a whole: the patterns are quadratic at worst."""
MAX_SHOWN_CHARACTERS = 60
KEPT_ANSWERS = 4096
"""Expected answers whose parse is kept: the completions of a group share one."""
DIGITS = 6
"""Decimal places to which numbers with a decimal point are compared, and significant digits of smaller numbers."""

_SIGNS = str.maketrans(
    {"−": "-", "×": r"\times ", "÷": r"\div ", "·": r"\cdot ", "π": r"\pi ", "∞": r"\infty ", "√": r"\sqrt "}
    | {"≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "°": r"^\circ ", "²": "^2", "³": "^3", "½": r"\frac{1}{2}"}
    | {"∅": r"\emptyset "}
)
_MARKED = re.compile(r"\$\$([^$]*)\$\$|\$([^$]*)\$|\\\(((?:(?!\\\)).)*)\\\)|\\\[((?:(?!\\\]).)*)\\\]", re.DOTALL)
"""One formula between its marks."""
_MARK = re.compile(r"(?<!\\)\$|\\\(|\\\[|\\boxed|\\fbox")
_SCIENTIFIC = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)[eE][+-]?\d{1,3}")
_MIXED = re.compile(r"(-?)(\d+)\s+(\d+)\s*/\s*(\d+)")
_THOUSANDS = re.compile(r"[^,]*?\d{1,3}(?:,\d{3})+(?:\.\d+)?[^,]*")
_SIDE_BY_SIDE = re.compile(r"(?<![\d_])\d+\s+\d|\d\.\d+\.\d")
_MODULUS = re.compile(r"\\[pb]mod\b|\bmod\b")
_IN_BASE = re.compile(r"(\d+)_\{?(\d+)\}?")
BASES = range(2, 37)
_HEXADECIMAL = re.compile(r"0[xXbBoO][\da-fA-F]+")
_DECIMAL_COMMA = re.compile(r"\d{1,3}(?:\.\d{3})+,\d+")
_RATIO = re.compile(r"\d+(?:\s*:\s*\d+){2,}")
_MAGNITUDE = re.compile(r"\b(?:hundred|thousand|million|billion|trillion|dozen)s?\b")
"""Words that are numbers: they are no unit."""
_DATE = re.compile(r"\d{4}-\d\d?-\d\d?|\d\d?/\d\d?/\d{2,4}|\d\d?:\d\d(?::\d\d)?")
_CHOICES = re.compile(r"\(?[A-Za-z]\)?(?:\s*(?:,|;|&|\band\b|\bor\b)\s*\(?[A-Za-z]\)?)*[.)]?")
_SPACES = re.compile("[\u00a0\u2009\u202f]" r"|(?<=\w)~(?=\w)|(?<!\\)\\(?:q?quad(?![A-Za-z])|[,;: ])")
"""Spaces that do not break a line, as in 10 000, and LaTeX's: the library reads 10\\,000 as 10 times 000."""
_TEXT = re.compile(r"\\text\w*\s*\{([^{}]*\d[^{}]*)\}")
"""A text with a number in it, which is an answer and no word."""
_QUOTE = re.compile(r"['\"]")
_LETTERS_ONLY = re.compile(r"[A-Za-z\s.,;:()'&!?]+")
_GROUPS = re.compile(r"\\(?:text\w*|math\w+|mbox|operatorname\*?|begin|end)\s*\{[^{}]*\}|\\[A-Za-z]+")
"""LaTeX commands, with the text of those that contain text or a name."""
_FUNCTIONS = "arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|sec|csc|log|ln|exp|gcd|lcm|max|min|pi"
_BARE_FUNCTION = re.compile(rf"(?<![A-Za-z\\])({_FUNCTIONS})(?![A-Za-z])")
_KNOWN = re.compile(rf"(?:{_FUNCTIONS}|sqrt|infinity|inf|and|or|percent|percentage|pct)")
_SHORT_WORD = re.compile(
    "an|are|as|at|be|by|for|get|has|he|if|in|is|it|no|not|of|on|so|the|to|was|we|yes", re.IGNORECASE
)
_ORDINAL = re.compile(r"(?<=\d)(?:\s*\^\s*\{?\s*(?:\\\w+\s*\{)?)?(?:st|nd|rd|th)\}*$")
"""As in 3rd and 7^{\text{th}}, which the library reads as products and powers of letters."""
_WHOLE = LatexExtractionConfig(
    # Without its units, since the library takes letters for units: it reads 2ab and 5t as 2 and 5.
    normalization_config=NormalizationConfig(basic_latex=True, malformed_operators=True, nits=True, boxed="last")
)
_NUMBERS = [pattern for pattern, rank in get_extraction_regexes([ExprExtractionConfig()])[0][0] if rank == 300]
"""The library's patterns of plain numbers and arithmetic, without words before them."""


class AnswerRefused(ValueError):
    """An expected answer that is no mathematics, or that the library cannot read as a whole."""


def core_of(text: str) -> str:
    """An answer's own text: after ``####``, in the last box, between the marks of a formula, without a full stop."""
    core = _SPACES.sub(" ", text).rpartition("####")[2].strip()
    boxes = boxes_in(core)
    core = (boxes[-1] if boxes else core).replace("\\$", "$").strip()
    if marked := _MARKED.fullmatch(core):
        core = next(inner for inner in marked.groups() if inner is not None).strip()
    if written := _TEXT.fullmatch(core):
        core = written[1].strip()
    return core.removesuffix(".").rstrip()


def boxes_in(text: str) -> list[str]:
    r"""The contents of all ``\boxed{...}`` of a text that are closed, except those within another box."""
    contents, end = [], 0
    for match in re.finditer(r"\\(?:boxed|fbox)\s*\{", text):
        if match.start() < end:
            continue
        depth = 1
        for end in range(match.end(), len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if not depth:
                contents.append(text[match.end() : end])
                break
        else:
            break
    return contents


@lru_cache(maxsize=KEPT_ANSWERS)
def expected(text: str) -> Any:
    """What an expected answer is, as an object of sympy.

    Raises:
        AnswerRefused: it is no mathematics, or cannot be read as a whole.
        TimeoutError: reading took too long.
    """
    core = core_of(text)
    if fault := "its unit is a number" if _MAGNITUDE.search(core) else _fault_of(_without_unit(core)):
        raise _refusal(text, fault)
    read = read_whole(core)
    if read is None or not is_equal(read, read):
        raise _refusal(text, "math_verify cannot read it as one formula or number")
    return read


def _refusal(text: str, fault: str) -> AnswerRefused:
    return AnswerRefused(
        f"expected mathematics as answer for math_verify, got {_shown(text)}: {fault}; "
        "compare text with exact_match and rewards.answer_pattern, or leave the row out with data.filter"
    )


def _shown(text: str) -> str:
    return repr(text if len(text) <= MAX_SHOWN_CHARACTERS else text[:MAX_SHOWN_CHARACTERS] + "…")


def _fault_of(core: str) -> str | None:
    """Why a text is no mathematics, or would be taken for other mathematics than it is; None if neither is the case."""
    if _CHOICES.fullmatch(core) and core not in ("e", "i"):
        return "a letter is a choice"
    if words := words_in(core):
        return f"{words[0]!r} is a word"
    if _LETTERS_ONLY.fullmatch(core) and not _BARE_FUNCTION.search(core) and core not in ("e", "i"):
        return "letters alone are a word"
    if _QUOTE.search(core):  # the library leaves quotes out
        return "a quote is no mathematics"
    if _DATE.fullmatch(core):
        return "it is a date or a time"
    if _MODULUS.search(core):
        return "math_verify does not read congruences"
    if (in_base := _IN_BASE.fullmatch(core)) and int(in_base[2]) not in BASES:
        return f"{in_base[2]} is no base of numbers"
    if _HEXADECIMAL.fullmatch(core) or _DECIMAL_COMMA.fullmatch(core):
        return "math_verify does not read numbers of this form"
    if _SIDE_BY_SIDE.search(core) and _plain(core) is None:
        return "numbers stand side by side"
    return None


def words_in(text: str) -> list[str]:
    """The words of a text that are no part of a formula: not functions, products of few letters or LaTeX commands."""
    letters = re.findall(r"[A-Za-z]{2,}", _GROUPS.sub(" ", text))
    return [word for word in letters if not _KNOWN.fullmatch(word) and (len(word) > 3 or _SHORT_WORD.fullmatch(word))]


def _without_unit(core: str) -> str:
    return _ORDINAL.sub("", UNIT.sub("", core))


def read_whole(core: str) -> Any | None:
    """A text as one number or one formula, as an object of sympy; None if it is neither.

    Raises:
        TimeoutError: reading took too long.
    """
    core = _without_unit(core)
    if len(core) > MAX_CHARACTERS:
        return None
    if (number := _plain(core)) is not None:
        return number
    latex = _BARE_FUNCTION.sub(r"\\\1 ", core.translate(_SIGNS)).replace("\\varnothing", "\\emptyset ")
    if not latex or latex.count("{") != latex.count("}"):
        return None
    found = _parsed(f"\\boxed{{{latex}}}", [_WHOLE], fallback_mode="no_fallback", extraction_mode="first_match")
    return found[0] if found else None


def _plain(core: str) -> Any | None:
    """A number or plain arithmetic; None if the text is not that as a whole."""
    if _SCIENTIFIC.fullmatch(core):
        return Rational(core)
    if mixed := _MIXED.fullmatch(core):
        sign, whole, above, below = mixed.groups()
        return None if not int(below) else int(f"{sign}1") * (int(whole) + Rational(int(above), int(below)))
    if in_base := _IN_BASE.fullmatch(core):  # the library leaves the base out
        return Tuple(*map(Integer, in_base.groups()))
    if _RATIO.fullmatch(core):  # the library reads the first two numbers
        return Tuple(*map(Integer, core.split(":")))
    # Other commas separate the elements of a list, as in LaTeX.
    if "," in core and not _THOUSANDS.fullmatch(core):
        return None
    plain = core.replace("−", "-")
    for pattern in _NUMBERS:
        if (match := pattern.fullmatch(plain)) and (found := extract_expr(match)[0]) is not None:
            return found
    return None


def found_in(text: str) -> list[Any]:
    """The answer of a completion: the content of a box, a bare formula as a whole, or the last formula or number.

    Raises:
        TimeoutError: reading took too long.
    """
    boxes = boxes_in(text)
    is_bare = not _MARK.search(text) and "\n" not in text.strip() and not words_in(text)
    if len(boxes) == 1 or is_bare:
        read = read_whole(core_of(text))
        if read is not None:
            return [read]
    return _parsed(text.replace("−", "-"))


def _parsed(text: str, *arguments: Any, **options: Any) -> list[Any]:
    with _told_if_late(text):
        try:
            found: list[Any] = parse(text, *arguments, parsing_timeout=TIMEOUT_S, raise_on_error=True, **options)
        except Exception:  # the library's parsers raise anything
            return []
    return found


def is_equal(gold: Any, found: Any) -> bool:
    """Whether a parsed answer equals an expected one.

    Raises:
        TimeoutError: comparing took too long.
    """
    with _told_if_late(f"{gold}", "compare a completion with"):
        try:
            is_same = verify(
                [gold], [found], float_rounding=_digits_for(gold), timeout_seconds=TIMEOUT_S, raise_on_error=True
            )
        except Exception:  # sympy raises anything where two things cannot be compared
            return False
        return is_same and not timeout(TIMEOUT_S)(_are_other_equations)(gold, found)


def _digits_for(gold: Any) -> int:
    """Decimal places for a comparison: more for numbers near 0, which would else all equal 0."""
    if not isinstance(gold, Number) or not gold.is_finite or not gold or abs(gold) >= 1:
        return DIGITS
    return DIGITS + len(str(int(1 / abs(gold))))


def _are_other_equations(gold: Any, found: Any) -> bool:
    """Whether two equations differ: the library takes y = 5x+3 for y = 2x+3, since both can be solved for x."""
    if not isinstance(gold, Eq) or not isinstance(found, Eq):
        return False
    try:
        factor = simplify((gold.lhs - gold.rhs) / (found.lhs - found.rhs))
    except (TypeError, AttributeError):  # sides that cannot be subtracted, such as sets
        return False
    return bool(factor.free_symbols) or not factor


@contextmanager
def _told_if_late(text: str, act: str = "read") -> Iterator[None]:
    """Turns the library's time-out, which is no ``Exception``, into a ``TimeoutError`` that names the text."""
    try:
        yield
    except TimeoutException:
        raise TimeoutError(f"math_verify took more than {TIMEOUT_S} s to {act} {_shown(text)}") from None
