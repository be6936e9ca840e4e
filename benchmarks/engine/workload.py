"""The same requests for both contenders, and the models that they are asked of. Knows neither of the contenders."""

import itertools
import json
import random
import string
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

from benchmarks.small_model import build

P99 = NormalDist().inv_cdf(0.99)
LETTERS, SPACE, PAD = string.ascii_lowercase, "\u0120", "<pad>"
"""``SPACE`` is what byte-level tokenizers write for one."""
PASSES_APART = 1 << 20
"""Between the seeds of two stretches: no prompt is repeated, so none is in a cache from the stretch before."""


@dataclass(frozen=True)
class Shape:
    """A random Qwen2 without an end-of-sequence token, so that a completion is as long as its limit."""

    name: str
    dtype: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    groups: tuple[int, ...] = (16,)
    """Of a stretch. With 16 the batch is filled twice, and empties for most of the time; with more it stays full."""


SHAPES = (
    Shape("small", "bfloat16", 32_000, 384, 1152, 8, 6, 2),
    Shape("demo", "float32", 320, 128, 384, 4, 4, 4, groups=(64, 16)),
)
"""The first is about the smallest language model that is of use; the second, the demo's, leaves most time to others."""


@dataclass(frozen=True)
class Workload:
    """``groups`` prompts with ``num_generations`` samples each; a group's completions are as long as its limit.

    Limits are lognormal, cut off at ``longest``; prompts are uniform in length, in characters.
    """

    groups: int = 16
    num_generations: int = 8
    max_num_seqs: int = 64
    median: float = 80.0
    p99_over_median: float = 4.0
    longest: int = 320
    shortest_prompt: int = 16
    longest_prompt: int = 96
    seed: int = 0

    def limits(self) -> list[int]:
        """Tokens of each completion of a group, the same in every stretch."""
        chance = random.Random(self.seed)
        scores = [chance.gauss(0.0, 1.0) for _ in range(self.groups)]
        return [
            max(1, min(self.longest, round(self.median * self.p99_over_median ** (score / P99)))) for score in scores
        ]

    def prompts(self, stretch: int) -> list[str]:
        """A text for each group, of made-up words."""
        chance = random.Random(self.seed + PASSES_APART * (stretch + 1))
        sizes = [chance.randint(self.shortest_prompt, self.longest_prompt) for _ in range(self.groups)]
        return ["".join(chance.choices(LETTERS + " ", k=size)) for size in sizes]

    @property
    def tokens(self) -> int:
        """Of all completions of a stretch."""
        return self.num_generations * sum(self.limits())

    @property
    def trajectories(self) -> int:
        """Of a stretch."""
        return self.num_generations * self.groups

    @property
    def max_model_len(self) -> int:
        """Room for the longest prompt and completion."""
        return self.longest_prompt + self.longest


def build_tokenizer(size: int) -> Any:
    """A byte-level tokenizer as Qwen2 has it: bytes, and then letters in all orders, the shorter ones first."""
    from tokenizers import pre_tokenizers
    from transformers import Qwen2Tokenizer

    tokens = [PAD, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    merges = []
    grown = [""]
    while len(tokens) < size:
        pieces, grown = grown, []
        for piece, letter in itertools.product(pieces, LETTERS + SPACE):
            grown.append(piece + letter)
            if piece and len(tokens) < size:
                merges.append((piece, letter))
                tokens.append(piece + letter)
    vocabulary = {token: number for number, token in enumerate(tokens)}
    return Qwen2Tokenizer(vocab=vocabulary, merges=merges, unk_token=PAD, pad_token=PAD, eos_token=None)


def build_model(shape: Shape, directory: Path, positions: int) -> int:
    """Write a model and its tokenizer; the number of parameters."""
    import torch

    sizes = {name: value for name, value in asdict(shape).items() if name not in ("name", "dtype", "groups")}
    dtype = getattr(torch, shape.dtype)
    model = build(positions, **sizes, eos_token_id=None, pad_token_id=None, dtype=dtype).to(dtype)
    model.save_pretrained(directory)
    build_tokenizer(shape.vocab_size).save_pretrained(directory)
    # An end token would end completions at random lengths, by other random numbers in either contender.
    assert json.loads((directory / "config.json").read_text()).get("eos_token_id") is None
    return sum(parameter.numel() for parameter in model.parameters())
