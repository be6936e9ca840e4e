import fcntl
import os
import subprocess
import sys
from pathlib import Path

from inspection.process import NICENESS
from inspection.source import own_broker, running_brokers
from settings.run_directory import RunDirectory


def node(folder: Path, port: int) -> Path:
    folder.mkdir(parents=True)
    (folder / "server.properties").write_text(f"node.id=1\nlisteners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://x:1\n")
    (folder / "lock").touch()
    return folder


def test_a_broker_that_holds_its_folder_is_found_where_it_listens(tmp_path: Path) -> None:
    nodes = [node(tmp_path / "node-1", 21), node(tmp_path / "node-2", 22)]
    assert running_brokers(nodes) is None
    with (nodes[0] / "lock").open() as first, (nodes[1] / "lock").open() as second:
        fcntl.flock(first, fcntl.LOCK_EX)
        assert running_brokers(nodes) is None
        fcntl.flock(second, fcntl.LOCK_EX)
        assert running_brokers(nodes) == "127.0.0.1:21,127.0.0.1:22"
    assert running_brokers(nodes) is None


def test_a_command_that_looks_gives_way_unless_a_broker_has_to_be_started(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "runs" / "a")
    run.create()
    run.config.touch()
    assert own_broker(run) is None
    assert niceness_of_an_audit("a", tmp_path) == NICENESS  # its topics are elsewhere: nothing has to be started
    lock = node(run.kafka / "node-1", 21) / "lock"
    assert niceness_of_an_audit("a", tmp_path) == os.nice(0)
    with lock.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert own_broker(run) == "127.0.0.1:21"
        assert niceness_of_an_audit("a", tmp_path) == NICENESS
        assert niceness_of_an_audit("absent", tmp_path) == os.nice(0)


def niceness_of_an_audit(run: str, cwd: Path) -> int:
    """When it comes to its imports."""
    command = "import os; from streamrl.cli import inspect; inspect._give_way_to(inspect.Path(%r)); print(os.nice(0))"
    done = subprocess.run([sys.executable, "-c", command % run], cwd=cwd, capture_output=True, text=True, check=True)
    return int(done.stdout)
