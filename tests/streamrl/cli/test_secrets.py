"""A canary secret in any layer of the settings is never shown by a command that reads the settings."""

import subprocess
import sys
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from streamrl.api import settings_of
from streamrl.cli import app
from streamrl.schemas.errors import SettingsError
from streamrl.schemas.secrets import MASK
from streamrl.settings.keys import secret_keys
from streamrl.settings.loading import as_toml, load_settings, secret_variables, without_settings

CANARY = "canary-4711"
PASSWORD = "STREAMRL_KAFKA__SASL_PLAIN_PASSWORD"
TASK = """
[generation]
engine = "emulated"
[training]
backend = "emulated"
[data]
path = "p.jsonl"
[kafka]
bootstrap_servers = "127.0.0.1:1"
security_protocol = "SASL_SSL"
sasl_plain_username = "me"
"""
FILE = f'sasl_plain_password = "{CANARY}"\nssl_key_password = "{CANARY}"\n'


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.jsonl").write_text('{"prompt": "p", "answer": "a"}\n')
    (tmp_path / "task.toml").write_text(TASK)
    return tmp_path


def printed(arguments: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> str:
    """Everything that a command prints and logs, with any exit code."""
    monkeypatch.setattr("sys.argv", ["streamrl", *arguments])
    with capture_logs() as logs, pytest.raises(SystemExit):
        app.main()
    out, err = capfd.readouterr()
    return f"{out}{err}{logs}"


def test_these_are_all_secrets() -> None:
    kafka = {("kafka", "sasl_plain_password"), ("kafka", "ssl_key_password")}
    assert secret_keys() == kafka | {("generation", "request_secret"), ("environments", "api_key")}


@pytest.mark.processes
@pytest.mark.parametrize("layer", ["file", "environment", "command line"])
def test_no_command_shows_a_secret_of_any_layer(
    layer: str, directory: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    given: list[str] = []
    match layer:
        case "file":
            (directory / "task.toml").write_text(TASK + FILE)
        case "environment":
            monkeypatch.setenv(PASSWORD, CANARY)
            monkeypatch.setenv("STREAMRL_KAFKA__SSL_KEY_PASSWORD", CANARY)
        case "command line":
            given = [f"--kafka.sasl_plain_password={CANARY}", "--kafka.ssl-key-password", CANARY]
    settings = load_settings(directory / "task.toml", given)
    assert secret_variables(settings) == {PASSWORD: CANARY, "STREAMRL_KAFKA__SSL_KEY_PASSWORD": CANARY}
    assert f'sasl_plain_password = "{MASK}"' in as_toml(settings)
    assert CANARY not in as_toml(settings) + repr(settings) + str(settings) + settings.model_dump_json()
    for command, also in (
        (["config", "show"], []),
        (["config", "show", "--json"], []),
        (["config", "explain", "kafka.sasl_plain_password"], []),
        (["run"], []),
        (["coordinator"], []),
        # together with a mistake
        (["run"], ["--loop.max_stalenes", "3"]),
        (["run"], ["--kafka.request_timeout_ms", "soon"]),
        (["run"], ["--kafka.security_protocol", "PLAINTEXT"]),
        (["run"], ["--kafka.sasl_plain_password.x", CANARY]),
        (["run"], ["--kafka.ssl_keyfile", "task.toml", "--kafka.ssl_certfile", "task.toml"]),
    ):
        text = printed([*command, "task.toml", *given, *also], monkeypatch, capfd)
        assert text
        assert CANARY not in text, command
    if layer == "file":
        assert CANARY not in printed(["run", "--dry-run", "task.toml"], monkeypatch, capfd)
        assert CANARY not in printed(["status", "--run", "task.toml"], monkeypatch, capfd)
    written = [path for path in directory.rglob("*") if path.is_file() and path.name != "task.toml"]
    assert not [path for path in written if CANARY in path.read_text()]


@pytest.mark.parametrize(
    ("file", "arguments", "says"),
    [
        ("sasl_plain_password = 4711\n", [], "got a hidden value (int) (task.toml, line 12)"),
        (f'sasl_plain_password = ["{CANARY}"]\n', [], "got a hidden value (list)"),
        (f'[[kafka.sasl_plain_password]]\nx = "{CANARY}"\n', [], "got a hidden value (list)"),
        (f"sasl_plain_password = {CANARY}\n", [], "expected TOML in task.toml"),
        (f'sasl_plain_pasword = "{CANARY}"\n', [], "did you mean kafka.sasl_plain_password?"),
        ("", ["--kafka.sasl_plain_password", "half", f"a-{CANARY}"], "got another one (hidden)"),
        ("", ["--kafka.sasl_plain_password", f"--{CANARY}"], "got a word that starts with dashes"),
        ("", ["--kafka.sasl_plain_password=half", "other.toml", CANARY], "expected one configuration file"),
    ],
)
def test_an_error_about_a_secret_does_not_show_it(
    file: str,
    arguments: list[str],
    says: str,
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (directory / "task.toml").write_text(TASK + file)
    text = printed(["config", "show", "task.toml", *arguments], monkeypatch, capfd)
    assert text.startswith("error: ")
    assert text.count("\n") == 1
    assert says in text
    assert CANARY not in text
    assert "4711" not in text


def test_a_section_of_another_shape_may_hold_a_secret(directory: Path) -> None:
    (directory / "task.toml").write_text(f'[data]\npath = "p.jsonl"\n[[kafka]]\nsasl_plain_password = "{CANARY}"\n')
    with pytest.raises(SettingsError, match=r"expected a section \[kafka\], got a hidden value") as caught:
        load_settings(directory / "task.toml", [])
    # The same holds for its cause, which a traceback shows.
    assert CANARY not in f"{caught.value}{caught.value.__cause__}"


@pytest.mark.parametrize("text", ["20240101", '"quoted"', "[1]", "true", "none", "0x10", " spaced ", "{a=1}"])
def test_secrets_are_never_parsed_as_toml(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    argument = f"--kafka.sasl_plain_password={text}"
    assert secret_variables(load_settings(Path("task.toml"), [argument])) == {PASSWORD: text}
    monkeypatch.setenv(PASSWORD, text)
    assert secret_variables(load_settings(Path("task.toml"), [])) == {PASSWORD: text}


@pytest.mark.parametrize(
    "argument",
    [f"--training.checkpoint_location=s3://me:{CANARY}@bucket/x"],
)
def test_an_address_takes_no_password_since_it_is_shown(argument: str) -> None:
    with pytest.raises(SettingsError, match="expected a URL without a user or password") as caught:
        load_settings(Path("task.toml"), [argument])
    assert CANARY not in f"{caught.value}{caught.value.__cause__}"


def test_a_variable_that_is_passed_on_empty_is_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PASSWORD, "")
    assert load_settings(Path("task.toml"), []).kafka.sasl_plain_password is None


def test_a_mask_is_refused_as_a_secret_but_a_file_with_one_may_be_looked_at(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = load_settings(Path("task.toml"), [f"--kafka.sasl_plain_password={CANARY}"])
    resolved = directory / "config.resolved.toml"
    resolved.write_text(as_toml(settings))
    with pytest.raises(SettingsError, match=rf"kafka\.sasl_plain_password.*{PASSWORD}"):
        load_settings(resolved, [])
    looked = load_settings(resolved, [], to_look=True)
    assert as_toml(looked) == as_toml(settings)
    monkeypatch.setenv(PASSWORD, CANARY)
    assert load_settings(resolved, []) == settings
    assert settings_of(settings, {"run__seed": 3}).kafka == settings.kafka


def test_children_get_settings_from_their_file_alone() -> None:
    environ = {PASSWORD: CANARY, "STREAMRL_LOOP__MODE": "stream", "STREAMRL_CACHE": "/c", "PATH": "/bin"}
    assert without_settings(environ) == {"STREAMRL_CACHE": "/c", "PATH": "/bin"}


@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_a_secret_is_taken_off_the_command_line() -> None:
    code = "import sys; from streamrl.cli import arguments; arguments.split(sys.argv[1:]); "
    code += "print(open('/proc/self/cmdline').read())"
    options = [f"--kafka.sasl_plain_password={CANARY}", "--kafka.ssl_key_password", CANARY, "--run.name", "n"]
    shown = subprocess.run([sys.executable, "-c", code, *options], capture_output=True, text=True, check=True).stdout
    assert shown.split("\0")[3:-1] == [
        "--kafka.sasl_plain_password=***********",
        "--kafka.ssl_key_password",
        "***********",
        "--run.name",
        "n",
    ]
