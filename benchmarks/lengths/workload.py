"""The task sets and the lengths of their prompts, and how a set is parted into what is taught and what is asked.

Made up, all figures fixed before anything was fitted: ``synthetic``, tokens by what the task has to write or search,
times lognormal noise of the prompt (hidden difficulty) and of the sample, and one sample in thirty that rambles
(Pareto); ``lognormal``, the prompts of the emulated studies, one completion each. Measured: ``answers``, the length of
the data set's own answer text, in bytes as a byte-level tokenizer would see it, without noise; ``real``, completions of
SmolLM2-135M-Instruct at temperature 1, recorded once by `benchmarks.lengths.record`.

Invariant nothing_asked_was_taught: halves share no text, and no content, which is what a length may follow from.
"""

import hashlib
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from benchmarks.lengths import synthetic as lognormal
from streamrl.producers.prompts.settings import DataSettings
from streamrl.producers.prompts.sources import ReasoningGymSource
from streamrl.schemas.trajectories import Prompt

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
HELD_OUT_SHARE = 0.4
FOLDS = 3
RECORDED = Path(__file__).parent / "smollm2.parquet"
CAP = 512
"""Most tokens of a recorded completion."""
INSTRUCTIONS = {
    "explain": "Explain {} to a ten-year-old.",
    "story": "Write a short story about {}.",
    "one_sentence": "In one sentence, what is {}?",
    "list": "List five facts about {}.",
    "poem": "Write a poem of four lines about {}.",
    "yes_no": "Do most people know what {} is? Answer yes or no.",
    "steps": "Give step-by-step instructions to teach a class about {}.",
    "synonyms": "Give three words that one thinks of on hearing of {}. Only the words, with commas.",
    "essay": "Write a detailed essay on {}, with an introduction and a conclusion.",
    "headline": "Write a newspaper headline about {}.",
}
"""Plain instructions, each a data set of its own; a subject is the parameter that a prompt's length may follow from."""
SUBJECTS = (
    *("a lighthouse", "photosynthesis", "the French Revolution", "chess", "a compass", "gravity", "bread", "volcanoes"),
    *("a violin", "the stock market", "migration of birds", "a bicycle", "the Roman Empire", "vaccines", "glass"),
    *("a telescope", "rice farming", "electricity", "the Olympic Games", "a desert", "jazz", "the printing press"),
    *("a dictionary", "recycling", "the moon", "coffee", "a bridge", "an orchestra", "coral reefs", "the alphabet"),
    *("a thunderstorm", "steam engines", "a passport", "honey", "the human heart", "maps", "a museum", "silk"),
)


@dataclass(frozen=True)
class Task:
    """A prompt, the length a sample of it has by and large, and what that may follow from.

    ``content``: the same for prompts that ask for the same; no two halves of a split share one. ``recorded``: lengths
    (tokens) of a real model's completions, in place of drawn ones; ``capped``: of those, which the cap cut off.
    """

    prompt: Prompt
    typical: float
    content: str
    recorded: tuple[int, ...] = ()
    capped: tuple[bool, ...] = ()


