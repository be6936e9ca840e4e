"""The demo's evaluation: accuracy and style of greedy and sampled solutions of held-out questions."""

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from streamrl.demo.task import (
    ANSWER_PATTERN,
    MAX_COMPLETION_TOKENS,
    Question,
    Style,
    held_out_questions,
    style_of,
)
from streamrl.producers.generation.settings import GenerationSettings
from streamrl.producers.rewards.builtin import exact_match
from streamrl.schemas.trajectories import SamplingParams

EVALUATION = "streamrl.demo.evaluation:evaluate"
"""The demo's ``evaluation.function``."""
NUM_HELD_OUT = 512
"""Held-out questions. The standard error of a share is at most sqrt(0.25 / 512) = 0.022."""
NUM_SAMPLED = 256
"""The first of these questions are also answered by sampling."""
SAMPLES = 8
"""Sampled solutions per question."""
NUM_SHOWN = 24
BATCH_SIZE = 256
"""Completions that are decoded together."""


@dataclass(frozen=True)
class Solution:
    """A question with the model's solution; ``tokens`` counts the end token."""

    prompt: str
    completion: str
    answer: str
    style: Style
    correct: bool
    tokens: int


def solve(model: Path, asked: Sequence[tuple[Question, int | None]]) -> list[Solution]:
    """A solution of at most 48 tokens for each question: sampled at temperature 1 with its seed, or the most likely.

    The built-in engine's decoder samples them on one thread, as in a worker.
    """
    from transformers import AutoTokenizer
    from transformers.utils import logging

    from streamrl.producers.generation.engines.port import ActiveCompletion, GenerationRequest
    from streamrl.producers.generation.engines.slots import SlotDecoder

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(model)
    # In so small a model, several threads wait for each other longer than they compute.
    decoder = SlotDecoder(str(model), GenerationSettings(max_num_seqs=BATCH_SIZE, threads=1, dtype="float32"))
    decoder.load()
    questions, completions = [question for question, _ in asked], list[ActiveCompletion]()
    sampled = SamplingParams(max_completion_length=MAX_COMPLETION_TOKENS)
    likeliest = sampled.model_copy(update={"temperature": 0.0})
    prompts = tokenizer([question.text for question in questions])["input_ids"]
    for number, (ids, (_, seed)) in enumerate(zip(prompts, asked, strict=True)):
        request = GenerationRequest(f"{number}", ids, likeliest if seed is None else sampled)
        completions.append(ActiveCompletion(request, MAX_COMPLETION_TOKENS, seed or 0))
        decoder.queue(completions[-1])
    while decoder.busy:
        decoder.step()
    decoder.close()
    texts = tokenizer.batch_decode([each.tokens for each in completions], skip_special_tokens=True)
    # Judged by the run's own reward.
    right = exact_match(ANSWER_PATTERN)(texts, answer=[each.answer for each in questions])
    return [
        Solution(question.text, text, question.answer, style_of(text), bool(reward), completion.generated)
        for question, text, reward, completion in zip(questions, texts, right, completions, strict=True)
    ]


def share_correct(solved: Sequence[Solution]) -> float:
    """Share of correct answers, 0 to 1; 0 if there are none."""
    return sum(one.correct for one in solved) / max(len(solved), 1)


def metrics_of(greedy: Sequence[Solution], rounds: Sequence[Sequence[Solution]]) -> dict[str, float]:
    """Metrics for the run's summary; ``rounds`` has one sampled solution per question each, in the same order.

    ``accuracy`` and ``greedy_share_worked`` are for greedy solutions, all others for sampled ones, as the policy is
    trained. ``pass_at_8``: share of questions with at least one correct solution in eight. ``accuracy_bare`` and
    ``accuracy_worked`` are absent if no solution had that style. ``mean_length`` is in tokens with the end token.
    """
    sampled = [one for solutions in rounds for one in solutions]
    metrics = {
        "accuracy": share_correct(greedy),
        "sampled_accuracy": share_correct(sampled),
        f"pass_at_{len(rounds)}": sum(any(one.correct for one in tries) for tries in zip(*rounds, strict=True))
        / len(rounds[0]),
        "share_worked": sum(one.style == "worked" for one in sampled) / len(sampled),
        "greedy_share_worked": sum(one.style == "worked" for one in greedy) / len(greedy),
        "mean_length": sum(one.tokens for one in sampled) / len(sampled),
    }
    for style in ("bare", "worked"):
        if of_style := [one for one in sampled if one.style == style]:
            metrics[f"accuracy_{style}"] = share_correct(of_style)
    return {name: round(value, 4) for name, value in metrics.items()}


def evaluate(model: Path, seed: int) -> dict[str, Any]:
    """The demo's ``evaluation.function``: metrics on 512 held-out questions, and the first greedy solutions."""
    questions = held_out_questions(seed, NUM_HELD_OUT)
    draw = random.Random(f"evaluation/{seed}")
    # The samples of a question one after the other, as they share a prefill.
    samples = [(question, draw.getrandbits(63)) for question in questions[:NUM_SAMPLED] for _ in range(SAMPLES)]
    solved = solve(model, [*((question, None) for question in questions), *samples])
    greedy, sampled = solved[: len(questions)], solved[len(questions) :]
    metrics = metrics_of(greedy, [sampled[number::SAMPLES] for number in range(SAMPLES)])
    return {"metrics": metrics, "samples": [asdict(one) for one in greedy[:NUM_SHOWN]], "prompts": len(greedy)}
