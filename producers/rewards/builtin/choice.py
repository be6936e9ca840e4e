"""Makes the reward that a name stands for."""

from producers.rewards.builtin.answers import Reward, exact_match
from producers.rewards.builtin.formats import matches_format
from producers.rewards.builtin.names import BuiltInOptions


def built_in(name: str, options: BuiltInOptions) -> Reward:
    """The reward of one of the names in ``BUILT_IN``.

    Raises:
        ImportError: its library is not installed.
        ValueError: there is no such reward.
    """
    match name:
        case "math_verify":
            from producers.rewards.builtin.mathematics import math_verify

            return math_verify(options.answer_pattern)
        case "exact_match":
            return exact_match(options.answer_pattern)
        case "format":
            return matches_format(options.format_pattern)
        case _:
            raise ValueError(f"expected the name of a reward that comes along, got {name!r}")
