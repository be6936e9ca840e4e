"""The mixed task set: reasoning-gym entries from one letter to hundreds, parted into training and held-out ones.

Knows no model and nothing of StreamRL: the contenders of every environment load this file.
Invariant no_held_out_question_is_ever_trained_on: an entry's side depends on nothing but its question.
"""

import json
import random
import warnings
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, Literal

Split = Literal["train", "held_out"]
Entry = dict[str, Any]
"""``prompt``, ``answer``, ``metadata`` (with reasoning-gym's ``source_dataset``) and ``part``."""

HELD_OUT_ONE_IN = 10


@dataclass(frozen=True)
class Part:
    """One data set of the mixture: its options, and its share of the prompts."""

    name: str
    dataset: str
    share: float
    options: dict[str, Any] = field(default_factory=dict)


PARTS = (
    Part("spell", "spell_backward", 0.5, {"min_word_len": 3, "max_word_len": 10}),
    Part("count", "letter_counting", 0.18, {"min_words": 1, "max_words": 3}),
    Part("tower", "tower_of_hanoi", 0.22, {"min_disks": 1, "max_disks": 3, "min_pegs": 3, "max_pegs": 6}),
    Part("high_tower", "tower_of_hanoi", 0.1, {"min_disks": 4, "max_disks": 5, "min_pegs": 3, "max_pegs": 6}),
)
FIXED_TEXTS = (
    "Spell this word backward (example: sun -> nus): ",
    'How many times does the letter "',
    '" appear in the text: "',
    "Solve the Tower of Hanoi problem with ",
    " disks and ",
    " pegs.\nMove all disks",
    " following the rules:\n- Only one disk can be moved at a time.\n- A larger disk cannot be placed on top of a "
    "smaller disk.\n- All disks must be on a peg at all times.\n\nProvide the sequence of moves.\n\nFormatting "
    "guidelines:\n- Each instruction should be placed on a single line.\n- Each line should be formatted as 'Move "
    "disk X from Peg Y to Peg Z'\n- Do not include any other text or formatting.",
    "Move disk ",
    " from Peg ",
    " to Peg ",
)
"""What the data sets write around questions and moves; each is one token of the policy, so prompts are short."""
MAX_COMPLETION_LENGTH = 232
"""A tower of five disks takes 31 moves of 7 tokens; the rest is room for mistakes."""
MAX_PROMPT_LENGTH = 64


def entries(seed: int, split: Split) -> Iterator[Entry]:
    """Endless entries of one side, drawn by share; the same ones for a seed."""
    draw = random.Random(f"mixed/{seed}/{split}")
    sources = {part.name: _questions(part, draw.getrandbits(40), split) for part in PARTS}
    names, shares = [part.name for part in PARTS], [part.share for part in PARTS]
    while True:
        yield next(sources[draw.choices(names, shares)[0]])


def write_mixed(path: Path, n: int, seed: int, split: Split) -> None:
    """Write n prompts as jsonl, one object a line: ``prompt, answer, metadata, part``.

    ``data.path`` reads it, and so does ``datasets``. Parts with few questions repeat them.
    """
    path.write_text("".join(json.dumps(entry) + "\n" for entry in islice(entries(seed, split), n)))


def read_mixed(path: Path) -> list[Entry]:
    """What ``write_mixed`` wrote."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def verified(completions: Sequence[str], answer: Sequence[str], metadata: Sequence[Any], **_: object) -> list[float]:
    """The reward, in TRL's signature: reasoning-gym's own score of each completion, 0 to 1."""
    return [
        float(dataset(entry["source_dataset"]).score_answer(completion, {"answer": right, "metadata": entry}))
        for completion, right, entry in zip(completions, answer, metadata, strict=True)
    ]


@cache
def dataset(name: str, seed: int = 0, options: str = "{}") -> Any:
    """A reasoning-gym data set; ``options`` as JSON."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        from reasoning_gym.factory import create_dataset

    return create_dataset(name, seed=seed, size=1, **json.loads(options))


def split_of(part: str, question: str) -> Split:
    """Which side a question is on; upper and lower case of it are on the same."""
    return "train" if zlib.crc32(f"{part}/{question.lower()}".encode()) % HELD_OUT_ONE_IN else "held_out"


def _questions(part: Part, seed: int, split: Split) -> Iterator[Entry]:
    source, index = dataset(part.dataset, seed, json.dumps(part.options)), 0
    while True:
        raw = source[index]
        index += 1
        question = raw["question"].rstrip("\n")
        if split_of(part.name, question) == split:
            yield {
                "prompt": question + "\n",
                "answer": raw["answer"],
                "metadata": json.loads(json.dumps(raw["metadata"])),
                "part": part.name,
            }