@dataclass(frozen=True)
class Policy:
    """Draws lengths, or tells the recorded ones. ``growth`` multiplies them: the policy of a later time."""

    name: str
    growth: float = 1.0

    @property
    def limit(self) -> int:
        """Most tokens of a completion."""
        return {"lognormal": 10 * lognormal.MEDIAN, "real": CAP}.get(self.name, LIMIT)

    def tasks(self, count: int, seed: int) -> list[Task]:
        """The distinct ones among so many prompts of the policy's task set; all that were recorded, if they were."""
        if self.name == "real":
            return recorded_tasks()
        if self.name == "lognormal":
            # The numbers of ticket and room mean nothing: without them a text is what its length follows from.
            return _distinct(
                Task(_prompt("lognormal", number, row), row["length"], f"lognormal: {row['prompt'].partition('. ')[2]}")
                for number, row in enumerate(lognormal.prompts(count, seed))
            )
        return _distinct(self.task(prompt) for prompt in prompts(count, seed))

    def task(self, prompt: Prompt) -> Task:
        """The prompt with its typical length, of which the hidden difficulty is a part."""
        parameters = parameters_of(prompt)
        content = f"{prompt.dataset}: {parameters}"
        if self.name == "answers":
            return Task(prompt, max(1.0, len(str(prompt.columns["answer"]).encode())), content)
        hidden = random.Random(f"hidden/{prompt.text}").gauss(0, HIDDEN.get(prompt.dataset, USUAL_HIDDEN))
        return Task(prompt, _made_up_tokens(prompt.dataset, parameters) * math.exp(hidden), content)

    def lengths(self, task: Task, rng: random.Random) -> list[int]:
        """Tokens of each of its completions: eight, one (``lognormal``), or as many as were recorded."""
        if task.recorded:
            return [*task.recorded]
        return [self._sample(task, rng) for _ in range(1 if self.name == "lognormal" else 8)]

    def _sample(self, task: Task, rng: random.Random) -> int:
        length = task.typical * self.growth
        if self.name == "synthetic":
            length *= math.exp(rng.gauss(0, SAMPLE_NOISE))
            length *= 1 + rng.paretovariate(1.5) if rng.random() < RAMBLING_SHARE else 1
        return max(1, min(self.limit, round(length)))


@dataclass(frozen=True)
class Split:
    """What is taught, and what is asked afterwards.

    ``overlap``: how many of those asked have a text that was taught; ``content_overlap``: a content that was.
    """

    taught: list[Task]
    asked: list[Task]

    @property
    def overlap(self) -> int:
        """Counted, not taken for granted."""
        taught = {task.prompt.text for task in self.taught}
        return sum(task.prompt.text in taught for task in self.asked)

    @property
    def content_overlap(self) -> int:
        """The same of contents."""
        taught = {task.content for task in self.taught}
        return sum(task.content in taught for task in self.asked)


def split_by_content(tasks: Sequence[Task], seed: int, share: float = HELD_OUT_SHARE) -> Split:
    """Of each kind of content (a data set's, or the subjects of instructions) a share is asked, the rest taught.

    Whole contents go to one side, so a predictor has to work out lengths of sizes it was never shown. A kind with one
    content only is taught.
    """
    kinds: dict[str, set[str]] = {}
    for task in tasks:
        kinds.setdefault(task.content.partition(":")[0], set()).add(task.content)
    asked: set[str] = set()
    for contents in kinds.values():
        ordered = sorted(contents, key=lambda content: _hash(seed, content))
        asked |= set(ordered[: min(len(ordered) - 1, max(1, round(share * len(ordered))))])
    return Split(
        [task for task in tasks if task.content not in asked], [task for task in tasks if task.content in asked]
    )


def split_by_dataset(tasks: Sequence[Task], seed: int, folds: int = FOLDS) -> list[Split]:
    """Each data set is asked in one of the folds, and taught in the others; contents are parted as well.

    So the subject of an instruction that is asked was in no other instruction that was taught.
    """
    datasets = sorted({task.prompt.dataset for task in tasks}, key=lambda dataset: _hash(seed, dataset))
    apart = split_by_content(tasks, seed)
    return [
        Split(
            [task for task in apart.taught if task.prompt.dataset not in chosen],
            [task for task in apart.asked if task.prompt.dataset in chosen],
        )
        for fold in range(folds)
        for chosen in [set(datasets[fold::folds])]
    ]


def _hash(seed: int, text: str) -> str:
    return hashlib.sha256(f"{seed}/{text}".encode()).hexdigest()


def _distinct(tasks: Iterable[Task]) -> list[Task]:
    first: dict[str, Task] = {}
    for task in tasks:
        first.setdefault(task.prompt.text, task)
    return list(first.values())


