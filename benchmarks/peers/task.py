"""The demo's task for every contender: prompts as files, the reward, and held-out questions.

Nothing here needs more than Python's own library, since TRL's environment loads it too.
"""

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from streamrl.demo.task import ANSWER_PATTERN, Question, held_out_questions, training_prompts

Entry = dict[str, Any]
"""``prompt`` and ``answer``; of a held-out question also ``part``, "product" or "sum"."""

_ANSWER = re.compile(ANSWER_PATTERN)


def write_training(path: Path, n: int, seed: int) -> None:
    """Write n prompts as jsonl, which ``data.path`` reads, and so does ``datasets``."""
    _write(path, training_prompts(seed, n))


def write_held_out(path: Path, n: int, seed: int) -> None:
    """Write n questions of which no prompt asks the same, each asking something else."""
    _write(path, (_entry(question) for question in held_out_questions(seed, n)))


def read_entries(path: Path) -> list[Entry]:
    """What was written."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def verified(completions: Sequence[str], answer: Sequence[str], **_: object) -> list[float]:
    """The reward, in TRL's signature: 1 if the last number of a completion is the answer."""
    found = (_ANSWER.search(completion) for completion in completions)
    return [float(match is not None and match[1] == right) for match, right in zip(found, answer, strict=True)]


def _entry(question: Question) -> Entry:
    part = "product" if question.operator == "*" else "sum"
    return {"prompt": question.text, "answer": question.answer, "part": part}


def _write(path: Path, entries: Iterable[Entry]) -> None:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
