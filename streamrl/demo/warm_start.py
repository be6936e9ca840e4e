"""The demo's policy: a Qwen2 of about a million parameters, warm-started by supervised training, and cached.

The teacher is right about short words and gives up on long ones: its answers to words of more than six letters stop
after the sixth seven times in ten. So the model learns to spell, and to stop too early; the rest is left to
reinforcement learning. Only training words are used; held-out words are only evaluated.

``ensure_warm_started_model`` makes the model once for each recipe and seed, in a process of its own
(``python -m streamrl.demo.warm_start DIRECTORY SEED RECIPE``), so that the caller loads no torch. Invariant
a_cached_model_is_whole: a model appears under its name by one rename, when all its files are written.
"""

import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from schemas.errors import ModelError
from streamrl.demo.evaluation import NUM_HELD_OUT, answer_greedily, share_correct
from streamrl.demo.task import (
    EOS,
    HELD_OUT_ONE_IN,
    INSTRUCTION,
    OPTIONS,
    PAD,
    PROMPT_TEMPLATE,
    Entry,
    build_tokenizer,
    held_out_entries,
    prompt_text,
    training_entries,
)

Progress = Callable[[str], None]
MAX_THREADS = 1
"""Of the training: with one thread the sums, and so the model, are the same on every machine of a kind."""
IGNORED = -100
"""Label of positions that are not trained, as torch's cross entropy has it."""
_DATA_SEED = 1 << 50
"""Far from the seeds of runs and of the held-out words."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes of the Qwen2; heads of 32 are the smallest that vLLM's CPU attention takes."""

    hidden_size: int = 128
    intermediate_size: int = 384
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 4
    vocab_size: int = 320
    max_position_embeddings: int = 128
    initializer_range: float = 0.03


@dataclass(frozen=True)
class WarmStartRecipe:
    """What the warm start depends on, besides the seed; its fields name the cached model."""

    shape: ModelShape = field(default_factory=ModelShape)
    patience_letters: int = 6
    give_up_share: float = 0.7
    target_spelling: float = 0.7
    max_plateau_steps: int = 700
    decay_steps: int = 150
    batch_size: int = 32
    learning_rate: float = 2e-3
    adam_beta2: float = 0.99
    warmup_steps: int = 30
    max_grad_norm: float = 1.0
    check_every: int = 25
    num_validation: int = 256

    def learning_rate_at(self, step: int, decay_from: int | None) -> float:
        """Linear warm-up, a plateau, and from step ``decay_from`` on a linear decay to nothing."""
        # lr = peak * min(1, step / warm-up, 1 - (step - from) / (decay + 1)); + 1, for a step at a rate of 0 is wasted
        left = 1.0 if decay_from is None else 1.0 - (step - decay_from) / (self.decay_steps + 1)
        return self.learning_rate * min(1.0, step / self.warmup_steps, left)


@dataclass(frozen=True)
class WarmStarted:
    """The model, its optimizer steps, the last one's mean loss in nats per token, and how well it spells.

    ``spelling``: share of training words not seen before whose every letter is right, had it not stopped early.
    """

    model: Any
    steps: int
    loss: float
    spelling: float


def ensure_warm_started_model(
    cache_dir: Path, seed: int, progress: Progress, recipe: WarmStartRecipe | None = None
) -> Path:
    """The directory of the warm-started model of a seed; trains it first if it is not there (about half a minute).

    Raises:
        ModelError: the training failed, or the cache cannot be written.
    """
    recipe = recipe or WarmStartRecipe()
    target = cache_dir / "models" / f"spell-backward-{_fingerprint(recipe)}-seed{seed}"
    if target.is_dir():
        progress(f"warm start: cached in {target}")
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # Beside the target: a rename is one act only within a file system.
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".making-", ignore_cleanup_errors=True) as scratch:
            made = Path(scratch) / "model"
            _train(made, seed, recipe, progress)
            _publish(made, target)
    except OSError as error:
        raise ModelError(f"expected to write the demo's model to {target}, got: {error}; set STREAMRL_CACHE") from error
    return target


def _fingerprint(recipe: WarmStartRecipe) -> str:
    # All that the model follows from besides the seed: were one left out, a model of other data would be taken for it.
    parts = [asdict(recipe), OPTIONS, HELD_OUT_ONE_IN, INSTRUCTION, PROMPT_TEMPLATE]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:10]


def _train(directory: Path, seed: int, recipe: WarmStartRecipe, progress: Progress) -> None:
    directory.mkdir()
    threads = str(min(MAX_THREADS, os.cpu_count() or 1))
    environment = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false"}
    arguments = [str(directory), str(seed), json.dumps(asdict(recipe))]
    # Errors go to a file: a second pipe that nobody reads would fill up, and the child wait for ever.
    with tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen(
            # -P: a file in the current directory must not stand in for a module of the same name.
            [sys.executable, "-P", "-W", "ignore", "-m", "streamrl.demo.warm_start", *arguments],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=os.environ | environment,  # OpenMP and MKL read it once, when torch loads them
        )
        with child:
            try:
                for line in child.stdout or ():
                    progress(line.rstrip())
            except BaseException:  # Ctrl-C too; without it, leaving the block would wait for the whole training
                child.kill()
                raise
        if child.returncode != 0:
            errors.seek(0)
            last = (errors.read().strip().splitlines() or ["no output"])[-1]
            raise ModelError(f"expected the warm start of the demo's model to end well, got: {last}")


def _publish(made: Path, target: Path) -> None:
    """Another process may have been faster; its model is the same."""
    # A rename onto a directory that is not empty fails, so a model that somebody reads is never replaced.
    try:
        made.rename(target)
    except OSError:
        if not target.is_dir():
            raise


