"""A judge that takes its time and no processor, as one behind a network. Imports nothing: each grader loads it anew."""

import asyncio
from collections.abc import Sequence

JUDGE_S = 0.2


async def slow_judge(completions: Sequence[str], **_columns: object) -> list[float]:
    """The reward: something, after a while."""
    await asyncio.sleep(JUDGE_S)
    return [float(len(text) % 7) for text in completions]
