"""What `streamrl show --prompt` and `streamrl config show` say of a model's tokens before a run."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from streamrl.cli import app
from tests.pipeline.tiny_model import save_tiny_model
from tests.producers.generation.chat_templates import Family, save_tokenizer

FAMILY = Family(
    "{{ bos_token }}{% for m in messages %}<u>{{ m.content }}</u>{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}",
    ("<s>", "<u>", "</u>", "<a>"),
    "</a>",
    "",
    opening=("<s>",),
)
ROWS: list[dict[str, Any]] = [
    {"prompt": [{"role": "user", "content": "2+2\n"}], "answer": "4"},
    {"prompt": "<s>2+2=", "answer": "4"},
    {"prompt": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "= "}], "answer": 4},
]


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    model = save_tiny_model(tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"vocab_size": 300}))
    save_tokenizer(FAMILY, model)
    (tmp_path / "one.jsonl").write_text("")
    (tmp_path / "my.toml").write_text('[data]\npath = "one.jsonl"\n[model]\npath = "model"\n')
    monkeypatch.chdir(tmp_path)
    return tmp_path


def ran(line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    monkeypatch.setattr("sys.argv", ["streamrl", *shlex.split(line)])
    try:
        app.main()
        code = 0
    except SystemExit as ended:
        code = int(ended.code or 0)
    out = capsys.readouterr()
    return code, out.out, out.err


@pytest.mark.parametrize(
    ("row", "seen"),
    [
        (ROWS[0], ["<s>", "<u>", "2", "+", "2", "\n", "</u>", "<a>"]),
        (ROWS[1], ["<s>", "2", "+", "2", "="]),
        (ROWS[2], ["<s>", "<u>", "2", "+", "2", "?", "</u>", "<u>", "=", " "]),
    ],
)
def test_a_prompt_is_shown_as_the_model_sees_it(
    task: Path, row: Any, seen: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (task / "one.jsonl").write_text(json.dumps(row) + "\n")
    code, shown, _ = ran("show --prompt 0 my.toml", monkeypatch, capsys)
    assert code == 0
    first, *lines = shown.splitlines()
    assert first == f"prompt 0 is one/1, {len(seen)} tokens:"
    assert [line.split(maxsplit=2)[2] for line in lines[: len(seen)]] == list(map(repr, seen))
    assert lines[-1] == "a completion ends at '\"' (1: generation_config, config) or '</a>' (260: tokenizer)"
    answer = [] if row["answer"] == 4 else ["its answer as a completion, 1 tokens:", "      0       19  '4'"]
    assert lines[len(seen) : -1] == answer
    _, shown, _ = ran("show --prompt 0 --json my.toml", monkeypatch, capsys)
    found = json.loads(shown)
    assert ([one["text"] for one in found["tokens"]], found["prompt_id"]) == (seen, "one/1")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (
            "show --prompt 0 my.toml --loop.max_prompt_length 4",
            "expected a prompt of 1 to 4 tokens, got 5; a worker w",
        ),
        ("show --prompt 0 my.toml --generation.engine emulated", 'got generation.engine = "emulated", which has no'),
        ("show --prompt 0 --run my.toml other.toml", "expected either --run or a configuration file, got --run my.to"),
        ("show", "expected one TRAJECTORY and --run, got none without --run"),
        ("show a b --run x", "expected one TRAJECTORY and --run, got a, b"),
    ],
)
def test_what_cannot_be_shown_is_one_line(
    task: Path, line: str, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (task / "one.jsonl").write_text(json.dumps(ROWS[1]) + "\n")
    code, _, said = ran(line, monkeypatch, capsys)
    assert code == 2
    assert says in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ("", "'\"' (1: generation_config, config) or '</a>' (260: tokenizer)"),
        ("--model.path nobody/none", "known where nobody/none is a directory; the dry run shows them"),
        ("--generation.engine emulated", "emulated lengths"),
    ],
)
def test_config_show_says_where_a_completion_ends(
    task: Path, overrides: str, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, shown, _ = ran(f"config show my.toml {overrides}", monkeypatch, capsys)
    assert shown.splitlines()[-1] == f"#   a completion ends at: {says}"
