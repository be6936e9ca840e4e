"""The demo's policy: a Qwen2 of about a million parameters, warm-started by supervised training, and cached.

The warm start trains only on correct, complete solutions. Half are bare answers and half are worked out, as people
write both. So small a model guesses bare answers badly, but is good at working them out; reinforcement learning has to
discover that. The warm start uses only training questions, and the evaluation only held-out ones.

The model of seed 0 is shipped, in ``shipped/``. ``python -m streamrl.demo.warm_start`` makes it again, in about three
minutes. ``ensure_warm_started_model`` makes the others once for each recipe and seed, in its own process (``python -m
streamrl.demo.warm_start DIRECTORY SEED RECIPE``), so that the caller loads no torch.

Invariants:
- a_cached_model_is_complete: a model gets its name by one rename, after all its files are written;
- a_shipped_model_is_the_recipes: it has the recipe's fingerprint in its name, so another recipe finds none.
"""

import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from streamrl.bus.embedded.process import die_with_parent
from streamrl.bus.embedded.runtime import locked
from streamrl.demo.evaluation import EVALUATION, evaluate
from streamrl.demo.task import (
    EOS,
    HELD_OUT_ONE_IN,
    MARKS,
    PAD,
    PRODUCT_SHARE,
    Question,
    build_tokenizer,
    training_prompts,
    training_questions,
)
from streamrl.deploy.local.evaluation import KNOWN, libraries, write_known
from streamrl.inspection.environment import device_name
from streamrl.schemas.errors import ModelError
from streamrl.schemas.import_path import module_command

Progress = Callable[[str], None]
MAX_THREADS = 1
"""Threads of the training. With one, the sums and so the model are the same on all machines of one type."""
PROMPTS, NUM_PROMPTS = "prompts.jsonl", 8192
"""A run's questions, in the model's directory; more than the run's steps need, so that few repeat."""
SHIPPED = Path(__file__).with_name("shipped")
"""Models that are not trained here, under the names of their directories in the cache; their weights are float16."""
WEIGHTS, EVALUATED, MADE = "model.safetensors", "evaluated.json", "made.json"
IGNORED = -100
"""Label of positions that are not trained; the default of torch's cross entropy."""
_LESSONS, _CHECKS = "lessons", "checks"
Lesson = tuple[str, str]
"""A question and a solution."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes of the Qwen2 model. A head size of 32 is the smallest that vLLM's CPU attention supports."""

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
    """Everything that the warm start depends on except the seed; its fields determine the cached model's name."""

    shape: ModelShape = field(default_factory=ModelShape)
    bare_share: float = 0.5
    steps: int = 1400
    decay_steps: int = 1000
    batch_size: int = 32
    learning_rate: float = 2e-3
    adam_beta2: float = 0.99
    warmup_steps: int = 50
    max_grad_norm: float = 1.0
    check_every: int = 100
    num_checked: int = 64

    def learning_rate_at(self, step: int) -> float:
        """Linear warm-up, a plateau, and a linear decay to nothing after the last step."""
        # lr = peak * min(1, step / warm-up, steps left with this one / decay)
        return self.learning_rate * min(1.0, step / self.warmup_steps, (self.steps - step + 1) / self.decay_steps)


@dataclass(frozen=True)
class WarmStarted:
    """The model, its number of optimizer steps, and the last step's mean loss in nats per token."""

    model: Any
    steps: int
    loss: float


def ensure_warm_started_model(
    cache_dir: Path, seed: int, progress: Progress, recipe: WarmStartRecipe | None = None
) -> Path:
    """The directory of the warm-started model of a seed; if it is neither cached nor shipped, trains it first.

    That takes two or three minutes.

    Raises:
        ModelError: the training failed, or the cache cannot be written.
    """
    recipe = recipe or WarmStartRecipe()
    target = model_directory(cache_dir, seed, recipe)
    if target.is_dir():
        progress(f"warm start: cached in {target}")
        return target
    try:
        make_once(target, lambda directory: _make(target.name, directory, seed, recipe, progress), progress)
    except OSError as error:
        raise ModelError(f"expected to write the demo's model to {target}, got: {error}; set STREAMRL_CACHE") from error
    return target


