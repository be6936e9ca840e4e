"""A start that is refused leaves every file of the run as it was: processes of a run under way read them."""

import asyncio
import fcntl
import hashlib
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from streamrl.bus.embedded import node
from streamrl.bus.kafka.topic_admin import apply_topics
from streamrl.consumers.training.identity_store import IDENTITY_FILE
from streamrl.deploy.local.run import run_locally
from streamrl.schemas.errors import BrokerError, UserError
from streamrl.settings.loading import load_settings
from streamrl.settings.tree import Settings
from tests.command import ended
from tests.pipeline.local_run import CLI, PATIENCE_S
from tests.progress import calm_s

CONFIG = """
[run]
directory = "{directory}"
name = "refused"
workers = 1
[data]
dataset = "chain_sum"
[loop]
groups_per_step = 2
num_generations = 2
[generation]
engine = "emulated"
[training]
backend = "emulated"
max_steps = 100000
[emulation]
time_scale = 50.0
"""


def write_config(directory: Path) -> Path:
    path = directory.parent / f"{directory.name}.toml"
    path.write_text(CONFIG.format(directory=directory))
    return path


def settings_in(directory: Path, *arguments: str) -> Settings:
    return load_settings(write_config(directory), list(arguments))


def checksums(root: Path) -> dict[str, str]:
    found = {path: path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}
    return {str(path.relative_to(root)): hashlib.sha256(content).hexdigest() for path, content in found.items()}


@contextmanager
def a_node_runs(kafka: Path) -> Iterator[None]:
    """As far as any other process can tell: whoever runs a node holds its lock."""
    (kafka / "node-1").mkdir(parents=True)
    with (kafka / "node-1" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.mark.processes
def test_a_second_start_of_a_running_run_changes_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "CLAIM_TIMEOUT_S", 0.1)
    monkeypatch.setattr("streamrl.deploy.wiring.broker._left_running", lambda progress: None)
    runs = tmp_path / "runs"
    run = runs / "refused"
    with a_node_runs(run / "kafka"):
        # What the run under way was started with, and its children read when they are started again.
        (run / "config.resolved.toml").write_text("[training]\nmax_steps = 100000\n")
        before = checksums(run)
        with pytest.raises(BrokerError, match="already runs"):
            run_locally(settings_in(runs, "--training.max_steps=6", "--training.learning_rate=1"))
        assert checksums(run) == before


def test_a_directory_that_cannot_be_written_is_refused_before_anything_is_started(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    runs.write_text("a file")
    with pytest.raises(UserError, match=r"expected to write into .*/runs for .*, got: Not a directory"):
        run_locally(settings_in(runs))


def test_a_disk_without_room_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage._replace(free=1 << 29))
    with pytest.raises(
        UserError, match=r"expected enough disk space, got too little: about 1.1 GB.*0.5 GB free"
    ) as told:
        run_locally(settings_in(tmp_path / "runs"))
    assert (told.value.exit_code, "\n" in str(told.value)) == (2, False)
    assert not (tmp_path / "runs").exists()


def test_topics_that_cannot_be_made_as_the_settings_say_are_refused(tmp_path: Path, bootstrap_servers: str) -> None:
    """As the dry run says; partitions cannot be taken away, and what lies in those beyond would never be trained."""
    asyncio.run(apply_topics(bootstrap_servers, "refused-topics", 50))
    settings = settings_in(
        tmp_path / "runs", "--run.name=refused-topics", f"--kafka.bootstrap_servers={bootstrap_servers}"
    )
    with pytest.raises(UserError, match=r"conflict: refused-topics.trajectories: has 50 partitions.*use another run"):
        run_locally(settings)
    assert not (tmp_path / "runs").exists()


def streamrl(*arguments: str, code: int) -> str:
    done = ended(*arguments)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_a_second_directory_with_the_name_of_a_living_run_is_refused_by_the_real_processes(
    tmp_path: Path, bootstrap_servers: str
) -> None:
    """And the first lives on; when it is over and its topics are deleted, the name is free."""
    broker = f"--kafka.bootstrap_servers={bootstrap_servers}"
    first, second = write_config(tmp_path / "d1"), write_config(tmp_path / "d2")
    streamrl("topics", "apply", "--run", "refused", "--bootstrap-servers", bootstrap_servers, code=0)
    with (tmp_path / "trainer.log").open("wb") as log:
        trainer = subprocess.Popen([*CLI, "trainer", str(first), broker], stdout=log, stderr=log)
    try:
        deadline = calm_s() + PATIENCE_S
        while "trainer ready" not in (tmp_path / "trainer.log").read_text():
            assert trainer.poll() is None, (tmp_path / "trainer.log").read_text()
            assert calm_s() < deadline
            time.sleep(0.1)
        before = checksums(tmp_path / "d1")
        assert f"refused/{IDENTITY_FILE}" in before
        text = streamrl("run", str(second), broker, code=2)
        (line,) = [line for line in text.splitlines() if line.startswith("error: ")]
        delete = f"streamrl topics rm --run refused --bootstrap-servers {bootstrap_servers}"
        for part in (str(tmp_path / "d1" / "refused"), "lineage 1", "--adopt", "--run.name", delete):
            assert part in line, line
        assert not (tmp_path / "d2").exists()
        assert (trainer.poll(), checksums(tmp_path / "d1")) == (None, before)
    finally:
        trainer.terminate()
        assert trainer.wait(60) == 128 + signal.SIGTERM
    _, *arguments = delete.split()
    assert "give --yes" in streamrl(*arguments, code=2)
    assert "removed: refused.steps" in streamrl(*arguments, "--yes", code=0)
