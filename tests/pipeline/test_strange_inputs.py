"""Inputs as other people have them: each trains as its owner means it, or the dry run says what is wrong.

A long test. Each task is of a kind that once trained on something else without a word. The dry run is asked about all
of them; those of which only a run can show what the model and the rewards get are trained on a broker, too.
"""

import gzip
import json
import os
import random
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet
import pytest
import tomli_w

import streamrl
from streamrl.init.preflight import dry_run
from streamrl.producers.generation.tokenizer import ModelTokenizer
from streamrl.settings.loading import validated
from tests.broker_fixture import unique_numbers
from tests.pipeline.chat_model import OPENED, PLAIN, READS_TOOLS, TWO_ENDS, save_chat_model
from tests.pipeline.local_run import CLI, ENVIRONMENT

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

REWARDS = """
def length(completions, completion_ids, **columns):
    return [float(len(completion_ids[0])) + sum(completion_ids[0]) % 7]

def digits(completions, answer, **columns):
    said = completions[0] if isinstance(completions[0], str) else completions[0][0]["content"]
    return [None if answer[0] is None else sum(one in said for one in answer[0]) / len(answer[0])]

def stated(prompts, **columns):
    return [float(not str(prompts[0]).startswith("Solve"))]

def zero(completions, **columns):
    return [0.0]
"""
draw = random.Random(20261130)
numbers = unique_numbers()
Write = Callable[[Path], Path]
Row = dict[str, Any]


def user(text: str, **more: Any) -> Row:
    return {"role": "user", "content": text, **more}


def lines(*rows: Row, name: str = "p.jsonl") -> Write:
    def write(folder: Path) -> Path:
        text = "".join(json.dumps(row) + "\n" for row in rows).encode()
        (folder / name).write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
        return folder / name

    return write


def text(content: str, name: str = "p.csv") -> Write:
    def write(folder: Path) -> Path:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content)
        return folder / name

    return write


def directory(*writes: Write) -> Write:
    def write(folder: Path) -> Path:
        (folder / "several").mkdir()
        for each in writes:
            each(folder / "several")
        return folder / "several"

    return write


def parquet(rows: list[Row]) -> Write:
    def write(folder: Path) -> Path:
        pyarrow.parquet.write_table(pa.Table.from_pylist(rows), folder / "p.parquet")
        return folder / "p.parquet"

    return write


def cells(answers: list[str]) -> Write:
    return text("prompt,answer\n" + "".join(f"q{n}?,{answer}\n" for n, answer in enumerate(answers)))


def answered(*answers: Any) -> list[Row]:
    return [{"prompt": f"q{n}?", "answer": answer} for n, answer in enumerate(answers)]


@dataclass(frozen=True)
class Task:
    """A task, and parts of the dry run's lines that must be there. ``code``: how the dry run ends."""

    write: Write
    says: tuple[str, ...]
    reward: str = "exact_match"
    code: int = 0
    model: str = "plain"
    settings: Mapping[str, Any] = field(default_factory=dict)


CALLED = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"x": 3}}}]}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
HISTORY = {"prompt": [user("3+4?"), CALLED, {"role": "tool", "content": "7"}], "answer": "7"}
padded = f"0{draw.randrange(10, 99)}"
DATE = f"19{draw.randrange(60, 99)}-0{draw.randrange(1, 9)}-1{draw.randrange(0, 9)}"
a, b, c = draw.sample(range(2, 40), 3)
FORMULAS = (f"{a}x-{b}", f"({a}, -{b})", f"{a}-{b}i", f"\\${a}.50", f"{a},{b},{c}", f"{a}\\,000", f"[{a}, {a + b})")
LONG_LIST = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(300)]