def model_directory(cache_dir: Path, seed: int, recipe: WarmStartRecipe | None = None) -> Path:
    """The directory of the warm-started model of a seed, which may not exist yet."""
    return cache_dir / "models" / f"arithmetic-{_fingerprint(recipe or WarmStartRecipe())}-seed{seed}"


def _fingerprint(recipe: WarmStartRecipe) -> str:
    # Everything except the seed that determines the model. If a part were missing, a model that was trained on other
    # data would be used by mistake.
    worked = [Question("*", (52, 7)).worked(" "), Question("+", (82, 20, 58)).worked(" ")]
    parts = [asdict(recipe), MARKS, PRODUCT_SHARE, HELD_OUT_ONE_IN, NUM_PROMPTS, worked]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:10]


def _make(name: str, directory: Path, seed: int, recipe: WarmStartRecipe, progress: Progress) -> None:
    shipped = SHIPPED / name
    if shipped.is_dir():
        unpack(shipped, directory, seed)
        progress("warm start: done before, and shipped with StreamRL")
    else:
        _train(directory, seed, recipe, progress)


def unpack(shipped: Path, directory: Path, seed: int) -> None:
    """Write a shipped model to a new directory as ``write_model`` would, without torch."""
    from safetensors.numpy import load_file, save_file

    shutil.copytree(shipped, directory, ignore=shutil.ignore_patterns(WEIGHTS, EVALUATED, MADE))
    weights = {name: values.astype("float32") for name, values in load_file(shipped / WEIGHTS).items()}
    save_file(weights, directory / WEIGHTS, {"format": "pt"})
    _write_prompts(directory, seed)
    # Other versions of the libraries might sample other answers.
    if json.loads((shipped / MADE).read_text())["libraries"] == libraries():
        write_known(directory, EVALUATION, seed, json.loads((shipped / EVALUATED).read_text()))


def ship(folder: Path, seed: int, recipe: WarmStartRecipe, progress: Progress) -> Path:
    """Train a model, and write it as it is shipped; ``folder``: its parent, in which it is replaced."""
    import torch
    from safetensors.torch import load_file, save_file

    with tempfile.TemporaryDirectory() as scratch:
        made = Path(scratch) / "model"
        made.mkdir()
        torch.set_num_threads(MAX_THREADS)
        evaluated = write_model(made, seed, recipe, progress)
        weights = {name: values.half() for name, values in load_file(made / WEIGHTS).items()}
        save_file(weights, made / WEIGHTS, {"format": "pt"})
        (made / EVALUATED).write_text(json.dumps(evaluated, indent=1) + "\n")
        sha256 = hashlib.sha256((made / WEIGHTS).read_bytes()).hexdigest()
        conditions = {"weights_sha256": sha256, "cpu": device_name("cpu"), "libraries": libraries()}
        (made / MADE).write_text(json.dumps(conditions, indent=1) + "\n")
        for unshipped in (PROMPTS, KNOWN):
            (made / unshipped).unlink()
        target = folder / model_directory(folder, seed, recipe).name
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(made, target)
    return target


