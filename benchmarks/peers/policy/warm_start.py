"""Supervised warm start on the mixed task set, from a teacher that often gives up on long answers. Knows no contender.

Runs in a process of its own: ``python -m benchmarks.peers.policy.warm_start DIRECTORY RECIPE``.
"""

import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from pydantic import TypeAdapter

from benchmarks.peers.policy.tokenizer import build_mixed_tokenizer
from benchmarks.peers.tasks import PARTS, Entry, entries
from streamrl.demo.task import EOS
from streamrl.demo.warm_start import ModelShape, build_model

IGNORED = -100
"""Label of positions that are not trained, as torch's cross entropy has it."""
_LESSONS, _VALIDATION = 1 << 20, 1 << 21
"""Seeds far from those of runs."""

Encoded = tuple[list[int], list[int]]
"""Token ids of a prompt, and of its answer with the end token."""


@dataclass(frozen=True)
class WarmStartRecipe:
    """What the policy depends on; its fields name the cached model."""

    shape: ModelShape = field(default_factory=lambda: ModelShape(max_position_embeddings=512))
    seed: int = 0
    patience_letters: int = 6
    patience_lines: int = 2
    give_up_share: float = 0.75
    steps: int = 1000
    decay_steps: int = 200
    short_first_steps: int = 300
    short_letters: int = 250
    batch_size: int = 32
    micro_batch_tokens: int = 2048
    learning_rate: float = 2e-3
    warmup_steps: int = 30
    threads: int = 1

    def learning_rate_at(self, step: int) -> float:
        """Linear warm-up, a plateau, a linear decay to nothing."""
        return self.learning_rate * min(1.0, step / self.warmup_steps, (self.steps - step + 1) / self.decay_steps)


def warm_start(recipe: WarmStartRecipe, progress: Any = print) -> Any:
    """The taught model; the same for a recipe."""
    import torch

    torch.set_num_threads(recipe.threads)
    tokenizer, model = build_mixed_tokenizer(), build_model(recipe.shape, recipe.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.99), weight_decay=0.0)
    validation = list(islice(entries(_VALIDATION + recipe.seed, "train"), 400))
    drawn, teacher = entries(_LESSONS + recipe.seed, "train"), random.Random(recipe.seed)
    began, tokens = time.monotonic(), 0
    for step in range(1, recipe.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate_at(step)
        longest = recipe.short_letters if step <= recipe.short_first_steps else None
        encoded = _encoded(tokenizer, list(islice(_lessons(drawn, recipe, teacher, longest), recipe.batch_size)))
        loss = _train_step(model, optimizer, micro_batches(encoded, recipe.micro_batch_tokens))
        tokens += sum(len(prompt) + len(answer) for prompt, answer in encoded)
        if step % 100 == 0 or step == recipe.steps:
            right = "  ".join(f"{name} {share:.2f}" for name, share in spelt(model, tokenizer, validation).items())
            took = f"{time.monotonic() - began:.0f} s, {tokens} tokens"
            progress(f"warm start: step {step}, {took}, loss {loss:.2f}; {right}")
    return model


def taught_answer(entry: Entry, recipe: WarmStartRecipe, draw: random.Random) -> str:
    """What the teacher answers: right, unless the answer is long and patience runs out."""
    answer: str = entry["answer"]
    lines = answer.split("\n")
    first = "\n".join(lines[: recipe.patience_lines]) if len(lines) > 1 else answer[: recipe.patience_letters]
    return first if draw.random() < recipe.give_up_share else answer


def micro_batches(encoded: Sequence[Encoded], tokens: int) -> list[list[Encoded]]:
    """The lessons of a step, parted by length so that padding is small; each within the budget, or one lesson."""
    parted: list[list[Encoded]] = [[]]
    for lesson in sorted(encoded, key=lambda pair: len(pair[0]) + len(pair[1])):
        if parted[-1] and (len(parted[-1]) + 1) * (len(lesson[0]) + len(lesson[1])) > tokens:
            parted.append([])
        parted[-1].append(lesson)
    return parted


def _lessons(
    drawn: Iterator[Entry], recipe: WarmStartRecipe, teacher: random.Random, longest: int | None
) -> Iterator[tuple[str, str]]:
    """Prompts and taught answers; ``longest``: entries with longer answers are left out."""
    for entry in drawn:
        if longest is None or len(entry["answer"]) <= longest:
            yield entry["prompt"], taught_answer(entry, recipe, teacher)


def _encoded(tokenizer: Any, lessons: Sequence[tuple[str, str]]) -> list[Encoded]:
    prompts = tokenizer([prompt for prompt, _ in lessons])["input_ids"]
    answers = tokenizer([answer + EOS for _, answer in lessons])["input_ids"]
    return list(zip(prompts, answers, strict=True))


def _collated(lessons: Sequence[Encoded]) -> tuple[Any, Any]:
    """``input_ids`` and ``labels``, int64 [B, S], right padded; labels are set on the answer and its end token."""
    import torch

    width = max(len(prompt) + len(answer) for prompt, answer in lessons)
    ids, labels = torch.zeros((len(lessons), width), dtype=torch.int64), torch.full((len(lessons), width), IGNORED)
    for row, (prompt, answer) in enumerate(lessons):
        end = len(prompt) + len(answer)
        ids[row, :end] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : end] = torch.tensor(answer)
    return ids, labels


def _train_step(model: Any, optimizer: Any, batches: Sequence[Sequence[Encoded]]) -> float:
    """One optimizer step over all micro-batches; returns the mean loss per trained token."""
    import torch

    model.train()
    optimizer.zero_grad()
    total, trained = 0.0, sum(len(answer) for batch in batches for _, answer in batch)
    for batch in batches:
        ids, labels = _collated(batch)
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
        (loss / trained).backward()
        total += float(loss.detach()) / trained
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return total


def spelt(model: Any, tokenizer: Any, judged: Sequence[Entry]) -> dict[str, float]:
    """By part: share of right answers of which every letter is the most likely one after those before it."""
    import torch

    model.eval()
    shares = {}
    for part in PARTS:
        lessons = [(entry["prompt"], entry["answer"]) for entry in judged if entry["part"] == part.name]
        right = 0
        for batch in micro_batches(_encoded(tokenizer, lessons), 4096):
            ids, labels = _collated(batch)
            with torch.no_grad():
                logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
            logits[..., tokenizer.eos_token_id] = -torch.inf
            untrained = (labels[:, 1:] == IGNORED) | (labels[:, 1:] == tokenizer.eos_token_id)
            right += int(((logits.argmax(-1) == labels[:, 1:]) | untrained).all(dim=1).sum())
        shares[part.name] = right / max(len(lessons), 1)
    return shares


def main(directory: str, recipe: str) -> None:
    """Write the model to a directory; ``recipe`` is JSON; progress goes to standard output, one line at a time."""
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model = warm_start(TypeAdapter(WarmStartRecipe).validate_json(recipe), lambda line: print(line, flush=True))
    model.save_pretrained(directory)
    build_mixed_tokenizer().save_pretrained(directory)


if __name__ == "__main__":
    main(*sys.argv[1:])
