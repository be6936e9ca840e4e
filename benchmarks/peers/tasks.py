"""The tasks on which contenders are compared: policy, prompts, held-out questions, reward and hyper-parameters."""

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import count, islice
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from benchmarks.peers.contenders.plan import Hyperparameters
from benchmarks.peers.task import Entry, reward
from streamrl.bus.embedded.runtime import cache_root
from streamrl.demo import task as demo
from streamrl.demo.warm_start import ensure_warm_started_model
from streamrl.init import smollm2
from streamrl.producers.prompts.gym import open_dataset


@dataclass(frozen=True)
class Task:
    """One task. ``reward``: its path for ``rewards.functions``; ``policy`` and both kinds of questions are by seed.

    ``settings``: of StreamRL, by section, over its own of each variant.
    """

    name: str
    reward: str
    answer_pattern: str
    hyperparameters: Hyperparameters
    settings: dict[str, dict[str, Any]]
    limit_s: float
    save_every: int
    held_out: int
    policy: Callable[[int], Path]
    training: Callable[[int, int], list[Entry]]
    held_out_entries: Callable[[int, int], list[Entry]]


NAME_PATTERN = r"<answer>\s*([^<>\s]+)\s*</answer>"
verified = reward(demo.ANSWER_PATTERN)
named = reward(NAME_PATTERN)
MAX_PROMPTS = 4096
DATASET = "needle_haystack"
OPTIONS: dict[str, JsonValue] = {"min_num_statements": 2, "max_num_statements": 2}
SYSTEM = "Answer in tags."
SHOWN = (
    ("Tayo accepts the color red", "Ayan bears playing rugby", "Ayan"),
    ("Bret disdains playing volleyball", "Boyd bears mopping the floor", "Boyd"),
)
"""Both statements of a solved question, and its answer."""
HELD_OUT_ONE_IN = 4
"""One in this many of the names is held out, with all statements about them."""


def _demo_held_out(seed: int, n: int) -> list[Entry]:
    return [
        {
            "prompt": question.text,
            "answer": question.answer,
            "part": "product" if question.operator == "*" else "sum",
        }
        for question in demo.held_out_questions(seed, n)
    ]


def _names(seed: int, n: int) -> list[Entry]:
    return list(islice(_questions(seed, held_out=False), n))


def _names_held_out(seed: int, n: int) -> list[Entry]:
    return list(islice(_questions(seed, held_out=True), n))


def _questions(seed: int, *, held_out: bool) -> Iterator[Entry]:
    """Endless questions which of two people does something. All names in them are held out, or none is."""
    size = 1024
    for start in count(seed * 1_000_000, size):  # an entry is drawn with the seed plus its index
        data = open_dataset(DATASET, OPTIONS, size=size, seed=start)
        for entry in (data[index] for index in range(size)):  # each access draws the entry anew
            text, _, question = entry["question"].partition("\n")
            people = [statement.split()[0] for statement in text.strip().split(". ")]
            if entry["answer"] in people and {is_held_out(name) for name in people} == {held_out}:
                part = f"{'first' if people[0] == entry['answer'] else 'second'} statement"
                yield {"prompt": _turns(f"{text.strip()}\n{question}"), "answer": entry["answer"], "part": part}


def is_held_out(name: str) -> bool:
    """Whether questions about a person are only for the evaluation; the people in the solved questions are not."""
    if any(statement.startswith(f"{name} ") for first, second, _ in SHOWN for statement in (first, second)):
        return False
    return zlib.crc32(name.encode()) % HELD_OUT_ONE_IN == 0


def _turns(question: str) -> list[dict[str, str]]:
    turns = [{"role": "system", "content": SYSTEM}]
    for first, second, name in SHOWN:
        asked = first if first.startswith(name) else second
        # The statement first: the model copies it more often than it finds the name alone.
        turns += [
            {
                "role": "user",
                "content": f"{first}. {second}.\n{asked.replace(name, 'Who', 1)}? Reply only with a name.",
            },
            {"role": "assistant", "content": f"{asked}. <answer>{name}</answer>"},
        ]
    return [*turns, {"role": "user", "content": question}]


TASKS = {
    task.name: task
    for task in (
        Task(
            "demo",
            "benchmarks.peers.tasks:verified",
            demo.ANSWER_PATTERN,
            Hyperparameters(),
            {"loop": {"bucket_boundaries": list(demo.BUCKET_BOUNDARIES)}, "batching": {"token_budget": 4096}},
            400.0,
            5,
            512,
            lambda seed: ensure_warm_started_model(cache_root(), seed, print),
            demo.training_prompts,
            _demo_held_out,
        ),
        Task(
            "smollm2",
            "benchmarks.peers.tasks:named",
            NAME_PATTERN,
            replace(
                Hyperparameters(),
                groups_per_step=4,
                max_prompt_length=192,
                max_completion_length=32,
                learning_rate=6e-5,
                max_steps=32,
            ),
            {
                "loop": {"bucket_boundaries": [18, 24]},
                "batching": {"token_budget": 2048},
                "training": {"threads": 2},
            },
            1800.0,
            4,
            256,
            lambda _: smollm2.ensure_smollm2(print),
            _names,
            _names_held_out,
        ),
    )
}


def training_entries(task: Task, same: Hyperparameters, seed: int) -> list[Entry]:
    """Two prompts for each that the run orders at most, so that each is asked once; at most ``MAX_PROMPTS``."""
    return task.training(seed, min(2 * same.groups_per_step * same.max_steps, MAX_PROMPTS))
