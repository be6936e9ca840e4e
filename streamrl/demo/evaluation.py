"""The demo's evaluation: greedy answers of a model to held-out words, and the share that is right."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from streamrl.demo.task import MAX_COMPLETION_TOKENS, Entry, exact_match, held_out_entries, prompt_text

NUM_HELD_OUT = 512
"""Standard error of the share: at most sqrt(0.25 / 512) = 0.022."""
NUM_SAMPLES = 24
BATCH_SIZE = 256


@dataclass(frozen=True)
class Answered:
    """One prompt and what the model made of it."""

    prompt: str
    completion: str
    answer: str
    correct: bool


def answer_greedily(model: Any, tokenizer: Any, entries: Sequence[Entry]) -> list[Answered]:
    """The most likely completion of every entry's question, token by token; at most 16 tokens."""
    answered: list[Answered] = []
    for start in range(0, len(entries), BATCH_SIZE):
        batch = entries[start : start + BATCH_SIZE]
        prompts, answers = [prompt_text(e) for e in batch], [e["answer"] for e in batch]
        inputs = tokenizer(prompts, padding=True, padding_side="left", return_tensors="pt")
        output = model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            do_sample=False,
            max_new_tokens=MAX_COMPLETION_TOKENS,
        )
        texts = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        rewards = exact_match(texts, answers)
        answered += map(Answered, prompts, texts, answers, map(bool, rewards))
    return answered


def share_correct(answered: Sequence[Answered]) -> float:
    """Exact match, 0 to 1; 0 for nothing."""
    return sum(one.correct for one in answered) / max(len(answered), 1)


def evaluate_exact_match(model: Path, seed: int) -> dict[str, Any]:
    """For ``evaluation.function``: exact match on 512 held-out words, and the first of the answers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    loaded = AutoModelForCausalLM.from_pretrained(model).eval()  # type: ignore[no-untyped-call]
    answered = answer_greedily(loaded, AutoTokenizer.from_pretrained(model), held_out_entries(seed, NUM_HELD_OUT))
    return {
        "metrics": {"exact_match": share_correct(answered)},
        "samples": [asdict(one) for one in answered[:NUM_SAMPLES]],
    }
