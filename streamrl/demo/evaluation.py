"""The demo's evaluation: accuracy and style of greedy and sampled solutions of held-out questions."""

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
from streamrl.producers.rewards.builtin import exact_match

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
_SEED = 1 << 40
"""Offset of the evaluation's seeds, far from the seeds of runs."""


@dataclass(frozen=True)
class Solution:
    """A question with the model's solution; ``tokens`` counts the end token."""

    prompt: str
    completion: str
    answer: str
    style: Style
    correct: bool
    tokens: int


def solve(model: Any, tokenizer: Any, questions: Sequence[Question], *, sampled: bool = False) -> list[Solution]:
    """The most likely solution of each question, or one that is sampled as in a run; at most 48 tokens each."""
    solved: list[Solution] = []
    # The full distribution at temperature 1, as a worker samples it. The default of transformers is the top 50 tokens.
    how = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0} if sampled else {"do_sample": False}
    for start in range(0, len(questions), BATCH_SIZE):
        batch = questions[start : start + BATCH_SIZE]
        inputs = tokenizer([each.text for each in batch], padding=True, padding_side="left", return_tensors="pt")
        output = model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            max_new_tokens=MAX_COMPLETION_TOKENS,
            **how,
        )[:, inputs["input_ids"].shape[1] :]
        texts = tokenizer.batch_decode(output, skip_special_tokens=True)
        answers = [each.answer for each in batch]
        # Judged by the run's own reward.
        right = exact_match(ANSWER_PATTERN)(texts, answer=answers)
        lengths = (output != tokenizer.pad_token_id).sum(dim=1).tolist()
        solved += [
            Solution(question.text, text, question.answer, style_of(text), bool(reward), length)
            for question, text, reward, length in zip(batch, texts, right, lengths, strict=True)
        ]
    return solved


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
    return judged(*opened(model), seed)


def opened(model: Path) -> tuple[Any, Any]:
    """A model of the demo and its tokenizer; limits torch in this process to one thread."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    # In so small a model, several threads wait for each other longer than they compute.
    torch.set_num_threads(1)
    loaded = AutoModelForCausalLM.from_pretrained(model).eval()
    return loaded, AutoTokenizer.from_pretrained(model)


def judged(model: Any, tokenizer: Any, seed: int) -> dict[str, Any]:
    """Metrics and samples of a loaded model; the same for the same seed, regardless of torch's random state."""
    import torch

    questions = held_out_questions(seed, NUM_HELD_OUT)
    greedy = solve(model, tokenizer, questions)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED + seed)
        rounds = [solve(model, tokenizer, questions[:NUM_SAMPLED], sampled=True) for _ in range(SAMPLES)]
    samples = [asdict(one) for one in greedy[:NUM_SHOWN]]
    return {"metrics": metrics_of(greedy, rounds), "samples": samples, "prompts": len(greedy)}
