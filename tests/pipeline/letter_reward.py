"""A reward in TRL's signature that a random model can earn at once, and ones that misbehave."""

import math
import time
from collections.abc import Sequence


def share_of_a(completions: Sequence[str], **_columns: object) -> list[float]:
    """Share of the letter ``a``."""
    return [text.count("a") / max(1, len(text)) for text in completions]


def raises(completions: Sequence[str], **_columns: object) -> list[float]:
    raise ValueError(f"cannot judge {len(completions)}")


def hangs(completions: Sequence[str], **_columns: object) -> list[float]:
    time.sleep(3600)
    return [0.0] * len(completions)


def returns_nan(completions: Sequence[str], **_columns: object) -> list[float]:
    return [math.nan] * len(completions)
