"""`streamrl init`: writes the files of an example into a directory, without overwriting any.

An example consists of commented settings, prompts and rewards. The comments are the descriptions of the settings, so
that they stay up to date.
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
"""Columns of the configuration file: a longer comment goes above its line."""

_ABOUT_REWARDS = '''"""Rewards with TRL's signature: they take lists and return a number or None for each completion.

Every column of your data is an argument of the same name. Rewards run in a separate process. If a reward raises or
takes longer than rewards.timeout_s, only that completion has no reward, and the run continues.
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
    """The share of the answer's digits that are in the right place in the completion's last number."""
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
    """1 for one number between answer tags at the end of the completion, whether it is correct or not."""
    texts = [one if isinstance(one, str) else one[0]["content"] for one in completions]
    return [float(len(TAGS.findall(text)) == 1 and text.rstrip().endswith("</answer>")) for text in texts]
'''
)


@dataclass(frozen=True)
class Entry:
    """One setting. ``comment`` None: the setting's description; not ``active``: written as a comment, not set."""

    key: str
    value: Any
    comment: str | None = None
    active: bool = True


@dataclass(frozen=True)
class Example:
    """Contents of an example's files; an empty file is not written.

    ``model`` makes or finds a model, which is then copied into the directory; None: no model is copied.
    """

    entries: tuple[Entry, ...]
    head: tuple[str, ...]
    rewards: str
    prompts: str
    model: Callable[[Progress], Path] | None = None


def write_example(directory: Path, name: ExampleName, progress: Progress, *, if_missing: bool = False) -> list[Path]:
    """Write the example's configuration, prompts, rewards and model; returns the paths that were written.

    ``if_missing``: existing files are kept, and if the configuration exists nothing is written. The configuration is
    written last and each file atomically, so calling this again completes a start that was killed.

    Raises:
        UserError: a file exists already, or the directory cannot be written.
    """
    if if_missing and (directory / CONFIG).exists():
        return []
    made = example(name, plain_run_name(directory))
    contents = {CONFIG: as_commented_toml(made.head, made.entries), PROMPTS: made.prompts, REWARDS: made.rewards}
    contents = {file: text for file, text in contents.items() if text}
    written = [directory / file for file in contents]
    if made.model is not None:
        written.append(directory / MODEL_DIRECTORY)
    # Checked before the first file is written, so that a refusal leaves nothing half done.
    for path in written:
        if path.exists() and not if_missing:
            raise UserError(f"expected to write {path}, which exists already; name another directory or remove it")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory, prefix=".making-", ignore_cleanup_errors=True) as scratch:
            new = Path(scratch)
            # The model goes first, because it takes long and may fail: existing files would make a retry refuse.
            if made.model is not None:
                # Copied, because all runs share the cache and it may be deleted at any time. Only contents are copied,
                # not modes: the cached files are private to their owner, and another user may train the task, as in a
                # container.
                shutil.copytree(made.model(progress), new / MODEL_DIRECTORY, copy_function=shutil.copyfile)
            for file, text in contents.items():
                (new / file).write_text(text)
            for path in reversed(written):
                if not path.exists():
                    (new / path.relative_to(directory)).rename(path)
    except OSError as error:
        raise UserError(f"expected a writable directory, got {directory}: {error.strerror}") from error
    return written


def _warm_started(progress: Progress) -> Path:
    from streamrl.bus.embedded.runtime import cache_root
    from streamrl.demo.warm_start import ensure_warm_started_model

    return ensure_warm_started_model(cache_root(), 0, progress)


def as_commented_toml(head: Sequence[str], entries: Sequence[Entry]) -> str:
    """A TOML text with the entries by section, in their order; a long comment goes above its line."""
    lines = [f"# {line}" for line in head]
    # TOML allows each table only once, so entries of one section are grouped.
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
    # The library writes each value of an array on its own line; these arrays are short and fit on one.
    setting = ("" if entry.active else "# ") + tomli_w.dumps({name: entry.value}, indent=0).replace(",\n", ", ")
    setting = setting.replace("[\n", "[").replace(", ]", "]").strip()
    comment = description_of(tuple(entry.key.split("."))) if entry.comment is None else entry.comment
    line = f"{setting:<40} # {comment}"
    if len(line) <= WIDTH:
        return [line]
    return [*(f"# {line}" for line in _wrapped(comment)), setting]


def _wrapped(text: str) -> list[str]:
    lines = [""]  # ``WIDTH - 4`` leaves room for the comment mark and for the space before the next word
    for word in text.split():
        if len(lines[-1]) + len(word) > WIDTH - 4:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".lstrip()
    return lines


def example(name: ExampleName, run: str) -> Example:
    """The example of this name, for a run named ``run``."""
    made = {"math": _math, "tiny": _tiny, "demo": _demo, "calculator": _calculator, "smollm2": _smollm2}
    return made[name](run)


def _math(run: str) -> Example:
    head = (
        "Your task. Put your prompts into prompts.jsonl and your rewards into my_rewards.py, then:",
        f"    streamrl run --dry-run {CONFIG}     # checks everything and starts nothing",
        f"    streamrl run {CONFIG}",
        "All settings: streamrl config show; one setting: streamrl config explain loop.max_staleness",
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
        "A task for a first trial, offline and in minutes on a CPU: a tiny model learns to work out sums.",
        f"    streamrl run --dry-run {CONFIG}     # checks everything and starts nothing",
        f"    streamrl run {CONFIG}",
    )
    entries = (
        Entry("run.name", run),
        Entry("run.workers", 2, "generation workers on this machine; more may join from elsewhere"),
        Entry("model.path", MODEL_DIRECTORY, "a character model of a million parameters, next to this file"),
        Entry("data.path", PROMPTS, "one object per line: prompt, answer, and other columns that the rewards need"),
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
    """The task of `streamrl demo`, as files."""
    from streamrl.demo.recipe import defaults
    from streamrl.demo.task import training_prompts
    from streamrl.demo.warm_start import NUM_PROMPTS as NUM_DEMO_PROMPTS

    head = (
        "The demo as a task: a tiny model learns to work out sums step by step, offline and in minutes on a CPU.",
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
        Entry("model.path", MODEL_DIRECTORY, "a character model of a million parameters, next to this file"),
        Entry("data.path", PROMPTS, "sums and products, without those of the evaluation"),
        *(Entry(key, value) for key, value in recipe.items() if key != "run.name"),
    )
    return Example(entries, head, "", _jsonl(training_prompts(0, NUM_DEMO_PROMPTS)), model=_warm_started)


def _calculator(run: str) -> Example:
    """The demo's questions as a task of several turns: an environment replaces prompts and rewards."""
    from streamrl.demo.task import BUCKET_BOUNDARIES

    head = (
        "A task of several turns, offline and in minutes on a CPU: a tiny model learns to leave sums to a calculator.",
        f"    streamrl run --dry-run {CONFIG}     # checks everything and starts nothing",
        f"    streamrl run {CONFIG}",
        "To look at its turns: streamrl ui; then streamrl show TRAJECTORY --run NAME",
    )
    entries = (
        Entry("run.name", run),
        Entry("run.workers", 1, "generation workers on this machine; more may join from elsewhere"),
        Entry("model.path", MODEL_DIRECTORY, "a character model of a million parameters, next to this file"),
        Entry("data.requests_only", True, "no prompts: only the sessions of the environments are trained"),
        Entry("gateway.enabled", True, "the environments sample through the gateway; you can send requests, too"),
        Entry("gateway.port", 8000),
        Entry("environments.names", ["calculator"], "or guess, python, verifiers:..., or your own my_game:Game"),
        Entry("environments.max_turns", 6, "three sums and the answer, and two more for mistakes"),
        # The two lengths add up to the model's positions; all turns but the last must fit into a prompt.
        *_loop(groups_per_step=16, max_prompt_length=96, max_completion_length=32, boundaries=list(BUCKET_BOUNDARIES)),
        *_machine(token_budget=4096),
        Entry("algorithm.scale_rewards", "none"),
        *_learning(max_steps=60, learning_rate=2e-4, checkpoint_every=30),
        Entry("training.threads", 1),
    )
    return Example(entries, head, "", "", model=_warm_started)


def _smollm2(run: str) -> Example:
    from streamrl.init.precision import faster_dtype
    from streamrl.init.smollm2 import ANSWER_PATTERN, MAX_COMPLETION_TOKENS, ensure_smollm2, rows

    dtype, measured = faster_dtype(), "the faster of float32 and bfloat16 on this processor, as measured"
    head = (
        "SmolLM2-135M-Instruct learns sums of two or three one-digit numbers, offline, on two CPU cores.",
        f"    streamrl run --dry-run {CONFIG}     # checks everything and starts nothing",
        f"    streamrl run {CONFIG}",
    )
    entries = (
        Entry("run.name", run),
        Entry("run.workers", 1, "generation workers on this machine; more may join from elsewhere"),
        Entry("model.path", MODEL_DIRECTORY, "SmolLM2-135M-Instruct in bfloat16, next to this file"),
        Entry("data.path", PROMPTS, "chat turns: two solved sums as examples, then the question"),
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
        Entry("training.packing", "shared", "a group's prompt, most of its tokens here, is computed once"),
        Entry("training.dtype", dtype, measured),
        Entry("generation.dtype", dtype, measured),
        Entry(
            "evaluation.function", "streamrl.init.smollm2:evaluate_held_out", "on 256 questions that are not trained"
        ),
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
        Entry("kafka.bootstrap_servers", "host:9092", "your broker; without one, the run starts Kafka", active=False),
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
    # Non-ASCII letters are not escaped, because people read and edit the file.
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _sums() -> list[dict[str, Any]]:
    """Word problems that differ in their numbers, with computed answers."""
    rows = []
    for number in range(64):
        # 7, 11 and 4 have no common divisor, so the 64 problems differ. At most 5 of at least 2 * 3 apples are eaten.
        boxes, apples, eaten = 2 + number % 7, 3 + number % 11, 2 + number % 4
        text = (
            f"There are {boxes} boxes with {apples} apples each. {eaten} apples are eaten. How many apples are left? "
            "Put the final answer in \\boxed{}."
        )
        rows.append({"prompt": text, "answer": str(boxes * apples - eaten)})
    return rows


def _questions() -> list[dict[str, Any]]:
    from streamrl.demo.task import training_prompts

    # Only training questions: held-out ones are for evaluations.
    return training_prompts(0, NUM_PROMPTS)
