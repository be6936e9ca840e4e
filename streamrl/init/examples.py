"""`streamrl init`: writes the files of an example into a directory, and never over a file that is there.

An example is settings with comments, prompts and rewards; the comments are the settings' own descriptions, so that they
stay true when those change.
"""

import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import tomli_w

from streamrl.schemas.errors import UserError
from streamrl.settings.explaining import description_of
from streamrl.settings.run_directory import plain_run_name

Progress = Callable[[str], None]
ExampleName = Literal["math", "tiny", "demo", "calculator", "smollm2"]
MODEL_DIRECTORY = "./model"
CONFIG, PROMPTS, REWARDS = "streamrl.toml", "prompts.jsonl", "my_rewards.py"
NUM_PROMPTS = 512
WIDTH = 112
"""Columns of the configuration: longer comments stand above their line."""

_ABOUT_REWARDS = '''"""Rewards in TRL's signature: lists in, one number for each completion out, or None.

Every column of your data comes as an argument of its name. A reward runs in a process of its own; when it raises or
takes longer than rewards.timeout_s, that one completion has no reward, and the run goes on.
"""

'''
MATH_REWARDS = (
    _ABOUT_REWARDS
    + '''
def brief(completions, **kwargs):
    """1 for an empty completion, 0 for one of 1000 characters or more."""
    texts = [one if isinstance(one, str) else one[0]["content"] for one in completions]
    return [max(0.0, 1.0 - len(text) / 1000) for text in texts]
'''
)
TINY_REWARDS = (
    _ABOUT_REWARDS
    + '''
import re


def digits_right(completions, answer, **kwargs):
    """The share of the answer's digits that the completion's last number has right, in their places."""
    return [_share(re.findall(r"[0-9]+", text), expected) for text, expected in zip(completions, answer)]


def _share(numbers, expected):
    if not numbers or len(numbers[-1]) != len(expected):
        return 0.0
    return sum(got == right for got, right in zip(numbers[-1], expected)) / len(expected)
'''
)
SMOLLM2_REWARDS = (
    _ABOUT_REWARDS
    + r'''
import re

TAGS = re.compile(r"<answer>\s*-?\d+\s*</answer>")


def in_tags(completions, **kwargs):
    """1 for one number between answer tags and nothing after it, right or wrong."""
    texts = [one if isinstance(one, str) else one[0]["content"] for one in completions]
    return [float(len(TAGS.findall(text)) == 1 and text.rstrip().endswith("</answer>")) for text in texts]
'''
)


@dataclass(frozen=True)
class Entry:
    """One setting; ``comment`` None: its description; not ``active``: shown, but left at its default."""

    key: str
    value: Any
    comment: str | None = None
    active: bool = True


@dataclass(frozen=True)
class Example:
    """Contents of the files, of which an empty one is not written; ``model``: makes or finds the one that is copied
    into the directory, if one is.
    """

    entries: tuple[Entry, ...]
    head: tuple[str, ...]
    rewards: str
    prompts: str
    model: Callable[[Progress], Path] | None = None


def write_example(directory: Path, name: ExampleName, progress: Progress, *, if_missing: bool = False) -> list[Path]:
    """Write configuration, prompts, rewards and the model, as far as the example has them; returns what was written.

    ``if_missing``: what is there is kept, and with a configuration nothing is missing: it is written last, and each
    file appears whole, so that a start that was killed can be made up for.

    Raises:
        UserError: a file is there already, or the directory cannot be written.
    """
    if if_missing and (directory / CONFIG).exists():
        return []
    made = example(name, plain_run_name(directory))
    contents = {CONFIG: as_commented_toml(made.head, made.entries), PROMPTS: made.prompts, REWARDS: made.rewards}
    contents = {file: text for file, text in contents.items() if text}
    written = [directory / file for file in contents]
    if made.model is not None:
        written.append(directory / MODEL_DIRECTORY)
    # All of them before the first is written, so that a refusal leaves nothing half done.
    for path in written:
        if path.exists() and not if_missing:
            raise UserError(f"expected to write {path}, which is there already; name another directory or remove it")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory, prefix=".making-", ignore_cleanup_errors=True) as scratch:
            new = Path(scratch)
            # First, for it takes long and may fail: files that are there already would make the next attempt refuse.
            if made.model is not None:
                # A copy: the cache is every run's, and may be deleted at any time. Of contents only: a library leaves
                # its files to their owner alone, and a task may be trained by another user, as in a container.
                shutil.copytree(made.model(progress), new / MODEL_DIRECTORY, copy_function=shutil.copyfile)
            for file, text in contents.items():
                (new / file).write_text(text)
            for path in reversed(written):
                if not path.exists():
                    (new / path.relative_to(directory)).rename(path)
    except OSError as error:
        raise UserError(f"expected a directory that can be written, got {directory}: {error.strerror}") from error
    return written


