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


def solve(model: Path, questions: Sequence[Question], seeds: Sequence[int] | None = None) -> list[Solution]:
    """The most likely solution of each question, or one sampled with its seed at temperature 1; at most 48 tokens each.

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
    sampling = SamplingParams(max_completion_length=MAX_COMPLETION_TOKENS, temperature=0.0 if seeds is None else 1.0)
    completions = [
        ActiveCompletion(GenerationRequest(f"{number}", ids, sampling), MAX_COMPLETION_TOKENS, seed)
        for number, (ids, seed) in enumerate(
            zip(tokenizer([one.text for one in questions])["input_ids"], seeds or [0] * len(questions), strict=True)
        )
    ]
    for completion in completions:
        decoder.queue(completion)
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
    greedy = solve(model, questions)
    draw = random.Random(f"evaluation/{seed}")
    # The samples of a question one after the other, as they share a prefill.
    asked = [question for question in questions[:NUM_SAMPLED] for _ in range(SAMPLES)]
    sampled = solve(model, asked, [draw.getrandbits(63) for _ in asked])
    metrics = metrics_of(greedy, [sampled[number::SAMPLES] for number in range(SAMPLES)])
    return {"metrics": metrics, "samples": [asdict(one) for one in greedy[:NUM_SHOWN]], "prompts": len(greedy)}
