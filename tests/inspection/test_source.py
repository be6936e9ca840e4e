import asyncio
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from streamrl.bus.embedded.cluster import start_cluster
from streamrl.bus.kafka.bus import KafkaBus
from streamrl.bus.kafka.settings import KafkaSettings
from streamrl.bus.kafka.topic_admin import apply_topics
from streamrl.bus.port import Outgoing
from streamrl.inspection.process import NICENESS
from streamrl.inspection.source import PastRun, copy_sparse, history_of, open_run, own_broker, running_brokers
from streamrl.schemas.errors import UserError
from streamrl.settings.loading import as_toml
from streamrl.settings.run_directory import RunDirectory
from streamrl.settings.tree import Settings


def made_run(parent: Path, **kafka: str) -> PastRun:
    settings = Settings.model_validate(
        {
            "run": {"name": "r", "directory": str(parent)},
            "model": {"path": "m"},
            "data": {"path": "p.jsonl"},
            "kafka": kafka,
        }
    )
    directory = RunDirectory(parent / "r")
    directory.create()
    directory.config.write_text(as_toml(settings))
    return open_run(directory.path)


def test_a_directory_that_holds_runs_is_refused_with_their_names(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"got {tmp_path}, which has none$"):
        open_run(tmp_path)
    for name in ("b", "a"):
        RunDirectory(tmp_path / "runs" / name).create()
        RunDirectory(tmp_path / "runs" / name).config.touch()
    (tmp_path / "runs" / "no-run").mkdir()
    with pytest.raises(UserError, match=rf"got {tmp_path}, which has none; runs are in {tmp_path}/runs: a, b$"):
        open_run(tmp_path)
    with pytest.raises(UserError, match=rf"got {tmp_path}/nowhere, which does not exist$"):
        open_run(tmp_path / "nowhere")


def test_holes_stay_holes_when_logs_are_copied(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    with source.open("wb") as file:
        file.write(b"begin")
        file.seek(20 << 20)
        file.write(b"middle")
        file.truncate(40 << 20)
    copy_sparse(str(source), str(target))
    assert target.read_bytes() == source.read_bytes()
    assert os.stat(target).st_blocks * 512 < 4 << 20


def test_without_any_broker_it_says_what_to_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAMRL_CACHE", str(tmp_path / "cache"))
    with (
        pytest.raises(UserError, match=r"STREAMRL_KAFKA__BOOTSTRAP_SERVERS.*--export"),
        history_of(made_run(tmp_path), None, tmp_path, lambda line: None),
    ):
        pass


@pytest.mark.processes
def test_reading_does_not_change_a_run_but_a_copy(tmp_path: Path) -> None:
    run = made_run(tmp_path)
    with start_cluster(run.directory.kafka, heap_mb=256) as cluster:
        address = cluster.bootstrap_servers

        async def write() -> None:
            await apply_topics(address, "r", 2)
            publisher = await KafkaBus(KafkaSettings(bootstrap_servers=address)).publisher("w")
            for number in range(5):
                await publisher.publish(Outgoing("r.trajectories", b"%d" % number, None, 1))
            await publisher.close()

        asyncio.run(write())
        with history_of(run, None, tmp_path / "unused", lambda line: None) as live:
            assert asyncio.run(values(live)) == [b"0", b"1", b"2", b"3", b"4"]
        assert not (tmp_path / "unused").exists()
    before = files(run.directory.path)
    with history_of(run, None, tmp_path / "scratch", lambda line: None) as history:
        assert asyncio.run(values(history)) == [b"0", b"1", b"2", b"3", b"4"]
    assert files(run.directory.path) == before


async def values(history: object) -> list[bytes | None]:
    return [record.value async for record in history.records("r.trajectories")]  # type: ignore[attr-defined]


def files(directory: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in directory.rglob("*")}


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


@pytest.mark.processes
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
    look = f"inspect._give_way_to(inspect.Path({run!r}), {NICENESS})"
    command = f"import os; from streamrl.cli import inspect; {look}; print(os.nice(0))"
    done = subprocess.run([sys.executable, "-c", command], cwd=cwd, capture_output=True, text=True, check=True)
    return int(done.stdout)
