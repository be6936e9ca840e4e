import json
import os
import subprocess
import time
from pathlib import Path

import pytest

from streamrl.cli import app
from tests.pipeline.local_run import CLI, ENVIRONMENT, PATIENCE_S, LocalRun
from tests.pipeline.secure_broker import USER, SecureBroker, secure_broker

pytestmark = [pytest.mark.kafka, pytest.mark.slow]

# TOML would make a number of it.
PASSWORD = "20240101"
VARIABLE = "STREAMRL_KAFKA__SASL_PLAIN_PASSWORD"
CONFIG = """
[run]
directory = {directory}
name = "secure"
workers = 1
[data]
dataset = "chain_sum"
[loop]
groups_per_step = 2
num_generations = 2
max_completion_length = 100
[generation]
engine = "emulated"
[training]
backend = "emulated"
max_steps = 1
[emulation]
time_scale = 1000.0
[kafka]
bootstrap_servers = "{broker.address}"
security_protocol = "SASL_SSL"
sasl_plain_username = "{user}"
sasl_plain_password = "{password}"
ssl_cafile = "{broker.certificate}"
"""


def test_a_run_logs_in_with_a_password_of_its_file_and_a_role_with_one_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    resolved = tmp_path / "secure" / "config.resolved.toml"
    with secure_broker(tmp_path, PASSWORD, monkeypatch) as broker:
        seen = _runs_to_its_end(_config(tmp_path, broker, PASSWORD))
        further = ["run", str(resolved), "--training.max_steps=2"]
        (number,) = (n for n, line in enumerate(resolved.read_text().splitlines(), 1) if "sasl_plain_password" in line)
        assert _refusal_of(further, monkeypatch, capsys) == (
            "error: expected a value for kafka.sasl_plain_password, got the asterisks that stand for a secret in "
            f"files ({resolved}, line {number}): set {VARIABLE} to the real one"
        )
        monkeypatch.setenv(VARIABLE, "wrong")
        assert _refusal_of(further, monkeypatch, capsys) == (
            f"error: expected the broker at {broker.address} to let kafka.sasl_plain_username '{USER}' in, got a "
            f'refusal of its password; set {VARIABLE} to the right one, or check kafka.sasl_mechanism ("PLAIN")'
        )
        # It takes the run's lineage, tells its last step once more, and has nothing left to do.
        trainer = [*CLI, "trainer", str(resolved)]
        environment = {**os.environ, **ENVIRONMENT, VARIABLE: PASSWORD}
        done = subprocess.run(trainer, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    roles = ("coordinator", "relay", "trainer", "worker", "dispatcher")
    assert all(any(f"streamrl.cli.app {role} " in line for line in seen) for role in roles)
    assert not [line for line in [*seen, done.stdout, done.stderr] if PASSWORD in line]
    written = [path for path in (tmp_path / "secure").rglob("*") if path.is_file()]
    assert {"config.resolved.toml", "summary.json", "report.html", "trainer.log"} <= {path.name for path in written}
    assert not [path for path in written if PASSWORD.encode() in path.read_bytes()]


def _config(folder: Path, broker: SecureBroker, password: str) -> Path:
    path = folder / "secure.toml"
    text = CONFIG.format(directory=json.dumps(str(folder)), broker=broker, user=USER, password=password)
    path.write_text(text)
    return path


def _runs_to_its_end(config: Path) -> set[str]:
    """The command lines of its processes, and what it printed."""
    seen: set[str] = set()
    run = LocalRun.start(config, config.stem)
    try:
        while run.process.poll() is None:
            seen |= _command_lines(run.process.pid)
            time.sleep(0.3)
        assert run.wait() == 0, run.text()[-4000:]
    finally:
        run.end()
    return seen | {run.text()}


def _command_lines(parent: int) -> set[str]:
    try:
        children = " ".join(path.read_text() for path in Path(f"/proc/{parent}/task").glob("*/children")).split()
        return {Path(f"/proc/{child}/cmdline").read_text().replace("\0", " ") for child in children}
    except OSError:  # one of them ended meanwhile
        return set()


def _refusal_of(arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """All that a command says on standard error, which ends with exit code 2."""
    monkeypatch.setattr("sys.argv", ["streamrl", *arguments])
    with pytest.raises(SystemExit) as caught:
        app.main()
    assert caught.value.code == 2
    return capsys.readouterr().err.strip()
