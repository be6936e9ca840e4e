"""What users do wrong, and the one line that each mistake ends in: no traceback, exit code 2."""

import errno
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from streamrl.cli import app
from streamrl.schemas.errors import CheckpointError

EMULATED = """
[run]
name = "trial"

[data]
path = "prompts.jsonl"

[generation]
engine = "emulated"

[training]
backend = "emulated"
"""
REAL = EMULATED.replace('"emulated"', '"transformers"', 1).replace('backend = "emulated"', "") + '[model]\npath = "m"\n'

SETTINGS = [
    # mistake, command, text added to the configuration, what the line says
    ("a misspelt key", "show", "[loop]\nmax_stalenes = 2", r"unknown setting loop.max_stalenes (my.toml, line 14)"),
    ("a misspelt key's right name", "show", "[loop]\nmax_stalenes = 2", "did you mean loop.max_staleness?"),
    ("a misspelt section", "show", "[algoritm]\nname = 'grpo'", "unknown setting algoritm (my.toml, line 13); did you"),
    ("a key of another section", "show", "[loop]\nlearning_rate = 1", "did you mean training.learning_rate?"),
    ("another library's name", "show", "[loop]\nn_samples_per_prompt = 8", "did you mean loop.num_generations?"),
    ("a key outside its section", "show --loop.x.y 1", "", "unknown setting loop.x (--loop.x); known ones are"),
    ("a word for a number", "show", "[loop]\ntop_k = 'two'", "got 'two' (my.toml, line 14)"),
    ("a number out of range", "show --loop.num_generations=0", "", "greater than or equal to 1, got 0 (--loop.num_gen"),
    ("an unknown choice", "show --loop.mode=async", "", "setting loop.mode: input should be 'synchronous'"),
    ("one sample a group", "show --training.backend=torch --model.path=m", "[loop]\nnum_generations = 1", "expected"),
    ("a value for a section", "show --loop 3", "", "expected --section.key value, got '--loop'"),
    (
        "a bound beside a mode",
        "show",
        "[loop]\nmode = 'stream'\nmax_staleness = 1",
        "no loop.max_staleness with loop.mo",
    ),
    ("two sources of prompts", "show --data.dataset gcd", "", "got data.path and data.dataset"),
    ("options for stored prompts", "show --data.options={a=1}", "", "expected no data.options with data.path"),
    ("an unknown format", "show --data.format=ver", "", "setting data.format: input should be 'trl', 'verl' or"),
    ("a pattern that nobody uses", "show --rewards.format_pattern=a", "", 'rewards.functions that lack "format"'),
    ("a broken pattern", "show --rewards.answer_pattern=(", "", "expected a regular expression, got '('"),
    ("a reward without a module", "show --rewards.functions=['mathverify']", "", "did you mean 'math_verify'?"),
    (
        "a reward for a list",
        "show --rewards.functions=exact_match",
        "",
        """expected a list such as '["exact_match"]', got""",
    ),
    ("weights for other rewards", "show --rewards.weights=[1,2]", "", "expected as many rewards.weights as functions"),
    ("a password without SASL", "show --kafka.sasl_plain_username me", "", 'kafka.security_protocol = "PLAINTEXT"'),
    ("an overlong cache alone", "show --algorithm.overlong_l_cache 2", "", "no algorithm.overlong_l_max"),
    ("descending boundaries", "show --loop.bucket_boundaries=[8,4]", "", "must be ascending"),
    ("a value left out", "show --loop.mode", "", "expected a value after --loop.mode, got the end of the command line"),
    ("a value left out before another", "show --loop.mode --run.seed 1", "", "after --loop.mode, got --run.seed"),
    ("an option without a section", "show --verbose yes", "", "expected --section.key value, got '--verbose'"),
    ("two configurations", "show other.toml", "", "expected one configuration file, got"),
    ("broken TOML", "show", "[loop\ntop_k = 1", "expected TOML in my.toml"),
    ("a run's name with a blank", "show --run.name='my run'", "", "setting run.name: expected 1 to 64 of a-z"),
]