TASKS: dict[str, Task] = {
    "words of a csv file are answers": Task(
        cells(["None", "N/A", "nan", "NULL", "true", "-"]),
        ("answer 'N/A'", "answer 'true'", "exact_match gives 1 for a row's own answer, 0 for another row's"),
    ),
    "a blank among integers": Task(
        cells([str(100 + n) for n in range(19)] + [""]),
        (
            "exact_match gives 0.95 for a row's own answer",
            "pays anything on 1 of 20 rows, first p/19 with answer None",
            "0 for another row's",
        ),
    ),
    "more blanks than a run takes": Task(cells(["84", "", "7"]), ("with answer None; above ingest.max_un",), code=2),
    "numbers as they are written": Task(
        cells([padded, "1.10", "+7", "1e3", "0x1F"]), (f"answer '{padded}'", "answer '1.10'", "gives 1 for")
    ),
    "dates in packed lines": Task(lines(*answered(DATE, "12:30"), name="p.jsonl.gz"), (f"answer '{DATE}'",)),
    "dates in a document": Task(text(json.dumps(answered(DATE, "1 May")), "p.json"), (f"answer '{DATE}'",)),
    "a float as answer": Task(parquet(answered(84.0, None)), ("got a float: 84.0; give it as text",), code=2),
    "a decimal point that pandas added": Task(text("prompt,answer\na?,84.0\nb?,7.0\n"), ("answer '84.0'",)),
    "mixed turns in a document": Task(
        text(
            json.dumps([{"prompt": "3+4=", "answer": ["7", "seven"]}, {"prompt": [user("5+5?")], "answer": 10}]),
            "p.json",
        ),
        ("'3+4='  answer ['7', 'seven']", "user\\n5+5?<|im_end|>", "exact_match gives 1"),
        model="chat",
    ),
    "mixed turns in a directory": Task(
        directory(lines({"prompt": [user("3+4?")], "answer": "7"}, {"prompt": "5+5=", "answer": "10"})),
        ("user\\n3+4?<|im_end|>", "'5+5='  answer '10'"),
        model="chat",
    ),
    "a directory of two forms": Task(
        directory(lines(*answered("7")), text("prompt,answer\nq,8\n", "more.csv")),
        ("got 1 that would be left",),
        code=2,
    ),
    "a quote that joins rows": Task(
        text('prompt\tanswer\n"open\t7\nb?\t8\nc"d?\t9\n', "p.tsv"), ("quotes around whole cells",), code=2
    ),
    "a key that is given twice": Task(
        text('{"prompt": "a?", "answer": "1", "answer": "2"}\n', "p.jsonl"), ("more than",), code=2
    ),
    "golds that are formulas": Task(
        lines(*answered(*FORMULAS)),
        ("math_verify gives 1 for a row's own answer, 0 for another row's, 0 for an empty",),
        reward="math_verify",
    ),
    "golds that are choices": Task(
        lines(*answered("(A)", "D.", "\\boxed{C}")), ("a letter is a choice",), reward="math_verify", code=2
    ),
    "golds that are words": Task(
        lines(*answered("7", "no solution", "3 million")),
        ("math_verify fails on 2 of 3 rows",),
        reward="math_verify",
        code=2,
    ),
    "a mapping as ground truth": Task(
        parquet([{"prompt": [user("24?")], "reward_model": {"ground_truth": {"target": a, "numbers": [b, c]}}}]),
        ("got a mapping of", "set data.answer_column to"),
        reward="math_verify",
        code=2,
        model="chat",
        settings={"data": {"format": "verl"}},
    ),
    "tool calls that the template shows": Task(
        lines(HISTORY), ("im_start|>tool\\n7<|im_end|>\\n<|im_start|>assistant\\n'",), model="tools"
    ),
    "tool calls that the template leaves out": Task(
        lines(HISTORY), ("1 with tool_calls, which",), code=2, model="chat"
    ),
    "tools that the template leaves out": Task(
        lines({"prompt": [user("3+4?")], "tools": [TOOL], "answer": "7"}),
        ("1 with tools, which",),
        code=2,
        model="chat",
    ),
    "a role that the template leaves out": Task(
        lines({"prompt": [{"role": "developer", "content": "Be brief."}, user("3+4?")], "answer": "7"}),
        ("1 with a turn of role developer, which the chat template leaves out",),
        code=2,
        model="two roles",
    ),
    "variables of the template in a row": Task(
        lines({"prompt": [user("3+4?")], "chat_template_kwargs": {"think": False}, "answer": "7"}),
        ("set data.chat_template_kwargs to it",),
        code=2,
        model="chat",
    ),
    "an answer that is begun": Task(
        lines({"prompt": [user("3+4?"), {"role": "assistant", "content": "<think>\nSum:"}], "answer": "7"}),
        ("assistant\\n<think>\\nSum:'  answer",),
        model="chat",
    ),
    "a text with its own opening": Task(
        lines({"prompt": "<s>3+4?", "answer": "7"}, {"prompt": "5+5?", "answer": "10"}),
        ("'<s>3+4?'", "'<s>5+5?'"),
        model="opened",
    ),
    "turns as a text": Task(
        lines({"prompt": json.dumps([user("3+4?")]), "answer": "7"}), ("user\\n3+4?<",), model="chat"
    ),
    "turns as Python writes them": Task(
        lines({"prompt": str([user("3+4?")]), "answer": "7"}), ("write it with",), code=2
    ),
    "a wording that turns cannot have": Task(
        lines({"prompt": [user("3+4?")], "answer": "7"}),
        ("because data.prompt_template words texts",),
        code=2,
        model="chat",
        settings={"data": {"prompt_template": "Solve {prompt}"}},
    ),
    "a wording that rewards do not see": Task(
        lines(*answered("7", "8")),
        ("stated gives 1 for a row's own answer",),
        reward="own_rewards:stated",
        settings={"data": {"prompt_template": "Solve {prompt}"}},
    ),
    "an end that the tokenizer alone names": Task(
        lines({"prompt": [user("3+4?")], "answer": "7"}),
        ("'<|endoftext|>' (256: generation_config, config) or '<|im_end|>' (258: tokenizer)",),
        reward="own_rewards:length",
        model="two ends",
    ),
    "no end": Task(
        lines({"prompt": [user("3+4?")], "answer": "7"}),
        ("every completion will have loop.max_completion_length = 16 tokens",),
        reward="own_rewards:length",
        model="endless",
    ),
    "a late row that cannot be sent": Task(
        lines(*LONG_LIST, {"prompt": "\udc9f+1=", "answer": "1"}),
        ("1 of 301 rows are left out", "p.jsonl, line 301", "half of a surrogate pair"),
        reward="own_rewards:length",
    ),
    "rewards that are all equal": Task(
        lines(*answered("7", "8")), ("it gives the same for all, and a group of equal",), reward="own_rewards:zero"
    ),
    "an answer with another name": Task(
        lines({"prompt": "3+4=", "anwser": "7"}), ("expected a column 'answer', got none",), code=2
    ),
    "a picture that no model sees": Task(
        lines({"prompt": "3+4=", "answer": "7", "images": ["a.png"]}), ("and nothing of column images",)
    ),
    "held-out prompts that are trained": Task(
        lines(*answered("7", "8")),
        ("the run trains on prompts of the held-out set seen", "a completion passes if exact_match >= 1"),
        settings={"evaluation": {"data": {"seen": {"path": "p.jsonl"}}, "every": 1}},
    ),
    "held-out rows without an answer": Task(
        lines(*answered("7", "8")),
        ("FAIL  evaluation", "unseen"),
        code=2,
        settings={"evaluation": {"data": {"unseen": {"path": "other.jsonl"}}, "every": 1}},
    ),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """The models by name. The template of ``two roles`` passes over all other roles."""
    folder = tmp_path_factory.mktemp("models")
    only = "{% for m in messages if m.role in ('user', 'assistant') %}"
    picky = PLAIN.template.replace("{% for m in messages %}", only)
    return {
        "plain": save_chat_model(folder / "plain"),
        "chat": save_chat_model(folder / "chat"),
        "tools": save_chat_model(folder / "tools", READS_TOOLS),
        "two roles": save_chat_model(folder / "two", replace(PLAIN, template=picky)),
        "opened": save_chat_model(folder / "opened", OPENED),
        "two ends": save_chat_model(folder / "ends", TWO_ENDS, ["<|endoftext|>"]),
        "endless": save_chat_model(folder / "endless", has_end=False),
    }


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "own_rewards.py").write_text(REWARDS)
    (tmp_path / "other.jsonl").write_text('{"prompt": "3+4=", "reply": "7"}\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path


def tree_of(task: Task, model: Path, folder: Path, **loop: Any) -> dict[str, Any]:
    tree: dict[str, Any] = {
        "model": {"path": str(model)},
        "data": {"path": task.write(folder).name},
        "rewards": {"functions": [task.reward]},
        "loop": {"max_prompt_length": 200, "max_completion_length": 16, "groups_per_step": 1, **loop},
        "run": {"name": f"strange-{next(numbers)}", "directory": str(folder / "runs"), "workers": 1},
    }
    return {**tree, **{name: tree.get(name, {}) | keys for name, keys in task.settings.items()}}


@pytest.mark.parametrize("kind", TASKS)
def test_a_dry_run_shows_what_is_meant_or_says_what_is_wrong(
    kind: str, models: Mapping[str, Path], folder: Path
) -> None:
    task, said = TASKS[kind], list[str]()
    code = dry_run(validated(tree_of(task, models[task.model], folder)), said.append)
    assert [part for part in task.says if not any(part in line for line in said)] == [], "\n".join(said)
    assert code == task.code, "\n".join(said)


def command(tree: dict[str, Any], folder: Path, broker: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    config = folder / "streamrl.toml"
    config.write_text(tomli_w.dumps(tree))
    given = [*CLI, "run", str(config), f"--kafka.bootstrap_servers={broker}", *arguments]
    environment = {**os.environ, **ENVIRONMENT}
    return subprocess.run(given, capture_output=True, text=True, env=environment, check=False, timeout=800)


def run_of(task: Task, models: Mapping[str, Path], folder: Path, broker: str, **loop: Any) -> list[Row]:
    """The trajectories of a run of four steps, which another process carries out."""
    tree = tree_of(task, models[task.model], folder, **{"num_generations": 4, **loop})
    tree |= {"training": {"max_steps": 4, "checkpoint_every": 4, "threads": 1}}
    done = command(tree, folder, broker)
    assert done.returncode == 0, done.stdout + done.stderr
    rows: list[Row] = streamrl.Run(folder / "runs" / tree["run"]["name"]).trajectories(tokens=True).to_pylist()
    return rows


@pytest.mark.parametrize(
    ("kind", "shown"),
    [
        ("tool calls that the template shows", "<|im_start|>tool\n7<|im_end|>\n<|im_start|>assistant\n"),
        ("an answer that is begun", "<|im_start|>assistant\n<think>\nSum:"),
        ("a text with its own opening", "<s>3+4?"),
        ("turns as a text", "<|im_start|>user\n3+4?<|im_end|>\n<|im_start|>assistant\n"),
    ],
)
def test_a_run_samples_the_prompt_that_the_dry_run_shows(
    kind: str, shown: str, models: Mapping[str, Path], folder: Path, bootstrap_servers: str
) -> None:
    rows = run_of(TASKS[kind], models, folder, bootstrap_servers)
    tokenizer = ModelTokenizer(str(models[TASKS[kind].model]))
    texts = {tokenizer.decode_with_special(row["prompt_token_ids"]) for row in rows}
    assert any(text.endswith(shown) for text in texts), texts
    assert not any(text.startswith("<s><s>") for text in texts)
    assert kind != "tool calls that the template shows" or all('"name": "add"' in text for text in texts)


def test_rows_of_a_csv_file_with_a_blank_are_paid_as_those_of_a_jsonl_file(
    models: Mapping[str, Path], folder: Path, bootstrap_servers: str
) -> None:
    task, paid = replace(TASKS["a blank among integers"], reward="own_rewards:digits"), 0
    for row in run_of(task, models, folder, bootstrap_servers, groups_per_step=4):
        answer = str(100 + int(row["prompt_id"].rpartition("/")[2]))
        rewards = dict(row["rewards"])
        if answer == "119":
            assert rewards["digits"] is None
        else:
            assert rewards["digits"] == sum(one in row["completion"] for one in answer) / 3
            paid += bool(rewards["digits"])
    assert paid


def test_completions_end_where_the_tokenizer_says_and_run_to_the_limit_without_an_end(
    models: Mapping[str, Path], folder: Path, bootstrap_servers: str
) -> None:
    loop = {"max_completion_length": 200, "groups_per_step": 2}
    rows = run_of(TASKS["an end that the tokenizer alone names"], models, folder, bootstrap_servers, **loop)
    ends = ModelTokenizer(str(models["two ends"])).ends.ids
    assert len(ends) == 2
    assert not [row for row in rows if ends & set(row["token_ids"][:-1])]
    assert [row["finish_reason"] for row in rows if row["token_ids"][-1] in ends].count("stop") > 0
    rows = run_of(TASKS["no end"], models, folder, bootstrap_servers)
    assert {(row["length"], row["finish_reason"]) for row in rows} == {(16, "length")}


def test_rewards_that_are_all_equal_end_the_run_with_the_reason(
    models: Mapping[str, Path], folder: Path, bootstrap_servers: str
) -> None:
    tree = tree_of(TASKS["rewards that are all equal"], models["plain"], folder, num_generations=2)
    tree["loop"] |= {"max_completion_length": 2}
    done = command(tree | {"algorithm": {"name": "dapo"}}, folder, bootstrap_servers)
    assert done.returncode == 4, done.stdout + done.stderr
    assert "zero_advantage" in done.stdout + done.stderr
    assert "correct the reward function" in done.stdout + done.stderr


def test_a_row_that_cannot_be_sent_is_told_and_ends_no_run(
    models: Mapping[str, Path], folder: Path, bootstrap_servers: str
) -> None:
    """All rows are sampled, the last one excepted."""
    tree = tree_of(TASKS["a late row that cannot be sent"], models["plain"], folder, num_generations=2)
    tree["loop"] |= {"groups_per_step": 60, "max_completion_length": 4}
    done = command(tree | {"training": {"max_steps": 6, "threads": 1}}, folder, bootstrap_servers)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 of 301 rows are left out" in done.stdout + done.stderr
