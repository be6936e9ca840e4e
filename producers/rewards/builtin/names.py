"""What the rewards that come along are called, and what can be set for them. Loads none of them."""

from dataclasses import dataclass

BUILT_IN = ("math_verify", "exact_match", "format")
THINK_ANSWER = r"\s*<think>(?!.*<think>).*</think>\s*<answer>(?!.*<answer>).*</answer>\s*"
"""One pair of think tags, then one pair of answer tags, and nothing around them."""


@dataclass(frozen=True)
class BuiltInOptions:
    """Regular expressions, in which a dot stands for a line break too.

    ``format_pattern``: what a whole completion must match. ``answer_pattern``: its first group is the answer in a
    completion; None: the whole completion is.
    """

    format_pattern: str = THINK_ANSWER
    answer_pattern: str | None = None