def _train(directory: Path, seed: int, recipe: WarmStartRecipe, progress: Progress) -> None:
    directory.mkdir()
    threads = str(min(MAX_THREADS, os.cpu_count() or 1))
    environment = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false"}
    environment["PYTHONWARNINGS"] = "ignore"
    arguments = [str(directory), str(seed), json.dumps(asdict(recipe))]
    # Errors go to a file, because a second pipe would fill up unread, and the child would wait for ever.
    with tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen(
            module_command("streamrl.demo.warm_start", *arguments),
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=os.environ | environment,  # OpenMP and MKL read it once, when torch loads them
            preexec_fn=die_with_parent,
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
            last = (errors.read().strip().splitlines() or [f"exit code {child.returncode} and no output"])[-1]
            raise ModelError(f"expected the warm start of the demo's model to succeed, got: {last}")


def make_once(target: Path, make: Callable[[Path], object], progress: Progress) -> None:
    """Create a directory atomically with ``make``, unless it exists; waits for another process that is making it.

    Raises:
        OSError: the cache cannot be written.
    """
    locks = target.parent.with_name("locks")
    locks.mkdir(parents=True, exist_ok=True)
    with locked(locks / target.name, progress, f"makes {target}"):
        if not target.is_dir():
            with atomic_directory(target) as directory:
                make(directory)


@contextmanager
def atomic_directory(target: Path) -> Iterator[Path]:
    """A scratch directory that is renamed to ``target`` at the end of the block, unless the block raises.

    If another process was faster, its result is kept, since it is the same.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    # In the target's parent, because a rename is atomic only within one file system.
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".making-", ignore_cleanup_errors=True) as scratch:
        directory = Path(scratch) / "model"
        yield directory
        # A rename onto a directory that is not empty fails, so a model that is in use is never replaced.
        try:
            directory.rename(target)
        except OSError:
            if not target.is_dir():
                raise


def main(directory: str = "", seed: str = "0", recipe: str = "{}") -> None:
    """The child process: ``recipe`` is JSON; progress goes to standard output, line by line.

    Without a directory, it makes the model that is shipped.
    """
    from transformers.utils import logging

    logging.disable_progress_bar()
    parsed, progress = TypeAdapter(WarmStartRecipe).validate_json(recipe), partial(print, flush=True)
    if directory:
        write_model(Path(directory), int(seed), parsed, progress)
    else:
        progress(f"written: {ship(SHIPPED, int(seed), parsed, progress)}")


def write_model(directory: Path, seed: int, recipe: WarmStartRecipe, progress: Progress) -> dict[str, Any]:
    """Warm-start a model and write it with prompts and a model card; returns its evaluation on held-out questions."""
    done = warm_start(recipe, seed, progress)
    done.model.half().float()  # so that a shipped model is the same as one that was made here
    save(done.model, directory)
    evaluated = evaluate(directory, seed)
    metrics = evaluated["metrics"]
    progress(f"warm start: done, {metrics['sampled_accuracy']:.3f} of sampled answers are correct (held-out questions)")
    _write_prompts(directory, seed)
    (directory / "MODEL_CARD.md").write_text(_card(done, seed, recipe, metrics))
    write_known(directory, EVALUATION, seed, evaluated)
    return evaluated


def _write_prompts(directory: Path, seed: int) -> None:
    rows = training_prompts(seed, NUM_PROMPTS)
    (directory / PROMPTS).write_text("".join(json.dumps(row) + "\n" for row in rows))


def _card(done: WarmStarted, seed: int, recipe: WarmStartRecipe, metrics: Mapping[str, float]) -> str:
    size = sum(parameter.numel() for parameter in done.model.parameters())
    measured = "\n".join(f"| {name} | {value} |" for name, value in metrics.items())
    return f"""# StreamRL demo policy, warm-started

A Qwen2 model of {size:,} parameters, initialized at random and trained by StreamRL on solutions that it made up.

- Task: sums of three or four two-digit numbers, and products of a two-digit number and a digit. One question in
  {HELD_OUT_ONE_IN} is held out, chosen by operator and numbers regardless of their order.
- Tokenizer: one token per character.
- Warm start: {done.steps} steps of AdamW on batches of {recipe.batch_size} correct solutions, seed {seed}.
  {recipe.bare_share:.0%} of them are bare answers. The rest are worked out in steps, with a space, a line break or a
  semicolon before each step.
- Metrics before reinforcement learning, on held-out questions. `accuracy` and `greedy_share_worked` are for greedy
  solutions, the others for solutions sampled at temperature 1:

| metric | value |
|---|---|
{measured}

The model is only meant as a start for reinforcement learning.
"""


def warm_start(recipe: WarmStartRecipe, seed: int, progress: Progress) -> WarmStarted:
    """Train a model on correct solutions in both styles; the same for the same seed and number of threads."""
    import torch

    tokenizer = build_tokenizer()
    model = build_model(recipe.shape, seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.learning_rate, betas=(0.9, recipe.adam_beta2), weight_decay=0.0
    )
    training = lessons(f"{_LESSONS}/{seed}", recipe.bare_share)
    checks = list(islice(lessons(f"{_CHECKS}/{seed}", recipe.bare_share), recipe.num_checked))
    loss, started_at = 0.0, time.monotonic()
    for step in range(1, recipe.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate_at(step)
        loss = train_step(model, optimizer, tokenizer, list(islice(training, recipe.batch_size)), recipe.max_grad_norm)
        if step % recipe.check_every == 0:
            correct = _share_correct(model, tokenizer, checks)
            line = f"step {step} of {recipe.steps}, {time.monotonic() - started_at:.0f} s, loss {loss:.2f}"
            progress(f"warm start: {line}, share of correct solutions {correct:.2f}")
    return WarmStarted(model, recipe.steps, loss)


def lessons(seed: int | str, bare_share: float) -> Iterator[Lesson]:
    """Endless training questions, each with a correct solution; the same for the same seed."""
    draw = random.Random(f"styles/{seed}")
    for question in training_questions(seed):
        is_bare = draw.random() < bare_share
        yield question.text, question.answer if is_bare else question.worked(draw.choice(MARKS))


def train_step(
    model: Any, optimizer: Any, tokenizer: Any, lesson: Sequence[Lesson], max_grad_norm: float = 1.0
) -> float:
    """One optimizer step; returns the mean loss per trained token."""
    import torch

    model.train()
    optimizer.zero_grad()
    # Bare and worked solutions go into separate batches: a bare one would be padded to three times its length.
    longest_first = sorted(lesson, key=lambda pair: -sum(map(len, pair)))
    half = (len(lesson) + 1) // 2
    batches = [_batch(tokenizer, part) for part in (longest_first[:half], longest_first[half:]) if part]
    trained = sum(int((batch["labels"] != IGNORED).sum()) for batch in batches)
    total = 0.0
    for batch in batches:
        loss = _summed_loss(model, batch) / trained
        loss.backward()
        total += float(loss.item())
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
    optimizer.step()
    return total


def _summed_loss(model: Any, batch: dict[str, Any]) -> Any:
    """Summed cross entropy of the solutions' tokens, in nats. A causal model needs no mask for right padding."""
    import torch

    logits = model(input_ids=batch["input_ids"], use_cache=False).logits[:, :-1]  # [B, S - 1, V]
    labels = batch["labels"][:, 1:]  # [B, S - 1], shifted here by hand
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum"
    )