def _warm_started(progress: Progress) -> Path:
    from streamrl.bus.embedded.runtime import cache_root
    from streamrl.demo.warm_start import ensure_warm_started_model

    return ensure_warm_started_model(cache_root(), 0, progress)


def as_commented_toml(head: Sequence[str], entries: Sequence[Entry]) -> str:
    """The entries by section, in their order; long comments stand above their line."""
    lines = [f"# {line}" for line in head]
    # TOML takes each table once only, so entries of one section are brought together.
    sections: dict[str, list[Entry]] = {}
    for entry in entries:
        sections.setdefault(entry.key.split(".")[0], []).append(entry)
    for section, members in sections.items():
        lines += ["", f"[{section}]"]
        for entry in members:
            lines += _lines(entry)
    return "\n".join(lines) + "\n"


def _lines(entry: Entry) -> list[str]:
    name = entry.key.split(".", 1)[1]
    # The library breaks an array into a line for each value; ours are short, and go back into one.
    setting = ("" if entry.active else "# ") + tomli_w.dumps({name: entry.value}, indent=0).replace(",\n", ", ")
    setting = setting.replace("[\n", "[").replace(", ]", "]").strip()
    comment = description_of(tuple(entry.key.split("."))) if entry.comment is None else entry.comment
    together = f"{setting:<40} # {comment}"
    if len(together) <= WIDTH:
        return [together]
    return [*(f"# {line}" for line in _wrapped(comment)), setting]


def _wrapped(text: str) -> list[str]:
    lines = [""]  # ``WIDTH - 4`` leaves room for the mark of a comment and for the blank before the next word
    for word in text.split():
        if len(lines[-1]) + len(word) > WIDTH - 4:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".lstrip()
    return lines


def example(name: ExampleName, run: str) -> Example:
    """One of the examples, for a run of that name."""
    made = {"math": _math, "tiny": _tiny, "demo": _demo, "calculator": _calculator, "smollm2": _smollm2}
    return made[name](run)


def _math(run: str) -> Example:
    head = (
        "A task of your own. Put your prompts into prompts.jsonl and your rewards into my_rewards.py, then:",
        f"    streamrl run --dry-run {CONFIG}     # checks everything and starts nothing",
        f"    streamrl run {CONFIG}",
        "Every setting: streamrl config show; one of them: streamrl config explain loop.max_staleness",
    )
    data = (
        Entry("data.path", PROMPTS, "or parquet, csv, a directory, a hub data set such as 'openai/gsm8k'"),
        Entry("data.subset", "main", "configuration of a hub data set", active=False),
        Entry("data.split", "train", active=False),
        Entry("data.format", "trl", active=False),
        Entry("data.prompt_column", "question", active=False),
        Entry("data.answer_column", "solution", active=False),
        Entry("data.conversational", True, "a text prompt becomes a user turn in the model's chat template"),
        Entry("data.system_prompt", "Think step by step.", active=False),
    )
    rewards = (
        Entry("rewards.functions", ["math_verify", "my_rewards:brief"]),
        Entry("rewards.weights", [1.0, 0.1]),
        Entry("rewards.answer_pattern", "<answer>(.*?)</answer>", active=False),
    )
    entries = (
        Entry("run.name", run),
        Entry("run.workers", 1, "generation workers on this machine; more may join from elsewhere"),
        Entry("model.path", "Qwen/Qwen2.5-0.5B-Instruct", "anything AutoModelForCausalLM loads: hub id or directory"),
        *data,
        *rewards,
        *_loop(groups_per_step=16, max_prompt_length=512, max_completion_length=512, boundaries=[64, 128, 256]),
        *_machine(token_budget=8192),
        *_learning(max_steps=200, learning_rate=1e-6, checkpoint_every=50),
    )
    return Example(entries, head, MATH_REWARDS, _jsonl(_sums()))


