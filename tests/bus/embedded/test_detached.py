"""A cluster that is put up by one process, seen by another, and put down by a third."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from streamrl.bus.embedded.detached import down, status, up
from streamrl.bus.embedded.node import free_ports, live_brokers
from streamrl.schemas.errors import BrokerError

UP = (
    "import sys; from pathlib import Path; "
    "from streamrl.bus.embedded.detached import up; up(data_dir=Path(sys.argv[1]))"
)


@pytest.mark.processes
def test_a_detached_cluster_outlives_its_starter_until_it_is_put_down(tmp_path: Path) -> None:
    try:
        subprocess.run([sys.executable, "-c", UP, str(tmp_path)], check=True)
        found = status(tmp_path)
        assert found.running
        assert live_brokers(found.nodes[0].port).ids == {1}
        assert up(data_dir=tmp_path) == found
        with pytest.raises(BrokerError, match="already runs"):
            up(nodes=3, data_dir=tmp_path)
        with pytest.raises(BrokerError, match="already runs"):
            up(port=free_ports(1)[0], data_dir=tmp_path)
        os.kill(found.pids[0], 9)
        while status(tmp_path).running:
            time.sleep(0.01)
        again = up(data_dir=tmp_path)
        assert again.running
        assert again.pids != found.pids
    finally:
        assert down(tmp_path)
    assert not status(tmp_path).running
    assert status(tmp_path).nodes == ()
    assert not down(tmp_path)
    with pytest.raises(OSError):
        live_brokers(again.nodes[0].port)


def test_nothing_was_ever_started_here(tmp_path: Path) -> None:
    folder = tmp_path / "none"
    assert not status(folder).running
    assert not down(folder)
    assert not folder.exists()


def test_a_folder_that_cannot_be_made_gives_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "x"
    with pytest.raises(
        BrokerError, match=rf"got {folder}: Not a directory; name another with --data-dir, or set STREAM"
    ):
        up(data_dir=folder)
    assert not status(folder).running
    assert not down(folder)


def test_a_pid_that_now_belongs_to_a_stranger_is_neither_running_nor_stopped(tmp_path: Path) -> None:
    node = {"pid": os.getpid(), "started": "long ago", "port": 9092}
    (tmp_path / "state.json").write_text(json.dumps({"data_dir": str(tmp_path), "since": 1.0, "nodes": [node]}))
    assert not status(tmp_path).running
    assert status(tmp_path).pids == ()
    assert not down(tmp_path)
    assert status(tmp_path).nodes == ()


def test_a_state_file_that_is_not_ours_is_refused(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text("{")
    with pytest.raises(BrokerError, match="remove the file"):
        status(tmp_path)
