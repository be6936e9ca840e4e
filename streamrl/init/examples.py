"""`streamrl init`: writes the files of an example into a directory, and never over a file that is there.

An example is settings with comments, prompts and rewards; the comments are the settings' own descriptions, so that they
stay true when those change.
"""

import json
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tomli_w

from schemas.errors import UserError
from settings.explaining import description_of

Progress = Callable[[str], None]
ExampleName = Literal["math", "tiny"]
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
def letters_right(completions, answer, **kwargs):
    """The share of the answer's letters that are right, before the first wrong one."""
    return [_common(text, expected) / len(expected) for text, expected in zip(completions, answer)]


def _common(text, expected):
    right = 0
    while right < min(len(text), len(expected)) and text[right] == expected[right]:
        right += 1
    return right
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
    """Contents of the files; ``needs_model``: a tiny model has to be put into the directory as well."""

    entries: tuple[Entry, ...]
    head: tuple[str, ...]
    rewards: str
    prompts: str
    needs_model: bool


def write_example(directory: Path, name: ExampleName, progress: Progress) -> list[Path]:
    """Write configuration, prompts, rewards and, for the tiny example, the model; returns what was written.

    Raises:
        UserError: a file is there already, or the directory cannot be written.
    """
    made = example(name, plain_run_name(directory))
    contents = {
        CONFIG: as_commented_toml(made.head, made.entries),
        PROMPTS: made.prompts,
        REWARDS: made.rewards,
    }
    written = [directory / file for file in contents]
    if made.needs_model:
        written.append(directory / MODEL_DIRECTORY)
    # All of them before the first is written, so that a refusal leaves nothing half done.
    for path in written:
        if path.exists():
            raise UserError(f"expected to write {path}, which is there already; name another directory or remove it")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        # First, for it takes long and may fail: files that are there already would make the next attempt refuse.
        if made.needs_model:
            _put_model(directory / MODEL_DIRECTORY, progress)
        for file, text in contents.items():
            with (directory / file).open("x") as opened:  # fails if the file came since it was looked for
                opened.write(text)
    except OSError as error:
        raise UserError(f"expected a directory that can be written, got {directory}: {error.strerror}") from error
    return written


def _put_model(target: Path, progress: Progress) -> None:
    from bus.embedded.runtime import cache_root
    from streamrl.demo.warm_start import ensure_warm_started_model

    # A copy: the cache is every run's, and may be deleted at any time.
    shutil.copytree(ensure_warm_started_model(cache_root(), 0, progress), target)


def plain_run_name(directory: Path) -> str:
    """The directory's name as a run may be called."""
    plain = re.sub(r"[^a-z0-9._-]+", "-", directory.absolute().resolve().name.lower()).strip("._-")
    return plain[:64] or "my-run"


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
    return _tiny(run) if name == "tiny" else _math(run)


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
        *_machine(engine="transformers", max_num_seqs=64, token_budget=8192),
        *_learning(max_steps=200, learning_rate=1e-6, checkpoint_every=50),
    )
    return Example(entries, head, MATH_REWARDS, _jsonl(_sums()), needs_model=False)


def _tiny(run: str) -> Example:
    from streamrl.demo.task import MAX_COMPLETION_TOKENS

    head = (
        "A task to try everything with, offline and in minutes on a CPU: a tiny model learns to spell words backward.",
        f"    streamrl run --dry-run {CONFIG}     # checks everything and starts nothing",
        f"    streamrl run {CONFIG}",
    )
    entries = (
        Entry("run.name", run),
        Entry("run.workers", 2, "generation workers on this machine; more may join from elsewhere"),
        Entry("model.path", MODEL_DIRECTORY, "a character model of a million parameters, beside this file"),
        Entry("data.path", PROMPTS, "one object a line: prompt, answer, and whatever the rewards ask for"),
        Entry("rewards.functions", ["exact_match", "my_rewards:letters_right"]),
        # Answers have 3 to 10 letters and an end token, and the task's whole instruction is one token.
        *_loop(
            groups_per_step=16, max_prompt_length=64, max_completion_length=MAX_COMPLETION_TOKENS, boundaries=[6, 8, 10]
        ),
        *_machine(engine="transformers", max_num_seqs=64, token_budget=4096),
        Entry("algorithm.scale_rewards", "none"),
        *_learning(max_steps=100, learning_rate=2e-4, checkpoint_every=50),
        Entry("training.threads", 1),
    )
    return Example(entries, head, TINY_REWARDS, _jsonl(_words()), needs_model=True)


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


def _machine(*, engine: str, max_num_seqs: int, token_budget: int) -> tuple[Entry, ...]:
    return (
        Entry("generation.engine", engine, "transformers is built in; vllm needs requirements-vllm.txt"),
        Entry("generation.max_num_seqs", max_num_seqs),
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


def _words() -> list[dict[str, Any]]:
    from itertools import islice

    from streamrl.demo.task import prompt_text, training_entries

    # Training words only: held-out ones stay for an evaluation.
    return [
        {"prompt": prompt_text(entry), "answer": entry["answer"]} for entry in islice(training_entries(0), NUM_PROMPTS)
    ]
