"""Supervised warm start of the demo's model: next characters of right answers, mostly of short words.

It leaves long words to reinforcement learning on purpose: it stops as soon as a few of them come right. Trains on
training words only, and stops by the accuracy on other training words; held-out words are only reported.
Runs in a process of its own: ``python -m deploy.demo.warm_start DIRECTORY SEED``.
"""

import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from deploy.demo.evaluation import NUM_HELD_OUT, answer_greedily, share_correct
from deploy.demo.model import ModelShape, build_model, save
from deploy.demo.task import Entry, held_out_entries, prompt_text, training_entries
from deploy.demo.tokenizer import EOS, build_tokenizer

IGNORED = -100
"""Label of positions that are not trained, as torch's cross entropy has it."""
_DATA_SEED = 1 << 50

Progress = Callable[[str], None]


@dataclass(frozen=True)
class WarmStartRecipe:
    """What the warm start depends on, besides the seed; its fields name the cached model."""

    shape: ModelShape = field(default_factory=ModelShape)
    short_letters: int = 6
    any_length_share: float = 0.03
    target_exact_match: float = 0.27
    max_steps: int = 400
    batch_size: int = 32
    learning_rate: float = 2e-3
    adam_beta2: float = 0.99
    warmup_steps: int = 30
    decay_share: float = 0.5
    max_grad_norm: float = 1.0
    check_every: int = 20
    num_validation: int = 512

    def learning_rate_at(self, step: int) -> float:
        """Linear warm-up, a plateau, and a linear decay to nothing over the last ``decay_share`` of the steps."""
        left = (self.max_steps + 1 - step) / (self.max_steps * self.decay_share)
        return self.learning_rate * min(1.0, step / self.warmup_steps, left)


@dataclass(frozen=True)
class WarmStarted:
    """The model, and how it came to be: optimizer steps, last loss (nats per token), exact match on validation."""

    model: Any
    steps: int
    loss: float
    exact_match: float


def warm_start(recipe: WarmStartRecipe, seed: int, progress: Progress) -> WarmStarted:
    """Train until the target or the last step; the same for a seed and a number of threads."""
    import torch

    tokenizer = build_tokenizer()
    model = build_model(recipe.shape, seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.learning_rate, betas=(0.9, recipe.adam_beta2), weight_decay=0.0
    )
    entries = training_entries(_DATA_SEED + (seed << 20))
    validation = list(islice(entries, recipe.num_validation))
    lesson = _lesson(entries, recipe, random.Random(seed))
    began, loss, accuracy = time.monotonic(), 0.0, 0.0
    for step in range(1, recipe.max_steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate_at(step)
        loss = _train_step(model, optimizer, _batch(tokenizer, list(islice(lesson, recipe.batch_size))), recipe)
        if step % recipe.check_every == 0 or step == recipe.max_steps:
            accuracy = share_correct(answer_greedily(model.eval(), tokenizer, validation))
            elapsed = time.monotonic() - began
            progress(f"warm start: step {step}, {elapsed:.0f} s, loss {loss:.2f}, exact match {accuracy:.2f}")
            if accuracy >= recipe.target_exact_match:
                break
    return WarmStarted(model, step, loss, accuracy)


def _lesson(entries: Iterator[Entry], recipe: WarmStartRecipe, draw: random.Random) -> Iterator[Entry]:
    """Entries with short words, and a share of entries as they come."""
    for entry in entries:
        if draw.random() < recipe.any_length_share:
            yield entry
        else:
            yield next(other for other in entries if len(other["answer"]) <= recipe.short_letters)


def _batch(tokenizer: Any, entries: Sequence[Entry]) -> dict[str, Any]:
    """``input_ids`` and ``labels``, int64 [B, S], right padded; labels are set on the answer and its end token."""
    import torch

    prompts = tokenizer([prompt_text(entry) for entry in entries])["input_ids"]
    answers = tokenizer([entry["answer"] + EOS for entry in entries])["input_ids"]
    width = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True))
    ids = torch.full((len(entries), width), tokenizer.pad_token_id)
    labels = torch.full((len(entries), width), IGNORED)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        end = len(prompt) + len(answer)
        ids[row, :end] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : end] = torch.tensor(answer)
    return {"input_ids": ids, "labels": labels}


def _train_step(model: Any, optimizer: Any, batch: dict[str, Any], recipe: WarmStartRecipe) -> float:
    """One optimizer step; returns the mean loss per trained token. A causal model needs no mask for right padding."""
    import torch

    model.train()
    optimizer.zero_grad()
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.max_grad_norm)
    optimizer.step()
    return float(loss.item())


def write_model(directory: Path, seed: int, recipe: WarmStartRecipe, progress: Progress) -> None:
    """Warm-start a model, judge it on held-out words, and write it with its card."""
    done = warm_start(recipe, seed, progress)
    entries = held_out_entries(seed, NUM_HELD_OUT)
    held_out = share_correct(answer_greedily(done.model.eval(), build_tokenizer(), entries))
    progress(f"warm start: done, exact match {held_out:.3f} on {len(entries)} held-out words")
    save(done.model, directory)
    (directory / "MODEL_CARD.md").write_text(_card(done, seed, recipe, held_out))


def _card(done: WarmStarted, seed: int, recipe: WarmStartRecipe, held_out: float) -> str:
    size = sum(parameter.numel() for parameter in done.model.parameters())
    return f"""# StreamRL demo policy, warm-started

A Qwen2 of {size:,} parameters with random weights at first, then trained on this machine; nothing was downloaded.

- Task: reasoning-gym's `spell_backward`. Nine words in ten are for training, one is held out.
- Tokenizer: one token a letter; the task's fixed instruction is one token; a line break ends the prompt.
- Warm start: {done.steps} steps of AdamW on batches of {recipe.batch_size} right answers, seed {seed}. Words have at most
  {recipe.short_letters} letters, but for {recipe.any_length_share:.0%} drawn from all lengths. It stops on purpose when exact match
  on {recipe.num_validation} training words of all lengths reaches {recipe.target_exact_match:.2f}: longer words are left to learn.
- It reached {done.exact_match:.3f} there, and {held_out:.3f} on {NUM_HELD_OUT} held-out words (greedy).

It is meant to be improved by reinforcement learning, and for nothing else.
"""


def main(directory: str, seed: str) -> None:
    """The child process's side: progress goes to standard output, one line at a time."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    write_model(Path(directory), int(seed), WarmStartRecipe(), lambda line: print(line, flush=True))


if __name__ == "__main__":
    main(*sys.argv[1:])