def recorded_tasks(path: Path = RECORDED) -> list[Task]:
    """What `benchmarks.lengths.record` wrote, in an order by hash, so that data sets are mixed."""
    tasks = [
        Task(
            Prompt(prompt_id=f"{row['dataset']}/{number}", dataset=row["dataset"], content=row["text"]),
            sum(row["lengths"]) / len(row["lengths"]),
            # Subjects of instructions are one kind of content, whatever is asked of them.
            f"{'instructions' if row['dataset'] in INSTRUCTIONS else row['dataset']}: {row['parameters']}",
            tuple(row["lengths"]),
            tuple(reason == "length" for reason in row["finish_reasons"]),
        )
        for number, row in enumerate(pq.read_table(path).to_pylist())
    ]
    return sorted(tasks, key=lambda task: _hash(0, task.prompt.text))


def _prompt(dataset: str, number: int, row: dict[str, Any]) -> Prompt:
    return Prompt(prompt_id=f"{dataset}/{number}", dataset=dataset, content=row["prompt"])


def prompts(count: int, seed: int) -> list[Prompt]:
    """So many prompts of the mixture, each data set alike often."""
    settings = DataSettings.model_validate({"mixture": {name: {"options": o} for name, o in MIXTURE.items()}})
    source = ReasoningGymSource(settings, seed, size=count)
    return [source.prompt_at(position)[0] for position in range(count)]


def parameters_of(prompt: Prompt) -> tuple[Any, ...]:
    """What the length of a prompt's completions may follow from, besides its data set: sizes, where it states some.

    Two prompts of one data set with the same parameters are the same task in other words or with other letters.
    """
    meta: Any = prompt.columns["metadata"]
    match prompt.dataset:
        case "base_conversion":
            return (meta["decimal_value"],)
        case "caesar_cipher":
            return (len(meta["clear_text"]),)
        case "chain_sum":
            return (meta["num_terms"], meta["num_digits"])
        case "countdown":
            return (len(meta["numbers"]),)
        case "gsm_symbolic":
            return (len(meta["answer_cot"]),)
        case "letter_counting":
            return (meta["span_length"],)
        case "maze":
            return (meta["shortest_path_length"],)
        case "mini_sudoku" | "sudoku":
            return (meta["num_empty"],)
        case "number_sorting":
            return (meta["numbers"],)
        case "prime_factorization":
            return tuple(sorted(meta["factors"]))
        case "spell_backward":
            return (meta["word_len"],)
        case "tower_of_hanoi":
            return (meta["solution_length"],)
        case "word_sorting":
            return (meta["num_words"],)
        case _:  # a syllogism has no size: its premises are what it is
            return (meta["premise1"], meta["premise2"])


def _made_up_tokens(dataset: str, parameters: tuple[Any, ...]) -> float:
    """What the policy ``synthetic`` writes for such a task: made up, before anything was fitted."""
    size: Any = parameters[0]
    match dataset:
        case "base_conversion":
            return 30 + 14 * math.log2(2 + size)
        case "caesar_cipher":
            return float(20 + 1.5 * size)
        case "chain_sum":
            return float(30 + 9 * size * parameters[1])
        case "countdown":
            return float(120 * 3 ** (size - 4))
        case "gsm_symbolic":
            return float(size / 3)
        case "letter_counting":
            return float(20 + 6 * size)
        case "maze":
            return float(40 + 14 * size)
        case "mini_sudoku":
            return float(60 + 22 * size**1.2)
        case "number_sorting":
            return float(25 + 7 * size * math.log2(size))
        case "prime_factorization":
            return 30 + 3 * _trial_divisions([*parameters])
        case "spell_backward":
            return float(10 + 3 * size)
        case "sudoku":
            return float(300 + 5 * size**1.4)
        case "tower_of_hanoi":
            return float(40 + 9 * size)
        case "word_sorting":
            return float(20 + 5 * size * math.log2(size))
        case _:
            return 90.0


def _trial_divisions(factors: list[int]) -> float:
    """Divisors tried until only a prime is left: what the number itself does not show at a glance."""
    *smaller, largest = sorted(factors)
    return max(smaller[-1] if smaller else 2, math.isqrt(largest))


def instructions() -> Iterator[tuple[str, str, str]]:
    """Data set, text and parameters of the plain instructions."""
    for name, wording in INSTRUCTIONS.items():
        for subject in SUBJECTS:
            yield name, wording.format(subject), subject
