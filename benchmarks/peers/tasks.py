"""The tasks on which contenders are compared: policy, prompts, held-out questions, reward and hyper-parameters."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.peers.contenders.plan import Hyperparameters
from benchmarks.peers.task import Entry, reward
from streamrl.bus.embedded.runtime import cache_root
from streamrl.demo import task as demo
from streamrl.demo.warm_start import ensure_warm_started_model
from streamrl.init import smollm2


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


verified = reward(demo.ANSWER_PATTERN)
tagged = reward(smollm2.ANSWER_PATTERN)
MAX_PROMPTS = 4096
SHOWN = "8 - 3", 5
"""A third solved sum for SmolLM2's prompts, which then have 114 to 117 tokens."""


def _demo_held_out(seed: int, n: int) -> list[Entry]:
    return [
        {
            "prompt": question.text,
            "answer": question.answer,
            "part": "product" if question.operator == "*" else "sum",
        }
        for question in demo.held_out_questions(seed, n)
    ]


def _sums(seed: int, n: int) -> list[Entry]:
    return [_with_third_example(row) for row in islice(smollm2.rows(seed, held_out=False), n)]


def _sums_held_out(seed: int, n: int) -> list[Entry]:
    return [
        {**_with_third_example(row), "part": f"{len(smollm2.question_of(row).split()) // 2} terms"}
        for row in smollm2.held_out_rows(seed, n)
    ]


def _with_third_example(row: Entry) -> Entry:
    system, *turns = row["prompt"]
    return {"prompt": [system, *smollm2.solved(*SHOWN), *turns], "answer": row["answer"]}


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
            "benchmarks.peers.tasks:tagged",
            smollm2.ANSWER_PATTERN,
            replace(
                Hyperparameters(),
                groups_per_step=4,
                max_prompt_length=128,
                max_completion_length=smollm2.MAX_COMPLETION_TOKENS,
                learning_rate=1e-5,
                max_steps=1000,
            ),
            {
                "loop": {"bucket_boundaries": [18, 22]},
                "batching": {"token_budget": 2048},
                "training": {"threads": 2},
            },
            1800.0,
            10,
            256,
            lambda _: smollm2.ensure_smollm2(print),
            _sums,
            _sums_held_out,
        ),
    )
}


def training_entries(task: Task, same: Hyperparameters, seed: int) -> list[Entry]:
    """Two prompts for each that the run orders at most, so that each is asked once; at most ``MAX_PROMPTS``."""
    return task.training(seed, min(2 * same.groups_per_step * same.max_steps, MAX_PROMPTS))
