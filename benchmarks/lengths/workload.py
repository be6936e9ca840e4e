"""The task sets, and policies that give their prompts lengths. All figures were fixed before anything was fitted.

``synthetic``: tokens by what the task has to write or search, times lognormal noise of the prompt (hidden difficulty)
and of the sample, and one sample in thirty that rambles (Pareto). ``answers``: the length of the data set's own answer
text, in bytes as a byte-level tokenizer would see it; no noise, but nothing in it was made up for this purpose.
``mixed``: the same for the task set that training is compared on, all of it one data set as in a run. ``lognormal``:
the prompts of the emulated studies, one completion each.
"""

import math
import random
from dataclasses import dataclass
from itertools import islice
from typing import Any

from benchmarks.lengths import synthetic as lognormal
from benchmarks.peers import tasks as mixed
from producers.prompts.settings import DataSettings
from producers.prompts.sources import open_source
from schemas.trajectories import Prompt

LIMIT = 4096
MIXTURE: dict[str, dict[str, Any]] = {
    "base_conversion": {"max_value": 100_000},
    "caesar_cipher": {"max_words": 40},
    "chain_sum": {"max_terms": 16, "max_digits": 6},
    "countdown": {"max_numbers": 6},
    "gsm_symbolic": {},
    "letter_counting": {"max_words": 40},
    "maze": {"max_dist": 16, "max_grid_size": 14},
    "mini_sudoku": {"min_empty": 4},
    "number_sorting": {"max_numbers": 40},
    "prime_factorization": {"max_value": 20_000},
    "spell_backward": {},
    "sudoku": {},
    "syllogism": {},
    "tower_of_hanoi": {},
    "word_sorting": {"max_words": 30},
}
HIDDEN = {"countdown": 0.6, "prime_factorization": 0.3, "sudoku": 0.3, "maze": 0.3}
"""Spread of the difficulty that the prompt does not show, where it is more than the usual."""
USUAL_HIDDEN = 0.15
SAMPLE_NOISE = 0.25
RAMBLING_SHARE = 1 / 30


@dataclass(frozen=True)
class Task:
    """A prompt, and the length a sample of it has by and large."""

    prompt: Prompt
    typical: float
    part: str = ""

    @property
    def kind(self) -> str:
        """What the tables tell apart: a part of the task set, or a data set."""
        return self.part or self.prompt.dataset


@dataclass(frozen=True)
class Policy:
    """Draws lengths. ``growth`` multiplies them: the policy of a later time."""

    name: str
    growth: float = 1.0

    @property
    def samples(self) -> int:
        """Completions of a prompt."""
        return 1 if self.name == "lognormal" else 8

    @property
    def limit(self) -> int:
        """Most tokens of a completion."""
        return 10 * lognormal.MEDIAN if self.name == "lognormal" else LIMIT

    def tasks(self, count: int, seed: int) -> list["Task"]:
        """So many prompts of the policy's task set with their typical lengths."""
        if self.name == "lognormal":
            rows = lognormal.prompts(count, seed)
            return [Task(_prompt("lognormal", number, row), row["length"], "") for number, row in enumerate(rows)]
        if self.name == "mixed":
            entries = islice(mixed.entries(seed, "train"), count)
            return [
                Task(_prompt("mixed", number, row), len(row["answer"]) + 1.0, row["part"])
                for number, row in enumerate(entries)
            ]
        return [self.task(prompt) for prompt in prompts(count, seed)]

    def task(self, prompt: Prompt) -> Task:
        """The prompt with its typical length, of which the hidden difficulty is a part."""
        if self.name == "answers":
            return Task(prompt, max(1.0, len(str(prompt.columns["answer"]).encode())))
        hidden = random.Random(f"hidden/{prompt.text}").gauss(0, HIDDEN.get(prompt.dataset, USUAL_HIDDEN))
        return Task(prompt, _work(prompt) * math.exp(hidden))

    def sample(self, task: Task, rng: random.Random) -> int:
        """Tokens of one completion, at most ``limit``."""
        length = task.typical * self.growth
        if self.name == "synthetic":
            length *= math.exp(rng.gauss(0, SAMPLE_NOISE))
            length *= 1 + rng.paretovariate(1.5) if rng.random() < RAMBLING_SHARE else 1
        return max(1, min(self.limit, round(length)))


def _prompt(dataset: str, number: int, row: dict[str, Any]) -> Prompt:
    return Prompt(prompt_id=f"{dataset}/{number}", dataset=dataset, content=row["prompt"])


def prompts(count: int, seed: int) -> list[Prompt]:
    """So many prompts of the mixture, each data set alike often."""
    settings = DataSettings.model_validate(
        {"size": count, "mixture": {name: {"options": o} for name, o in MIXTURE.items()}}
    )
    source = open_source(settings, run_seed=seed)
    return [source.prompt_at(position)[0] for position in range(count)]


def _work(prompt: Prompt) -> float:
    return float(_tokens(prompt.dataset, prompt.columns["metadata"]))


def _tokens(dataset: str, meta: Any) -> Any:
    match dataset:
        case "base_conversion":
            return 30 + 14 * math.log2(2 + meta["decimal_value"])
        case "caesar_cipher":
            return 20 + 1.5 * len(meta["clear_text"])
        case "chain_sum":
            return 30 + 9 * meta["num_terms"] * meta["num_digits"]
        case "countdown":
            return 120 * 3 ** (len(meta["numbers"]) - 4)
        case "gsm_symbolic":
            return len(meta["answer_cot"]) / 3
        case "letter_counting":
            return 20 + 6 * meta["span_length"]
        case "maze":
            return 40 + 14 * meta["shortest_path_length"]
        case "mini_sudoku":
            return 60 + 22 * meta["num_empty"] ** 1.2
        case "number_sorting":
            return 25 + 7 * meta["numbers"] * math.log2(meta["numbers"])
        case "prime_factorization":
            return 30 + 3 * _trial_divisions(meta["factors"])
        case "spell_backward":
            return 10 + 3 * meta["word_len"]
        case "sudoku":
            return 300 + 5 * meta["num_empty"] ** 1.4
        case "tower_of_hanoi":
            return 40 + 9 * meta["solution_length"]
        case "word_sorting":
            return 20 + 5 * meta["num_words"] * math.log2(meta["num_words"])
        case _:
            return 90.0


def _trial_divisions(factors: list[int]) -> float:
    """Divisors tried until only a prime is left: what the number itself does not show at a glance."""
    *smaller, largest = sorted(factors)
    return max(smaller[-1] if smaller else 2, math.isqrt(largest))