def _batch(tokenizer: Any, lesson: Sequence[Lesson]) -> dict[str, Any]:
    """``input_ids`` and ``labels``, int64 [B, S], right padded; labels are set on the solution and its end token."""
    import torch

    questions = tokenizer([question for question, _ in lesson])["input_ids"]
    solutions = tokenizer([solution + EOS for _, solution in lesson])["input_ids"]
    width = max(len(question) + len(solution) for question, solution in zip(questions, solutions, strict=True))
    ids = torch.full((len(lesson), width), tokenizer.pad_token_id)
    labels = torch.full((len(lesson), width), IGNORED)
    for row, (question, solution) in enumerate(zip(questions, solutions, strict=True)):
        end = len(question) + len(solution)
        ids[row, :end] = torch.tensor(question + solution)
        labels[row, len(question) : end] = torch.tensor(solution)
    return {"input_ids": ids, "labels": labels}


def _share_correct(model: Any, tokenizer: Any, checks: Sequence[Lesson]) -> float:
    """Share of solutions in which every character but the first is the most likely one after those before it."""
    import torch

    model.eval()
    batch = _batch(tokenizer, checks)
    with torch.no_grad():
        likeliest = model(input_ids=batch["input_ids"], use_cache=False).logits[:, :-1].argmax(-1)
    labels = batch["labels"][:, 1:]  # [B, S - 1]
    # The first character chooses the style, and both styles are correct.
    first = torch.cumsum(labels != IGNORED, dim=1) == 1
    return float(((likeliest == labels) | (labels == IGNORED) | first).all(dim=1).float().mean())


def build_model(shape: ModelShape, seed: int) -> Any:
    """A ``Qwen2ForCausalLM`` in float32 with random weights; the same for the same seed."""
    import torch
    from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

    tokenizer = build_tokenizer()
    eos, pad = tokenizer.convert_tokens_to_ids([EOS, PAD])
    config = Qwen2Config(
        **vars(shape), tie_word_embeddings=False, bos_token_id=None, eos_token_id=eos, pad_token_id=pad, dtype="float32"
    )
    # The caller's random state does not change. No devices are listed, because weights are drawn on the CPU.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=eos, pad_token_id=pad)
    return model


def save(model: Any, directory: Path) -> None:
    """Write model and tokenizer to a directory that ``from_pretrained`` and vLLM can load."""
    model.save_pretrained(directory)
    build_tokenizer().save_pretrained(directory)


if __name__ == "__main__":
    main(*sys.argv[1:])
