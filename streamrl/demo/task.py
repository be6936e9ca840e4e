"""The demo's task: sums and products with two valid styles of solution, split into training and held-out questions.

A bare solution is only the answer; a worked one gets there step by step. ``52*7=`` is followed by ``364`` or by
`` 50*7=350 2*7=14 350+14=364``. Both end with the answer, and only the answer is judged.

This module must import quickly, because that happens before the first output. Invariant
no_held_out_question_is_ever_trained_on: the split depends only on the operator and the numbers, not on their order.
"""

import math
import random
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

ANSWER_PATTERN = r"(\d+)$"
"""The last number is the answer, in either style."""
MAX_PROMPT_TOKENS = 16
MAX_COMPLETION_TOKENS = 48
"""The longest worked solution has 38 characters and the end token; the rest allows for mistakes."""
BUCKET_BOUNDARIES = (8, 28, 34)
"""Buckets of tokens: bare answers, worked products (23 to 28), worked sums of three numbers (29 to 34), and of four."""
MARKS = (" ", "\n", ";")
"""Separators before each step of a worked solution; there are several, as in people's solutions."""
PRODUCT_SHARE = 1 / 3
HELD_OUT_ONE_IN = 5
_HELD_OUT, _PROMPTS = "held out", "prompts"

PAD, EOS = "<|pad|>", "<|endoftext|>"
Style = Literal["bare", "worked"]


@dataclass(frozen=True)
class Question:
    """A sum of three or four two-digit numbers, or a product of a two-digit number and a digit."""

    operator: Literal["+", "*"]
    numbers: tuple[int, ...]

    @property
    def text(self) -> str:
        """The prompt."""
        return self.operator.join(map(str, self.numbers)) + "="

    @property
    def answer(self) -> str:
        """The correct answer."""
        return str(sum(self.numbers) if self.operator == "+" else math.prod(self.numbers))

    @property
    def content(self) -> str:
        """A key that is equal for equivalent questions, whose numbers differ only in order."""
        return self.operator.join(map(str, sorted(self.numbers)))

    @property
    def is_held_out(self) -> bool:
        """Whether the question is only for the evaluation."""
        return zlib.crc32(self.content.encode()) % HELD_OUT_ONE_IN == 0

    def worked(self, mark: str) -> str:
        """The solution step by step, with a mark before each step: tens, then units, then both together."""
        tens = [number // 10 * 10 for number in self.numbers]
        units = [number % 10 for number in self.numbers]
        if self.operator == "*":
            number, digit = self.numbers
            parts = [f"{tens[0]}*{digit}={tens[0] * digit}", f"{units[0]}*{digit}={units[0] * digit}"]
            last = f"{tens[0] * digit}+{units[0] * digit}={number * digit}"
        else:
            parts = ["+".join(map(str, each)) + f"={sum(each)}" for each in (tens, units)]
            last = f"{sum(tens)}+{sum(units)}={sum(self.numbers)}"
        return "".join(mark + step for step in (*parts, last))


def style_of(completion: str) -> Style:
    """The style of a solution: a step has an equals sign, and the answer alone has none."""
    return "worked" if "=" in completion else "bare"


def worked_out(completions: Sequence[str], **_columns: object) -> list[float]:
    """A reward with TRL's signature: 1 for a worked solution. Its weight is 0: it is only for the report's curve."""
    return [float(style_of(completion) == "worked") for completion in completions]


def training_questions(seed: int | str) -> Iterator[Question]:
    """Endless questions for training; the same for the same seed."""
    return (question for question in _questions(seed) if not question.is_held_out)


def held_out_questions(seed: int, count: int) -> list[Question]:
    """Distinct questions that are never trained on; the same for the same seed."""
    found: dict[str, Question] = {}
    drawn = (question for question in _questions(f"{_HELD_OUT}/{seed}") if question.is_held_out)
    while len(found) < count:
        question = next(drawn)
        found.setdefault(question.content, question)
    return list(found.values())


def training_prompts(seed: int, count: int) -> list[dict[str, Any]]:
    """Rows of a run's data: ``prompt`` and ``answer`` of training questions, possibly repeated; the same for a seed."""
    drawn = islice(training_questions(f"{_PROMPTS}/{seed}"), count)
    return [{"prompt": question.text, "answer": question.answer} for question in drawn]


def _questions(seed: int | str) -> Iterator[Question]:
    draw = random.Random(f"arithmetic/{seed}")
    while True:
        if draw.random() < PRODUCT_SHARE:
            # No multiples of ten, because their second step would be about zeros.
            yield Question("*", (draw.randint(1, 9) * 10 + draw.randint(1, 9), draw.randint(3, 9)))
        else:
            yield Question("+", tuple(draw.randint(11, 99) for _ in range(draw.choice((3, 4)))))


def build_tokenizer() -> Any:
    """A ``Qwen2Tokenizer`` without merges: each byte (a digit) is a token, and any text can be encoded and decoded.

    Like Qwen2's own, it has no beginning token. ``transformers`` always loads this class for a Qwen2 model, regardless
    of the directory's files, so another class would not load correctly.
    """
    from tokenizers import pre_tokenizers
    from transformers import Qwen2Tokenizer

    tokens = (PAD, EOS, *sorted(pre_tokenizers.ByteLevel.alphabet()))
    return Qwen2Tokenizer(
        vocab={token: index for index, token in enumerate(tokens)},
        merges=[],
        unk_token=PAD,
        pad_token=PAD,
        eos_token=EOS,
        padding_side="left",
    )
