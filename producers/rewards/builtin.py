"""The rewards that come with StreamRL: which names they have, what can be set for them, and how they judge.

A reward is a function in TRL's signature. ``math_verify`` compares answers as mathematics, ``exact_match`` to the
letter, ``format`` looks at no answer; ``llm_judge`` asks a model, ``code_tests`` runs what was written. Only making
``math_verify`` loads its library.
"""

import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from streamrl.producers.rewards.judges import CODE_TESTS, LLM_JUDGE, JudgeOptions, LlmJudge, code_tests

Reward = Callable[..., Any]
DATASET = "dataset"
"""The scorer that a generated data set brings along; it is loaded in ``producers.rewards.child``."""
BUILT_IN = ("math_verify", "exact_match", "format", LLM_JUDGE, CODE_TESTS)
THINK_ANSWER = r"\s*<think>(?!.*<think>).*</think>\s*<answer>(?!.*<answer>).*</answer>\s*"
"""One pair of think tags, then one pair of answer tags, and nothing around them."""
PARSING_TIMEOUT_S = 3
COMPARING_TIMEOUT_S = 3
"""Hundreds of times what an ordinary answer takes: a busy machine must not make a right one wrong."""
MAX_CHARACTERS = 20_000
"""Of a completion, the last so many are searched for an answer: the search is quadratic at worst."""


@dataclass(frozen=True)
class BuiltInOptions:
    """Regular expressions, in which a dot stands for a line break too.

    ``format_pattern``: what a whole completion must match. ``answer_pattern``: its first group is the answer in a
    completion; None: the whole completion is. ``code_timeout_s``: for the program of a completion. ``judge``: whom to
    ask, and what.
    """

    format_pattern: str = THINK_ANSWER
    answer_pattern: str | None = None
    code_timeout_s: float = 5.0
    judge: JudgeOptions = field(default_factory=JudgeOptions)

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> Self:
        """What ``asdict`` made of one."""
        return cls(**dict(content) | {"judge": JudgeOptions(**content.get("judge", {}))})


def built_in(name: str, options: BuiltInOptions) -> Reward:
    """The reward of one of the names in ``BUILT_IN``.

    Raises:
        ImportError: its library is not installed.
        ValueError: there is no such reward.
    """
    match name:
        case "math_verify":
            return math_verify(options.answer_pattern)
        case "exact_match":
            return exact_match(options.answer_pattern)
        case "format":
            return matches_format(options.format_pattern)
        case "llm_judge":
            return LlmJudge(options.judge)
        case "code_tests":
            return code_tests(options.code_timeout_s)
        case _:
            raise ValueError(f"expected the name of a built-in reward, got {name!r}")


def texts_of(completions: Sequence[Any]) -> list[str]:
    """Completions as text: plain ones as they are, of conversational ones what the assistant said."""
    return [completion if isinstance(completion, str) else completion[0]["content"] for completion in completions]


def answer_in(text: str, pattern: str | None) -> str | None:
    """The first group of the pattern's last match; without a pattern the whole text; None: no match."""
    if pattern is None:
        return text
    # Matches are found from the front only, so all are walked and the last is kept.
    last = deque(re.finditer(pattern, text, re.DOTALL), maxlen=1)
    return last[0][1 if last[0].re.groups else 0] if last else None


def _column_of(answers: Sequence[Any] | None) -> Sequence[Any]:
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
            for one, wanted in zip(found, _column_of(answer), strict=True)
        ]

    return score


def matches_format(pattern: str) -> Reward:
    """Makes the reward: 1 if the whole completion matches the pattern, else 0."""
    shape = re.compile(pattern, re.DOTALL)

    def score(completions: Sequence[Any], **_columns: Any) -> list[float | None]:
        return [float(shape.fullmatch(text) is not None) for text in texts_of(completions)]

    return score


def math_verify(answer_pattern: str | None = None) -> Reward:
    """Makes the reward: 1 if the last formula or number is equal to the expected one, else 0; loads the library.

    None where the data set expects nothing that can be parsed. The library's time-outs are alarm signals, so the reward
    must run in a main thread, which that of a reward process is. What holds an alarm up ends with the process, after
    ``rewards.timeout_s``.
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
        return [judge(text, wanted) for text, wanted in zip(texts_of(completions), _column_of(answer), strict=True)]

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
