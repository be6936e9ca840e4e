"""What every contender reads and calls: entries as files, and the reward.

Nothing here needs more than Python's own library, because TRL's environment loads it too.
"""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

Entry = dict[str, Any]
"""``prompt`` (text or chat turns) and ``answer``; a held-out question also has ``part``, a kind of question."""
Reward = Callable[..., list[float]]


def read_entries(path: Path) -> list[Entry]:
    """The entries that ``write_entries`` wrote."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_entries(path: Path, entries: Iterable[Entry]) -> None:
    """Write jsonl, which ``data.path`` reads, and so does ``datasets``."""
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))


def reward(answer_pattern: str) -> Reward:
    """A reward in TRL's signature: 1 if the last match of the pattern in a completion is the answer."""
    pattern = re.compile(answer_pattern)

    def verified(completions: Sequence[Any], answer: Sequence[str], **_: object) -> list[float]:
        texts = [one if isinstance(one, str) else one[-1]["content"] for one in completions]
        found = (pattern.findall(text) for text in texts)
        return [float(bool(matches) and matches[-1] == right) for matches, right in zip(found, answer, strict=True)]

    return verified
