import os
import subprocess

import pytest

from tests.command import ended
from tests.pipeline.emulated import PASSWORD, EmulatedRun
from tests.pipeline.local_run import CLI, ENVIRONMENT, PATIENCE_S
from tests.pipeline.secure_broker import USER

VARIABLE = "STREAMRL_KAFKA__SASL_PLAIN_PASSWORD"


def test_a_run_logs_in_with_a_password_of_its_file_and_a_role_with_one_of_the_environment(
    emulated_run: EmulatedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolved = emulated_run.directory / "config.resolved.toml"
    lines = resolved.read_text().splitlines()
    (number,) = (n for n, line in enumerate(lines, 1) if "sasl_plain_password" in line)
    (server,) = (line.split('"')[1] for line in lines if line.startswith("bootstrap_servers"))
    assert server != emulated_run.servers, "the listener that asks for a password"
    further = ["run", str(resolved), "--training.max_steps=5"]
    assert _refusal_of(further) == (
        "error: expected a value for kafka.sasl_plain_password, got the asterisks that replace a secret in "
        f"files ({resolved}, line {number}): set {VARIABLE} to the real one"
    )
    monkeypatch.setenv(VARIABLE, "wrong")
    assert _refusal_of(further) == (
        f"error: expected the broker at {server} to let kafka.sasl_plain_username '{USER}' in, got a "
        f'refusal of its password; set {VARIABLE} to the right one, or check kafka.sasl_mechanism ("PLAIN")'
    )
    # It takes the run's lineage, tells its last step once more, and has nothing left to do.
    trainer = [*CLI, "trainer", str(resolved)]
    environment = {**os.environ, **ENVIRONMENT, VARIABLE: PASSWORD}
    done = subprocess.run(trainer, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    roles = ("coordinator", "relay", "trainer", "worker", "dispatcher")
    assert all(any(f"-m streamrl {role} " in line for line in emulated_run.seen) for role in roles)
    said = [*emulated_run.seen, emulated_run.text(), done.stdout, done.stderr]
    assert not [line for line in said if PASSWORD in line]
    written = [path for path in emulated_run.directory.rglob("*") if path.is_file()]
    assert {"config.resolved.toml", "summary.json", "report.html", "trainer.log"} <= {path.name for path in written}
    assert not [path for path in written if PASSWORD.encode() in path.read_bytes()]


def _refusal_of(arguments: list[str]) -> str:
    """All that a command says on standard error, which ends with exit code 2."""
    done = ended(*arguments)
    assert done.returncode == 2, done.stdout + done.stderr
    return done.stderr.strip()
