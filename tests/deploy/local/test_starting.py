"""The broker starts while the task is checked; a refused start leaves no file and no broker."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from streamrl.deploy.local.starting import broker_beside
from streamrl.schemas.errors import BrokerError, UserError

PATIENCE_S = 60


@contextmanager
def broker(data: Path, events: list[str], begun: threading.Event | None = None) -> Iterator[str]:
    (data / "node-1").mkdir(parents=True, exist_ok=True)
    events.append("started")
    if begun is not None:
        begun.set()
    try:
        yield "127.0.0.1:9"
    finally:
        events.append("stopped")


def test_the_broker_starts_while_the_check_runs(tmp_path: Path) -> None:
    events, begun = list[str](), threading.Event()

    def check() -> str:
        assert begun.wait(PATIENCE_S)
        events.append("checked")
        return "a warning"

    with broker_beside(broker(tmp_path / "kafka", events, begun), tmp_path / "kafka", check) as found:
        assert found == ("127.0.0.1:9", "a warning")
        assert events == ["started", "checked"]
    assert events == ["started", "checked", "stopped"]
    assert (tmp_path / "kafka" / "node-1").is_dir()


def refuse() -> None:
    raise UserError("expected a task, got none")


def test_a_refused_start_leaves_nothing(tmp_path: Path) -> None:
    events = list[str]()
    data = tmp_path / "runs" / "mine" / "kafka"
    with (
        pytest.raises(UserError, match="expected a task"),
        broker_beside(broker(data, events), data, refuse),
    ):
        raise AssertionError("refused")
    assert events == ["started", "stopped"]
    assert not [*tmp_path.iterdir()]


def test_a_refused_start_of_an_existing_run_keeps_its_files(tmp_path: Path) -> None:
    data = tmp_path / "runs" / "mine" / "kafka"
    data.mkdir(parents=True)
    (data / "records").write_text("earlier ones")
    with (
        pytest.raises(UserError, match="expected a task"),
        broker_beside(broker(data, []), data, refuse),
    ):
        raise AssertionError("refused")
    assert (data / "records").read_text() == "earlier ones"


INTERRUPTED = """
import signal, threading, time
from contextlib import contextmanager
from pathlib import Path
from streamrl.deploy.local.starting import broker_beside
from streamrl.schemas.stopping import handle_signals

data = Path("runs/mine/kafka")

def interrupt():
    signal.pthread_kill(threading.main_thread().ident, signal.SIGTERM)

@contextmanager
def broker():
    {while_it_starts}
    time.sleep(0.5)
    data.mkdir(parents=True)
    yield "127.0.0.1:9"
    print("stopped")

handle_signals()
start = threading.Thread.start
{before}
with broker_beside(broker(), data, lambda: None):
    print("not interrupted")
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("while_it_starts", "before"),
    [
        ("interrupt()", ""),
        ("pass", "threading.Thread.start = lambda thread: (start(thread), interrupt())"),
    ],
    ids=["after the check", "as the broker's thread starts"],
)
def test_an_interrupted_start_stops_a_broker_that_is_still_starting_and_leaves_nothing(
    while_it_starts: str, before: str, tmp_path: Path
) -> None:
    code = INTERRUPTED.format(while_it_starts=while_it_starts, before=before)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout, done.stderr.splitlines()[-1]) == ("stopped\n", "KeyboardInterrupt")
    assert not [*tmp_path.iterdir()]


def test_a_broker_that_does_not_start_is_reported_after_the_check(tmp_path: Path) -> None:
    data = tmp_path / "kafka"

    @contextmanager
    def failing() -> Iterator[str]:
        if data:
            raise BrokerError("no Java")
        yield ""

    with pytest.raises(BrokerError, match="no Java"), broker_beside(failing(), data, lambda: None):
        raise AssertionError("failed")
    with pytest.raises(UserError, match="expected a task"), broker_beside(failing(), data, refuse):
        raise AssertionError("refused")
