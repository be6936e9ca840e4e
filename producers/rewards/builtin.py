"""The rewards that come with StreamRL: their names, options and scores.

A reward is a function with TRL's signature. ``math_verify`` compares answers as mathematics, and ``exact_match`` as
text. ``format`` checks the form of the completion, ``llm_judge`` asks a model, and ``code_tests`` runs the program that
the completion contains. The library of ``math_verify`` is loaded only when that reward is made.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Self

from streamrl.producers.rewards.answers import accepted, answer_in
from streamrl.producers.rewards.judges import CODE_TESTS, LLM_JUDGE, JudgeOptions, LlmJudge, code_tests

Reward = Callable[..., Any]
DATASET = "dataset"
"""Name of a generated data set's own scorer; it is loaded in ``producers.rewards.child``."""
BUILT_IN = ("math_verify", "exact_match", "format", LLM_JUDGE, CODE_TESTS)
THINK_ANSWER = r"\s*<think>(?!.*<think>).*</think>\s*<answer>(?!.*<answer>).*</answer>\s*"
"""One pair of think tags, then one pair of answer tags, and nothing around them."""
MAX_CHARACTERS = 20_000
"""Last characters of a completion that are searched for an answer: the search is quadratic at worst."""


@dataclass(frozen=True)
class BuiltInOptions:
    """Options of the built-in rewards. In the regular expressions a dot also matches a line break.

    ``format_pattern``: must match the whole completion. ``answer_pattern``: its first group is the answer in a
    completion; None: the answer is the whole completion. ``code_timeout_s``: limit for the program of a completion.
    ``judge``: the model to ask, and the question.
    """

    format_pattern: str = THINK_ANSWER
    answer_pattern: str | None = None
    code_timeout_s: float = 5.0
    judge: JudgeOptions = field(default_factory=JudgeOptions)

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> Self:
        """The options from the mapping that ``asdict`` makes of them."""
        return cls(**dict(content) | {"judge": JudgeOptions(**content.get("judge", {}))})


def built_in(name: str, options: BuiltInOptions) -> Reward:
    """The reward with one of the names in ``BUILT_IN``.

    Raises:
        ImportError: the reward's library is not installed.
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
    """Completions as text; of conversational ones the assistant's content."""
    return [completion if isinstance(completion, str) else completion[0]["content"] for completion in completions]


def _column_of(answers: Sequence[Any] | None) -> Sequence[Any]:
    """The column of answers.

    Raises:
        ValueError: there is no such column.
    """
    if answers is None:
        raise ValueError("expected a column 'answer', got none; set data.answer_column")
    return answers


def exact_match(answer_pattern: str | None = None) -> Reward:
    """The reward function: 1 if the answer is the expected one, up to white space around it; else 0.

    Its reward is None if the row has no expected answer.
    """

    def judge(text: str, wanted: Any) -> float | None:
        if not (texts := accepted(wanted)):
            return None
        found = answer_in(text, answer_pattern)
        return float(found is not None and found.strip() in texts)

    return _by_answer(judge)


def matches_format(pattern: str) -> Reward:
    """The reward function: 1 if the whole completion matches the pattern, else 0."""
    shape = re.compile(pattern, re.DOTALL)

    def score(completions: Sequence[Any], **_columns: Any) -> list[float | None]:
        return [float(shape.fullmatch(text) is not None) for text in texts_of(completions)]

    return score


def math_verify(answer_pattern: str | None = None) -> Reward:
    """The reward function: 1 if the last formula or number equals the expected one, else 0. Loads the library.

    Its reward is None if the row has no expected answer. It raises if the expected answer is no mathematics, or if
    reading or comparing takes too long. See ``producers.rewards.mathematics``; code that delays its alarm signals is
    ended with the process after ``rewards.timeout_s``.
    """
    from streamrl.producers.rewards.mathematics import core_of, expected, found_in, is_equal

    def judge(text: str, wanted: Any) -> float | None:
        if not (texts := accepted(wanted)):
            return None
        golds = [expected(one) for one in texts]
        if not (found := (answer_in(text, answer_pattern) or "")[-MAX_CHARACTERS:].strip()):
            return 0.0
        if core_of(found) in map(core_of, texts):
            return 1.0
        targets = found_in(found)
        return float(any(is_equal(gold, target) for gold in golds for target in targets))

    # The first symbolic comparison takes a second or more, to make tables. On a busy machine it may take too long.
    with suppress(TimeoutError):
        judge("$x^2 + 2x + 1$", "$(x+1)^2$")
    return _by_answer(judge)


def _by_answer(judge: Callable[[str, Any], float | None]) -> Reward:
    """The reward function that judges each completion by its row's ``answer``."""

    def score(completions: Sequence[Any], answer: Sequence[Any] | None = None, **_columns: Any) -> list[float | None]:
        return [judge(text, wanted) for text, wanted in zip(texts_of(completions), _column_of(answer), strict=True)]

    return score