def _tiny(run: str) -> Example:
    from streamrl.demo.task import ANSWER_PATTERN, BUCKET_BOUNDARIES, MAX_COMPLETION_TOKENS, MAX_PROMPT_TOKENS

    head = (
        "A task to try everything with, offline and in minutes on a CPU: a tiny model learns to work sums out.",
        f"    streamrl run --dry-run {CONFIG}     # checks everything and starts nothing",
        f"    streamrl run {CONFIG}",
    )
    entries = (
        Entry("run.name", run),
        Entry("run.workers", 2, "generation workers on this machine; more may join from elsewhere"),
        Entry("model.path", MODEL_DIRECTORY, "a character model of a million parameters, beside this file"),
        Entry("data.path", PROMPTS, "one object a line: prompt, answer, and whatever the rewards ask for"),
        Entry("rewards.functions", ["exact_match", "my_rewards:digits_right"]),
        Entry("rewards.answer_pattern", ANSWER_PATTERN, "the last number of a completion is its answer"),
        *_loop(
            groups_per_step=16,
            max_prompt_length=MAX_PROMPT_TOKENS,
            max_completion_length=MAX_COMPLETION_TOKENS,
            boundaries=list(BUCKET_BOUNDARIES),
        ),
        *_machine(token_budget=4096),
        Entry("algorithm.scale_rewards", "none"),
        *_learning(max_steps=100, learning_rate=2e-4, checkpoint_every=50),
        Entry("training.threads", 1),
    )
    return Example(entries, head, TINY_REWARDS, _jsonl(_questions()), model=_warm_started)


def _demo(run: str) -> Example:
    """What `streamrl demo` trains, as files."""
    from streamrl.demo.recipe import defaults
    from streamrl.demo.task import training_prompts
    from streamrl.demo.warm_start import NUM_PROMPTS as NUM_DEMO_PROMPTS

    head = (
        "The demo as a task: a tiny model finds out that working sums out pays, offline and in minutes on a CPU.",
        f"    streamrl run --dry-run {CONFIG}     # checks everything and starts nothing",
        f"    streamrl run {CONFIG}",
    )
    recipe = {
        f"{section}.{key}": value
        for section, keys in defaults("transformers", 0).items()
        for key, value in keys.items()
    }
    entries = (
        Entry("run.name", run),
        Entry("model.path", MODEL_DIRECTORY, "a character model of a million parameters, beside this file"),
        Entry("data.path", PROMPTS, "sums and products; those of the evaluation are not among them"),
        *(Entry(key, value) for key, value in recipe.items() if key != "run.name"),
    )
    return Example(entries, head, "", _jsonl(training_prompts(0, NUM_DEMO_PROMPTS)), model=_warm_started)


def _calculator(run: str) -> Example:
    """The demo's questions as a task of several turns: an environment takes the place of prompts and rewards."""
    from streamrl.demo.task import BUCKET_BOUNDARIES

    head = (
        "A task of several turns, offline and in minutes on a CPU: a tiny model learns to leave sums to a calculator.",
        f"    streamrl run --dry-run {CONFIG}     # checks everything and starts nothing",
        f"    streamrl run {CONFIG}",
        "What came of its turns: streamrl audit, streamrl ui, streamrl show TRAJECTORY",
    )
    entries = (
        Entry("run.name", run),
        Entry("run.workers", 1, "generation workers on this machine; more may join from elsewhere"),
        Entry("model.path", MODEL_DIRECTORY, "a character model of a million parameters, beside this file"),
        Entry("data.requests_only", True, "no prompts: what the environments play is all that is trained"),
        Entry("gateway.enabled", True, "the door through which they are played, and through which you may ask, too"),
        Entry("gateway.port", 8000),
        Entry("environments.names", ["calculator"], "or guess, python, verifiers:..., or my_game:Game of your own"),
        Entry("environments.max_turns", 6, "three sums and the answer, and room for mistakes"),
        # Both together are the model's positions; all turns but the last have to fit into a prompt.
        *_loop(groups_per_step=16, max_prompt_length=96, max_completion_length=32, boundaries=list(BUCKET_BOUNDARIES)),
        *_machine(token_budget=4096),
        Entry("algorithm.scale_rewards", "none"),
        *_learning(max_steps=60, learning_rate=2e-4, checkpoint_every=30),
        Entry("training.threads", 1),
    )
    return Example(entries, head, "", "", model=_warm_started)


