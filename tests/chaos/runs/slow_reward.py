"""A reward that takes a moment, so that a tiny run lasts long enough for something to happen to it."""

import time
from collections.abc import Sequence

SECONDS_PER_CALL = 0.02


def share_of_a(completions: Sequence[str], **_columns: object) -> list[float]:
    """Share of the letter ``a``."""
    time.sleep(SECONDS_PER_CALL)
    return [text.count("a") / max(1, len(text)) for text in completions]


def often_raises(completions: Sequence[str], **_columns: object) -> list[float]:
    """Fails for most texts, by their content."""
    time.sleep(SECONDS_PER_CALL)
    if sum(text.encode()[0] if text else 0 for text in completions) % 5 < 3:
        raise ValueError("cannot judge this")
    return [text.count("a") / max(1, len(text)) for text in completions]
