"""Held-out rewards of saved weights, the same for all contenders, after training: it costs nobody's time.

Runs in a process of its own: ``python -m benchmarks.peers.judging.evaluation TASK_FILE``, a line of JSON per model.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.task import Entry, Reward, read_entries, reward

BATCH_SIZE = 256
SAMPLING_SEED = 1


def held_out_reward(
    model: Any, tokenizer: Any, entries: Sequence[Entry], judge: Reward, temperature: float, limit: int
) -> list[float]:
    """Reward of one completion for each entry; temperature 0 takes the most likely tokens."""
    import torch

    torch.manual_seed(SAMPLING_SEED)
    rewards: list[float] = []
    for start in range(0, len(entries), BATCH_SIZE):
        batch = entries[start : start + BATCH_SIZE]
        prompts = [_text(tokenizer, entry["prompt"]) for entry in batch]
        inputs = tokenizer(prompts, padding=True, padding_side="left", return_tensors="pt", add_special_tokens=False)
        drawn = (
            {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
            if temperature
            else {"do_sample": False}
        )
        output = model.generate(
            input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], max_new_tokens=limit, **drawn
        )
        texts = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        rewards += judge(texts, [entry["answer"] for entry in batch])
    return rewards


def _text(tokenizer: Any, prompt: Any) -> str:
    if isinstance(prompt, str):
        return prompt
    return str(tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False))


def main(task_file: str) -> None:
    """Evaluate every model that the task names; print its mean reward, and that of each part."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    task = json.loads(Path(task_file).read_text())
    torch.set_num_threads(1)
    tokenizer, entries = AutoTokenizer.from_pretrained(task["policy"]), read_entries(Path(task["prompts"]))
    judge = reward(task["answer_pattern"])
    for weights in task["models"]:
        model = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32).eval()
        with torch.inference_mode():
            rewards = held_out_reward(model, tokenizer, entries, judge, task["temperature"], task["limit"])
        parts: dict[str, list[float]] = {}
        for entry, earned in zip(entries, rewards, strict=True):
            parts.setdefault(entry["part"], []).append(earned)
        by_part = {name: sum(values) / len(values) for name, values in parts.items()}
        print(json.dumps({"weights": weights, "reward": sum(rewards) / len(rewards), "parts": by_part}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