def _smollm2(run: str) -> Example:
    from streamrl.init.smollm2 import ANSWER_PATTERN, MAX_COMPLETION_TOKENS, ensure_smollm2, rows

    head = (
        "SmolLM2-135M-Instruct learns sums of two or three digits, offline, on two CPU cores.",
        f"    streamrl run --dry-run {CONFIG}     # checks everything and starts nothing",
        f"    streamrl run {CONFIG}",
    )
    entries = (
        Entry("run.name", run),
        Entry("run.workers", 1, "generation workers on this machine; more may join from elsewhere"),
        Entry("run.watchdog_s", 600.0, "one step of the trainer may take minutes on a busy machine"),
        Entry("model.path", MODEL_DIRECTORY, "SmolLM2-135M-Instruct in bfloat16, beside this file"),
        Entry("data.path", PROMPTS, "chat turns: two solved sums are shown, then one is asked"),
        Entry("rewards.functions", ["math_verify", "my_rewards:in_tags"]),
        Entry("rewards.weights", [1.0, 0.2]),
        Entry("rewards.answer_pattern", ANSWER_PATTERN),
        *_loop(
            groups_per_step=4, max_prompt_length=128, max_completion_length=MAX_COMPLETION_TOKENS, boundaries=[18, 22]
        ),
        *_machine(token_budget=2048),
        Entry("algorithm.scale_rewards", "none"),
        *_learning(max_steps=100, learning_rate=1e-5, checkpoint_every=50),
        Entry("training.warmup_steps", 5),
        Entry("training.threads", 2, "the trainer has ten times the worker's work"),
        Entry("training.dtype", "bfloat16", "the trainer's own weights are float32"),
        Entry("evaluation.function", "streamrl.init.smollm2:evaluate_held_out", "256 questions that are in no prompt"),
    )
    prompts = list(islice(rows(0, held_out=False), NUM_PROMPTS))
    return Example(entries, head, SMOLLM2_REWARDS, _jsonl(prompts), model=ensure_smollm2)


def _loop(
    *, groups_per_step: int, max_prompt_length: int, max_completion_length: int, boundaries: list[int]
) -> tuple[Entry, ...]:
    return (
        Entry("loop.groups_per_step", groups_per_step),
        Entry("loop.num_generations", 8),
        Entry("loop.mode", "trajectory_async", active=False),
        Entry("loop.max_staleness", 3),
        Entry("loop.max_prompt_length", max_prompt_length),
        Entry("loop.max_completion_length", max_completion_length),
        Entry("loop.bucket_boundaries", boundaries),
        Entry("loop.temperature", 1.0, active=False),
    )


def _machine(*, token_budget: int) -> tuple[Entry, ...]:
    return (
        Entry("generation.engine", "transformers", "transformers is built in; vllm needs requirements-vllm.txt"),
        Entry("generation.max_num_seqs", 64),
        Entry("batching.token_budget", token_budget),
        Entry(
            "kafka.bootstrap_servers", "host:9092", "your broker; without one, Kafka itself is started", active=False
        ),
    )


def _learning(*, max_steps: int, learning_rate: float, checkpoint_every: int) -> tuple[Entry, ...]:
    return (
        Entry("algorithm.name", "grpo", active=False),
        Entry("algorithm.loss_type", "dapo", active=False),
        Entry("algorithm.beta", 0.0, active=False),
        Entry("training.max_steps", max_steps),
        Entry("training.learning_rate", learning_rate),
        Entry("training.checkpoint_every", checkpoint_every),
        Entry("training.device", "auto", active=False),
    )


def _jsonl(rows: Sequence[dict[str, Any]]) -> str:
    # Letters as they are, since the file is there to be read and edited.
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _sums() -> list[dict[str, Any]]:
    """Word problems that differ in their numbers; the answers are computed, not written down."""
    rows = []
    for number in range(64):
        # 7, 11 and 4 have no common divisor, so no two of 64 problems are alike; and at most 5 of at least 2 * 3 apples
        # are eaten.
        boxes, apples, eaten = 2 + number % 7, 3 + number % 11, 2 + number % 4
        text = (
            f"There are {boxes} boxes with {apples} apples each. {eaten} apples are eaten. How many apples are left? "
            "Put the final answer in \\boxed{}."
        )
        rows.append({"prompt": text, "answer": str(boxes * apples - eaten)})
    return rows


def _questions() -> list[dict[str, Any]]:
    from streamrl.demo.task import training_prompts

    # Training questions only: held-out ones stay for an evaluation.
    return training_prompts(0, NUM_PROMPTS)