def main(directory: str, seed: str, recipe: str) -> None:
    """The child process's side: ``recipe`` is JSON; progress goes to standard output, one line at a time."""
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    parsed = TypeAdapter(WarmStartRecipe).validate_json(recipe)
    write_model(Path(directory), int(seed), parsed, lambda line: print(line, flush=True))


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
- Warm start: {done.steps} steps of AdamW on batches of {recipe.batch_size} answers of a teacher, seed {seed}.
- The teacher is imperfect on purpose: {recipe.give_up_share:.0%} of its answers to words of more than
  {recipe.patience_letters} letters stop after letter {recipe.patience_letters}.
  So the model learns to spell, and to stop too early.
- Letter for letter it spells {done.spelling:.2f} of all words when it is not let stop.
  What reinforcement learning has to add is mostly a habit, to go on to the end of long words; little of it is spelling.
- Exact match on {NUM_HELD_OUT} held-out words of all lengths, greedy: {held_out:.3f}.

It is meant to be improved by reinforcement learning, and for nothing else.
"""


def warm_start(recipe: WarmStartRecipe, seed: int, progress: Progress) -> WarmStarted:
    """Train on the teacher's answers until the model spells well, then let the learning rate decay.

    The same for a seed and a number of threads. How well it spells decides, for seeds differ in how soon they do.
    """
    import torch

    tokenizer = build_tokenizer()
    model = build_model(recipe.shape, seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.learning_rate, betas=(0.9, recipe.adam_beta2), weight_decay=0.0
    )
    # Entry i is drawn with seed + i: two seeds share nothing within their first million entries.
    entries = training_entries(_DATA_SEED + (seed << 20))
    # The first of the stream, and with right answers: lessons are drawn from what comes after them.
    validation = _batch(tokenizer, [(prompt_text(e), e["answer"]) for e in islice(entries, recipe.num_validation)])
    rng, began = random.Random(seed), time.monotonic()
    step, loss, decay_from = 0, 0.0, None
    while decay_from is None or step < decay_from + recipe.decay_steps:
        step += 1
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate_at(step, decay_from)
        drawn = islice(entries, recipe.batch_size)
        lesson = [(prompt_text(entry), taught_answer(entry, recipe, rng)) for entry in drawn]
        loss = _train_step(model, optimizer, _batch(tokenizer, lesson), recipe)
        if step % recipe.check_every == 0:
            spelt = _share_spelt(model, validation, tokenizer.eos_token_id)
            progress(
                f"warm start: step {step}, {time.monotonic() - began:.0f} s, loss {loss:.2f}, spelling {spelt:.2f}"
            )
            if decay_from is None and (spelt >= recipe.target_spelling or step >= recipe.max_plateau_steps):
                decay_from = step
    return WarmStarted(model, step, loss, _share_spelt(model, validation, tokenizer.eos_token_id))


def taught_answer(entry: Entry, recipe: WarmStartRecipe, rng: random.Random) -> str:
    """What the teacher answers: right, unless the word is long and patience runs out."""
    answer: str = entry["answer"]
    gives_up = len(answer) > recipe.patience_letters and rng.random() < recipe.give_up_share
    return answer[: recipe.patience_letters] if gives_up else answer


def _batch(tokenizer: Any, lesson: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """``input_ids`` and ``labels``, int64 [B, S], right padded; labels are set on the answer and its end token."""
    import torch

    prompts = tokenizer([prompt for prompt, _ in lesson])["input_ids"]
    answers = tokenizer([answer + EOS for _, answer in lesson])["input_ids"]
    width = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True))
    ids = torch.full((len(lesson), width), tokenizer.pad_token_id)
    labels = torch.full((len(lesson), width), IGNORED)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        end = len(prompt) + len(answer)
        ids[row, :end] = torch.tensor(prompt + answer)
        # Not shifted: transformers compares the logits of position t with the label of t + 1.
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


def _share_spelt(model: Any, batch: dict[str, Any], eos_token_id: int) -> float:
    """Share of right answers whose every letter is the most likely one after those before it, had it gone on."""
    import torch

    model.eval()
    with torch.no_grad():
        logits = model(input_ids=batch["input_ids"], use_cache=False).logits[:, :-1]
    logits[..., eos_token_id] = -torch.inf  # [B, S - 1, V]: the letter it would go on with
    labels = batch["labels"][:, 1:]  # [B, S - 1], shifted here by hand
    untrained = (labels == IGNORED) | (labels == eos_token_id)
    return float(((logits.argmax(-1) == labels) | untrained).all(dim=1).float().mean())


def build_model(shape: ModelShape, seed: int) -> Any:
    """A ``Qwen2ForCausalLM`` in float32 with random weights, the same ones for a seed."""
    import torch
    from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

    tokenizer = build_tokenizer()
    eos, pad = tokenizer.convert_tokens_to_ids([EOS, PAD])
    config = Qwen2Config(
        **vars(shape), tie_word_embeddings=False, bos_token_id=None, eos_token_id=eos, pad_token_id=pad, dtype="float32"
    )
    # The caller's random numbers go on as if nothing had been drawn; no devices, as weights are drawn on the CPU.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=eos, pad_token_id=pad)  # type: ignore[no-untyped-call]
    return model


def save(model: Any, directory: Path) -> None:
    """Write model and tokenizer as a directory for ``from_pretrained`` and for vLLM."""
    model.save_pretrained(directory)
    build_tokenizer().save_pretrained(directory)


if __name__ == "__main__":
    main(*sys.argv[1:])
