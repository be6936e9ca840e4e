"""Numeric features of a prompt: sizes, the numbers in its text, character counts, hashed n-grams and the data set.

``LAYOUT`` changes when the meaning of a column changes; models saved with another layout are not loaded.
"""

import math
import re
import zlib

import numpy as np
from numpy.typing import NDArray

from streamrl.schemas.trajectories import Prompt

LAYOUT = 1
SHOWN_CHARACTERS = 12_000
"""Characters read of a text; of a longer one half are from its start and half from its end, to bound the cost."""
MAX_WORDS = 512
FIRST_NUMBERS, LAST_NUMBERS = 6, 4
CHARACTERS, BIGRAMS, WORDS = 128, 64, 64
SIZES = 18
ROW_WIDTH = SIZES + FIRST_NUMBERS + LAST_NUMBERS + CHARACTERS + BIGRAMS + WORDS

Row = NDArray[np.float32]
_TOKEN = re.compile(r"[^\W\d_]+|\d+")


def text_features(prompt: Prompt) -> Row:
    """The features of a prompt, float32 [ROW_WIDTH]."""
    text = prompt.text
    shown = text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS // 2] + text[-SHOWN_CHARACTERS // 2 :]
    tokens = _TOKEN.findall(shown)
    words = [token for token in tokens if not token.isdecimal()]
    numbers = [_magnitude(token) for token in tokens if token.isdecimal()]
    codes = np.frombuffer(shown.encode("utf-8", "replace"), np.uint8)
    return np.concatenate(
        [
            np.array(_sizes(prompt, text, shown, words, numbers) + _in_order(numbers), np.float32),
            # The lower 7 bits of each byte: ASCII is unchanged, and bytes of other letters are folded onto it.
            np.bincount(codes & (CHARACTERS - 1), minlength=CHARACTERS).astype(np.float32),
            _bigrams(codes),
            _hashed_words(words[:MAX_WORDS]),
        ]
    )


def _sizes(prompt: Prompt, text: str, shown: str, words: list[str], numbers: list[float]) -> list[float]:
    turns = 1 if isinstance(prompt.content, str) else len(prompt.content)
    last_turn = len(text) if isinstance(prompt.content, str) else len(prompt.content[-1].content)
    dataset = zlib.crc32(prompt.dataset.encode())
    return [
        float(len(text)),
        float(len(words)),
        float(len(set(words))),
        float(max(map(len, words), default=0)),
        float(sum(map(len, words))),
        float(len(numbers)),
        sum(numbers),
        max(numbers, default=-1.0),
        min(numbers, default=-1.0),
        sum(numbers) / len(numbers) if numbers else -1.0,
        float(sum(character.isdecimal() for character in shown)),
        float(shown.count("\n")),
        float(sum(character.isupper() for character in shown)),
        float(len(shown) - sum(map(len, shown.split()))),
        float(turns),
        float(last_turn),
        # In two halves, because float32 represents integers exactly only up to 2^24.
        float(dataset & 0xFFFF),
        float(dataset >> 16),
    ]


def _magnitude(digits: str) -> float:
    """log1p of a number; for more than 18 digits approximated by their count."""
    return math.log1p(int(digits)) if len(digits) <= 18 else len(digits) * math.log(10)


def _in_order(numbers: list[float]) -> list[float]:
    """The first and the last numbers: prompts of one template have their parameters at the same places."""
    # -1 means no number, because no magnitude is below 0.
    first = (numbers + [-1.0] * FIRST_NUMBERS)[:FIRST_NUMBERS]
    last = ([-1.0] * LAST_NUMBERS + numbers)[-LAST_NUMBERS:]
    return first + last


def _bigrams(codes: NDArray[np.uint8]) -> Row:
    pairs = codes[:-1].astype(np.uint32) * 31 + codes[1:]
    # Knuth's multiplicative hashing: times a prime near 2^32 over the golden ratio, modulo 2^32. The upper 6 bits are
    # one of the 64 places.
    return np.bincount((pairs * np.uint32(2654435761)) >> np.uint32(26), minlength=BIGRAMS).astype(np.float32)


def _hashed_words(words: list[str]) -> Row:
    places = [zlib.crc32(word.lower().encode("utf-8", "replace")) % WORDS for word in words]
    return np.bincount(np.array(places, np.int64), minlength=WORDS).astype(np.float32)