def ended(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr("sys.argv", ["streamrl", *arguments])
    with pytest.raises(SystemExit) as caught:
        app.main()
    return int(caught.value.code or 0)


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "p", "answer": "a"}) + "\n")
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "added", "says"), [row[1:] for row in SETTINGS], ids=[row[0] for row in SETTINGS]
)
def test_a_wrong_setting_ends_in_one_line(
    arguments: str,
    added: str,
    says: str,
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (directory / "my.toml").write_text(EMULATED + added + "\n")
    command, *rest = arguments.split(" ") if "'" not in arguments else arguments.split(" ", 1)
    assert ended(["config", command, "my.toml", *rest], monkeypatch) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert says in line


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["config", "show", "nowhere.toml"], "got nowhere.toml, which does not exist"),
        (["run", "--loop.mode=stream"], "expected a section [data], got none; `streamrl init`"),
        (["config", "explain", "loop.stalenes"], "unknown setting loop.stalenes; did you mean loop.max_staleness?"),
        (["init", "."], "which exists already"),
        (
            ["demo", "my.toml"],
            "expected no file for the demo, which has its own settings, got my.toml; to train with",
        ),
        (["demo", "--loop.max_stalenes=1"], "unknown setting loop.max_stalenes (--loop.max_stalenes); did you mean"),
        (["kafka", "up", "--nodes=2"], "expected --nodes of 1, or of 3 for a replicated cluster, got 2"),
        (["kafka", "up", "--nodes=two"], "invalid value for '--nodes': "),
        (
            ["kafka", "up", "--data-dir=prompts.jsonl/x"],
            "prompts.jsonl/x: Not a directory; name another with --data-dir",
        ),
        (["profile", "--out=."], "expected a file for the profile, got ., a directory; name another with --out"),
        (["profile", "--out=prompts.jsonl/x/p.json"], "prompts.jsonl for prompts.jsonl/x, got: Not a directory"),
        (
            ["plan", "--devices=2", "--profile=latin-1"],
            "expected a profile written by `streamrl profile` in latin-1, got",
        ),
        (["tail"], "missing argument 'TOPIC'; see `streamrl tail --help`"),
        (
            ["audit", "a"],
            "got unexpected extra argument(s) (a); a run is named with --run; see `streamrl audit",
        ),
        (["checkpoints", "list"], "no such command 'list'. Did you mean 'ls'?; see `streamrl checkpoints --help`"),
        (["worker", "--run=no/run"], "got no/run, which does not exist; on another machine than the run's, give its"),
        (["worker", "my.toml", "--run=x"], "expected either --run or a configuration file, got --run x and my.toml"),
        (["init", "--example=nope"], "invalid value for '--example': 'nope' is not one of 'math', 'tiny'"),
        (["kafka", "nope"], "no such command 'nope'; see `streamrl kafka --help`"),
        (["--nope"], "no such option: --nope; see `streamrl --help`"),
    ],
)
def test_a_wrong_command_ends_in_one_line(
    arguments: list[str],
    says: str,
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (directory / "latin-1").write_bytes(b"\xff")
    (directory / "streamrl.toml").write_text(EMULATED)
    if arguments[0] in ("profile", "plan"):  # they look at their settings first
        arguments = [arguments[0], "streamrl.toml", *arguments[1:]]

    def never(*_arguments: object) -> None:
        raise AssertionError("nothing is to be made or measured")

    monkeypatch.setattr("streamrl.demo.recipe.ensure_warm_started_model", never)
    monkeypatch.setattr("streamrl.planning.profiler.profile", never)
    assert ended(arguments, monkeypatch) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert says in line


def test_a_group_without_a_command_is_answered_with_its_help(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended(["kafka"], monkeypatch) == 2
    assert capsys.readouterr().err.startswith("Usage: streamrl kafka [OPTIONS] COMMAND")


def test_a_variable_with_one_underscore_is_not_passed_over(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STREAMRL_LOOP_MODE", "stream")
    assert ended(["config", "show"], monkeypatch) == 2
    assert "got STREAMRL_LOOP_MODE; did you mean STREAMRL_LOOP__MODE?" in capsys.readouterr().err


def test_a_wrong_variable_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("STREAMRL_LOOP__MOD", "stream")
    assert ended(["config", "show"], monkeypatch) == 2
    assert "unknown setting loop.mod (STREAMRL_LOOP__MOD); did you mean loop.mode?" in capsys.readouterr().err


DATA = [
    ("no file", {"prompts.jsonl": None}, [], "prompts.jsonl: no such file"),
    ("an empty file", {"prompts.jsonl": ""}, [], "expected at least one prompt in prompts.jsonl"),
    ("a broken line", {"prompts.jsonl": '{"prompt": "p"}\n{'}, [], "expected a JSON object in prompts.jsonl, line 2"),
    ("another column", {"prompts.jsonl": '{"question": "p"}'}, [], "set data.prompt_column or data.format"),
    ("no answer", {}, ["--data.answer_column=gold"], "expected an answer in column 'gold' of prompts.jsonl, line 1"),
    ("no prompt", {"prompts.jsonl": '{"prompt": null}'}, [], "of prompts.jsonl, line 1, got nothing"),
    ("a filter that is not there", {}, ["--data.filter=nowhere:f"], "expected to import 'nowhere'"),
    ("an unknown split", {}, ["--data.split=test"], 'expected data.split = "train"'),
    ("a file for a directory", {"runs": "x"}, [], "for runs/trial"),
    ("a broker that is not there", {}, ["--kafka.bootstrap_servers=127.0.0.1:1"], "a Kafka broker at 127.0.0.1:1"),
]


@pytest.mark.parametrize(("files", "arguments", "says"), [row[1:] for row in DATA], ids=[row[0] for row in DATA])
def test_a_dry_run_finds_what_is_wrong_around_the_settings(
    files: dict[str, str | None],
    arguments: list[str],
    says: str,
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (directory / "my.toml").write_text(EMULATED)
    for name, content in files.items():
        (directory / name).unlink(missing_ok=True)
        if content is not None:
            (directory / name).write_text(content)
    before = sorted(directory.iterdir())
    assert ended(["run", "--dry-run", "my.toml", *arguments], monkeypatch) == 2
    failed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("FAIL")]
    assert any(says in line for line in failed), failed
    assert sorted(directory.iterdir()) == before


@pytest.mark.processes
def test_a_dry_run_names_a_missing_model_and_a_missing_reward_and_goes_on(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (directory / "my.toml").write_text(REAL)
    (directory / "m").mkdir()
    (directory / "mine.py").write_text("def score(completions, answer, level):\n    return [1.0]\n")
    functions = "--rewards.functions=['mine:score', 'mine:scor']"
    assert ended(["run", "my.toml", "--dry-run", functions], monkeypatch) == 2
    out = capsys.readouterr().out
    assert "FAIL  model        expected a causal language model at m" in out
    assert "FAIL  rewards      expected a function 'scor' in mine, got none; did you mean 'score'?" in out
    assert "ok    disk" in out
    assert ended(["run", "my.toml", "--dry-run", "--rewards.functions=['mine:score']"], monkeypatch) == 2
    told = "score fails on 1 of 1 rows (100%), first on prompts/1: TypeError: score() missing 1 required"
    assert told in capsys.readouterr().out


def test_a_run_is_refused_before_anything_is_started_or_written(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (directory / "my.toml").write_text(EMULATED)

    def never(*_arguments: object, **_options: object) -> None:
        raise AssertionError("no broker is to be started")

    monkeypatch.setattr("streamrl.deploy.local.run.broker_for", never)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert ended(["run", "my.toml", f"--relay.port={port}"], monkeypatch) == 2
    assert f"127.0.0.1:{port} in use" in capsys.readouterr().err
    assert ended(["run", "my.toml", "--data.path=absent.jsonl"], monkeypatch) == 2
    assert "absent.jsonl: no such file" in capsys.readouterr().err
    assert not (directory / "runs").exists()


@pytest.mark.processes
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_is_one_line_and_an_exit_code_of_its_own(
    number: int, directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (directory / "my.toml").write_text(EMULATED)

    def full(*_arguments: object) -> None:
        raise OSError(number, os.strerror(number), "runs/trial/kafka")

    # The broker is the first to write, and it would take the whole disk of whoever runs this test to keep it from that.
    monkeypatch.setattr("streamrl.deploy.local.run.broker_for", full)
    assert ended(["run", "my.toml"], monkeypatch) == 5
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: expected free space")
    assert f"{os.strerror(number)}; free some" in line


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_library_that_finds_no_room_is_one_line_as_well(
    wrapped: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full() -> None:
        try:
            Path("/dev/full").write_bytes(b"x")
        except OSError as error:
            if wrapped:
                raise ExceptionGroup("tasks", [error]) from None
            raise CheckpointError("expected to write a checkpoint of about 7 bytes to runs/x, got: no room") from error

    monkeypatch.setattr(app, "app", full)
    assert ended([], monkeypatch) == 5
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: expected ")


def test_control_characters_quoted_in_an_error_are_printable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended(["config", "explain", "loop.\x1b]0;owned\x07"], monkeypatch) == 2
    assert capsys.readouterr().err.replace("\n", "").isprintable()


INTERRUPTED = """
import os, signal, sys
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
signal.signal(signal.SIGINT, signal.default_int_handler)  # who starts the tests in the background may ignore it
sys.meta_path.insert(0, Interrupt())
sys.argv = ["streamrl", "run", "my.toml"]
from streamrl.__main__ import main
main()
"""


@pytest.mark.processes
@pytest.mark.parametrize("module", ["typer", "streamrl.cli.run", "streamrl.deploy.local.run", "numpy"])
def test_ctrl_c_while_the_command_is_loaded_leaves_no_traceback(module: str, directory: Path) -> None:
    (directory / "my.toml").write_text(EMULATED)
    command = [sys.executable, "-c", INTERRUPTED.format(module=module)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 130, done.stderr
    assert done.stderr in ("", "stopped\n")
    assert not (directory / "runs").exists()
