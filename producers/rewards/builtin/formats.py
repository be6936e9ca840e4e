"""Whether a completion has the shape that was asked for. Looks at no answer."""

import re
from collections.abc import Sequence
from typing import Any

from producers.rewards.builtin.answers import Reward, texts_of


def matches_format(pattern: str) -> Reward:
    """Makes the reward: 1 if the whole completion matches the pattern, else 0."""
    shape = re.compile(pattern, re.DOTALL)

    def score(completions: Sequence[Any], **_columns: Any) -> list[float | None]:
        return [float(shape.fullmatch(text) is not None) for text in texts_of(completions)]

    return score
