"""The demo's task: reasoning-gym's words to spell backward, split into training and held-out words; its tokenizer.

Import is cheap, since the prompt source and the reward processes load this file.

Invariant no_held_out_word_is_ever_trained_on: the split depends on nothing but a word's letters.
"""

import zlib
from collections.abc import Iterator, Sequence
from itertools import count, islice
from typing import Any

from pydantic import JsonValue

from producers.prompts.sources import open_dataset

DATASET = "spell_backward"
OPTIONS: dict[str, JsonValue] = {"min_word_len": 3, "max_word_len": 10}
INSTRUCTION = "Spell this word backward (example: sun -> nus): "
"""What reasoning-gym writes before the word."""
PROMPT_TEMPLATE = "{prompt}\n"
"""The line break tells the model where the word ends; it learns several times faster with it."""
MAX_COMPLETION_TOKENS = 16
"""The longest answer is ten letters and the end token; the rest is room for mistakes."""

PAD, EOS = "<|pad|>", "<|endoftext|>"

HELD_OUT_ONE_IN = 10
_HELD_OUT_SEED = 1 << 40
"""Far from the seeds of runs and of the warm start: reasoning-gym draws entry i with seed + i."""

Entry = dict[str, Any]


def is_held_out(word: str) -> bool:
    """Whether a word is kept for the evaluation; upper and lower case make no difference."""
    return zlib.crc32(word.lower().encode()) % HELD_OUT_ONE_IN == 0


def is_training_entry(entry: Entry) -> bool:
    """The filter for ``data.filter``: true if the entry's word may be trained on."""
    return not is_held_out(entry["metadata"]["word"])


def prompt_text(entry: Entry) -> str:
    """What the policy reads: the question, worded as ``data.prompt_template`` words it in a run."""
    return PROMPT_TEMPLATE.replace("{prompt}", entry["question"])


def exact_match(completions: Sequence[str], answer: Sequence[str], **_columns: object) -> list[float]:
    """TRL-style reward: 1 for the answer letter by letter, capitals included, and nothing after it; else 0.

    The data set's own scorer forgives what follows a right answer at most lengths.
    """
    return [float(completion == expected) for completion, expected in zip(completions, answer, strict=True)]


def training_entries(seed: int) -> Iterator[Entry]:
    """Endless entries with training words, for the warm start; the same ones for a seed."""
    return (entry for entry in _entries(seed) if is_training_entry(entry))


def held_out_entries(seed: int, num_entries: int) -> list[Entry]:
    """Entries with distinct held-out words, the same ones for a seed."""
    entries = (entry for entry in _entries(_HELD_OUT_SEED + (seed << 20)) if not is_training_entry(entry))
    return list(islice(_distinct(entries), num_entries))


def _entries(seed: int) -> Iterator[Entry]:
    dataset = open_dataset(DATASET, OPTIONS, seed=seed)
    return (dataset[index] for index in count())


def _distinct(entries: Iterator[Entry]) -> Iterator[Entry]:
    seen: set[str] = set()
    for entry in entries:
        if entry["answer"] not in seen:
            seen.add(entry["answer"])
            yield entry


def build_tokenizer() -> Any:
    """A ``Qwen2Tokenizer`` with no merges, so that a token is a byte (a letter); any text makes the round trip.

    The task's instruction, which never changes, is one token: a prompt is a fifth as long with it. As Qwen2 itself,
    it has no beginning token.

    ``transformers`` loads this class for a Qwen2 model whatever the directory says, so nothing else would load right.
    """
    from tokenizers import AddedToken, pre_tokenizers
    from transformers import Qwen2Tokenizer

    tokens = (PAD, EOS, *sorted(pre_tokenizers.ByteLevel.alphabet()))
    tokenizer = Qwen2Tokenizer(
        vocab={token: index for index, token in enumerate(tokens)},
        merges=[],
        unk_token=PAD,
        pad_token=PAD,
        eos_token=EOS,
        padding_side="left",
    )
    tokenizer.add_tokens([AddedToken(INSTRUCTION, special=False, normalized=False)])
    return tokenizer
