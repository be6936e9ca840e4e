"""A reward in TRL's signature that a random model can earn at once, and ones that misbehave."""

import math
import time
from collections.abc import Sequence


def share_of_a(completions: Sequence[str], **_columns: object) -> list[float]:
    """Share of the letter ``a``."""
    return [text.count("a") / max(1, len(text)) for text in completions]


def fails_in_turn(completions: Sequence[str], prompts: Sequence[str], **_columns: object) -> list[float]:
    """Raises for a third of the prompts, hangs for another, and returns what is no reward for the rest.

    It judges nothing at all well enough, so that a run with it begins.
    """
    if not completions[0]:
        return [0.0] * len(completions)
    match int(prompts[0].rpartition(" ")[2]) % 3:
        case 0:
            raise ValueError(f"cannot judge {len(completions)}")
        case 1:
            time.sleep(3600)
    return [math.nan] * len(completions)
