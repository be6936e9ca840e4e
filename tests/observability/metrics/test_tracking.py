import asyncio
import json
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
from structlog.testing import capture_logs
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from streamrl.bus.memory import MemoryBus
from streamrl.bus.port import Outgoing
from streamrl.observability.metrics import tracking as module
from streamrl.observability.metrics.settings import TrackingSettings
from streamrl.observability.metrics.tracking import Tracker, open_writer, try_trackers
from streamrl.schemas import import_path
from streamrl.schemas.errors import SettingsError
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.reports import StepReport
from tests.schemas.examples import example, examples


@dataclass
class Notebook:
    """A writer that keeps what it is given, and fails at a step if asked to."""

    fails_at: int | None = None
    steps: list[int] = field(default_factory=list)
    is_closed: bool = False

    def write(self, step: int, at: float, metrics: Mapping[str, float]) -> None:
        if step == self.fails_at:
            raise OSError("no space left")
        self.steps.append(step)

    def close(self) -> None:
        self.is_closed = True


class SlowNotebook(Notebook):
    """One whose disk is slow."""

    def __init__(self) -> None:
        super().__init__()
        self.writing, self.goes_on = threading.Event(), threading.Event()
        self.closed_while_writing = False

    def write(self, step: int, at: float, metrics: Mapping[str, float]) -> None:
        self.writing.set()
        assert self.goes_on.wait(30)
        super().write(step, at, metrics)
        self.writing.clear()

    def close(self) -> None:
        self.closed_while_writing = self.writing.is_set()
        super().close()


async def bus_with(*steps: tuple[int, int]) -> MemoryBus:
    bus = MemoryBus()
    bus.create_topic("r.steps", 1)
    publisher, report = await bus.publisher("p"), examples()["step-report"]
    await publisher.publish(Outgoing("r.steps", b"rubbish", None))
    await publisher.publish(Outgoing.of("r.steps", report.replace(micro_batches=(), step=0), key="grpo"))
    for lineage, step in steps:
        message = report.replace(step=step, version=PolicyVersion(lineage, step), metrics={"reward": step / 10})
        await publisher.publish(Outgoing.of("r.steps", message, key="grpo"))
    return bus


def tracker(bus: MemoryBus, folder: Path, *names: str) -> Tracker:
    return Tracker(bus, "r", TrackingSettings.model_validate({"to": names}), folder, {"seed": 1})


async def finished(tracked: Tracker) -> None:
    tracked.open()
    stop = asyncio.Event()
    stop.set()
    await tracked.run(stop)


def with_notebooks(monkeypatch: pytest.MonkeyPatch, **notebooks: Notebook) -> None:
    def open_notebook(name: str, _project: str, _run: str, folder: Path, _config: object) -> Notebook:
        folder.mkdir(parents=True, exist_ok=True)
        if name not in notebooks:
            raise SettingsError(f"{name} is away")
        return notebooks[name]

    monkeypatch.setattr(module, "open_writer", open_notebook)


async def test_a_step_is_written_once_also_over_restarts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = Notebook(), Notebook()
    with_notebooks(monkeypatch, wandb=first)
    await finished(tracker(await bus_with((1, 1), (1, 2), (1, 3)), tmp_path, "wandb"))
    with_notebooks(monkeypatch, wandb=second)
    await finished(tracker(await bus_with((1, 1), (1, 2), (1, 3), (2, 3), (2, 4)), tmp_path, "wandb"))
    assert (first.steps, second.steps) == ([1, 2, 3], [4])
    assert first.is_closed


async def test_tracking_never_ends_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full, fine, other = Notebook(fails_at=2), Notebook(), Notebook()
    with_notebooks(monkeypatch, wandb=full, trackio=fine, tensorboard=other)
    await finished(tracker(await bus_with((1, 1), (1, 2), (1, 3)), tmp_path, "wandb", "tensorboard", "trackio"))
    assert (full.steps, fine.steps) == ([1], [1, 2, 3])
    # Restarted while one of them cannot be opened any more, such as one whose network is away.
    again = Notebook()
    with_notebooks(monkeypatch, trackio=again, tensorboard=Notebook())
    with capture_logs() as said:
        await finished(tracker(await bus_with((1, 3), (1, 4)), tmp_path, "wandb", "tensorboard", "trackio"))
    assert again.steps == [4]
    assert "cannot be opened again" in str(said)


def test_a_named_tracker_opens_or_the_run_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fine = Notebook()
    with_notebooks(monkeypatch, trackio=fine)
    with pytest.raises(SettingsError, match="wandb is away") as raised:
        tracker(MemoryBus(), tmp_path, "trackio", "wandb").open()
    assert raised.value.__cause__ is None  # an error that came from itself would hold up whoever looks for its cause
    assert fine.is_closed
    # The user takes it out, or mends it.
    with_notebooks(monkeypatch, trackio=Notebook(), wandb=Notebook())
    mended = tracker(MemoryBus(), tmp_path, "trackio", "wandb")
    mended.open()
    mended.close()


class BrokenLibrary:
    """Stands for ``module.TensorBoardWriter``: fails so often, then opens."""

    def __init__(self, error: Exception, failures: int) -> None:
        self.error, self.failures = error, failures

    def __call__(self, _folder: Path) -> Notebook:
        self.failures -= 1
        if self.failures >= 0:
            raise self.error
        return Notebook()


def test_a_tracker_that_is_broken_by_chance_is_opened_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_path, "PAUSE_S", 0.0)
    chance = SystemError("AST constructor recursion depth mismatch (before=228, after=281)")
    monkeypatch.setattr(module, "TensorBoardWriter", BrokenLibrary(chance, 2))
    with capture_logs() as said:
        opened = open_writer("tensorboard", "p", "r", tmp_path, {})
    assert isinstance(opened, Notebook)
    assert [line["name"] for line in said] == ["tensorboard", "tensorboard"]


def test_a_message_of_a_library_over_several_lines_becomes_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TensorBoardWriter", BrokenLibrary(ValueError("no\n  such\nthing"), 1))
    with pytest.raises(SettingsError, match=r"open tensorboard of tracking.to in .*, got ValueError: no such thing; "):
        open_writer("tensorboard", "p", "r", tmp_path, {})


def test_a_folder_that_is_none_is_said(tmp_path: Path) -> None:
    (tmp_path / "tracking").write_text("a file")
    with pytest.raises(SettingsError, match=r"expected to open tensorboard .*; make .* writable, or remove it"):
        open_writer("tensorboard", "p", "r", tmp_path / "tracking/tensorboard", {})
    with pytest.raises(SettingsError):
        tracker(MemoryBus(), tmp_path / "tracking", "tensorboard").open()


@pytest.mark.processes
def test_wandb_without_a_login_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setattr("sys.stdin", StringIO())
    for refuse in (
        lambda: try_trackers(TrackingSettings(to=("wandb",))),
        lambda: open_writer("wandb", "p", "r", tmp_path, {}),
    ):
        with pytest.raises(SettingsError, match="wandb login"):
            refuse()
    wandb.teardown()


async def test_files_are_closed_only_after_the_thread_that_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = SlowNotebook()
    with_notebooks(monkeypatch, wandb=slow)
    tracked = tracker(await bus_with((1, 1)), tmp_path, "wandb")
    tracked.open()
    running = asyncio.create_task(tracked.run(asyncio.Event()))
    while not slow.writing.is_set():
        await asyncio.sleep(0.001)
    running.cancel()
    asyncio.get_running_loop().call_later(0.2, slow.goes_on.set)
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (slow.steps, slow.is_closed, slow.closed_while_writing) == ([1], True, False)


async def test_tensorboard_gets_every_metric_at_its_step(tmp_path: Path) -> None:
    await finished(tracker(await bus_with((1, 1), (1, 2)), tmp_path, "tensorboard"))
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    tensors = [(each.step, each.wall_time) for each in events.Tensors("reward")]
    assert [step for step, _ in tensors] == [1, 2]
    assert tensors[0][1] == example("step-report", StepReport).sent_at


@pytest.mark.processes
async def test_wandb_gets_an_offline_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    await finished(tracker(await bus_with((1, 1), (1, 2)), tmp_path, "wandb"))
    (kept,) = (tmp_path / "wandb").rglob("run-*.wandb")
    assert b"reward" in kept.read_bytes()


class DyingWandb:
    """Stands for the library. Its service dies while each of the first ``deaths`` runs begins."""

    Settings = SimpleNamespace

    def __init__(self, deaths: int) -> None:
        self.deaths, self.is_dead, self.begun = deaths, False, 0

    def init(self, **_options: object) -> "DyingWandb":
        if self.is_dead:
            raise BrokenPipeError(32, "Broken pipe")
        self.begun += 1
        self.is_dead = self.begun <= self.deaths
        return self

    def define_metric(self, *_: object, **__: object) -> None:
        if self.is_dead:
            raise ConnectionResetError(104, "Connection reset by peer")

    def teardown(self) -> None:
        was_dead, self.is_dead = self.is_dead, False
        if was_dead:
            raise ConnectionResetError(104, "Connection reset by peer")


def test_a_service_of_wandb_that_dies_while_a_run_begins_is_started_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = DyingWandb(deaths=1)
    monkeypatch.setattr(module, "_library", lambda _module, _package: wandb)
    with capture_logs() as said:
        open_writer("wandb", "p", "r", tmp_path, {})
    assert (wandb.begun, wandb.is_dead) == (2, False)
    assert [line["event"] for line in said] == ["W&B's service died, starting it again"]


def test_a_service_of_wandb_that_dies_each_time_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_library", lambda _module, _package: DyingWandb(deaths=9))
    with pytest.raises(SettingsError, match=r"expected to open wandb .*got Conn.*; try again, or remove it"):
        open_writer("wandb", "p", "r", tmp_path, {})


class FailingServer(ThreadingHTTPServer):
    """Stands for W&B: lets a run begin; with ``is_gone`` set it takes requests and answers none."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answering)
        self.is_gone, self.released = threading.Event(), threading.Event()

    def close(self) -> None:
        self.released.set()
        self.shutdown()
        self.server_close()


class _Answering(BaseHTTPRequestHandler):
    server: FailingServer
    protocol_version = "HTTP/1.1"
    project: ClassVar = {"name": "p", "entity": {"name": "e"}}
    # Its client dies of an answer that lacks these.
    known: ClassVar = {
        b"UpsertBucket": {"upsertBucket": {"bucket": {"id": "i", "name": "r", "project": project}, "inserted": True}},
        b"CreateRunFiles": {"createRunFiles": {"runID": "i", "uploadHeaders": [], "files": []}},
    }

    def do_POST(self) -> None:
        asked = self.rfile.read(int(self.headers.get("content-length", 0)))
        if self.server.is_gone.is_set():
            self.server.released.wait()
            return
        told = next((known for name, known in self.known.items() if name in asked), {})
        answer = json.dumps({"data": told}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def wandb_server() -> Iterator[FailingServer]:
    server = FailingServer()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.close()
    thread.join()


@pytest.mark.processes
@pytest.mark.timeout(120)
def test_a_server_of_wandb_that_is_gone_does_not_hold_up_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wandb_server: FailingServer
) -> None:
    pytest.importorskip("wandb")
    for name in ("CACHE_DIR", "CONFIG_DIR", "DATA_DIR"):
        monkeypatch.setenv(f"WANDB_{name}", str(tmp_path / name))
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{wandb_server.server_port}")
    monkeypatch.setattr(module, "WANDB_FINISH_S", 1.0)
    writer = open_writer("wandb", "p", "r", tmp_path, {})
    writer.write(1, 0.0, {"reward": 0.5})
    wandb_server.is_gone.set()
    with capture_logs() as said:
        writer.close()
    (kept,) = (tmp_path / "wandb").glob("run-*/run-*.wandb")
    assert b"reward" in kept.read_bytes()
    assert f"`wandb sync {kept.parent}`" in said[0]["event"]


def test_a_tracker_whose_package_is_missing_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "trackio", None)
    with pytest.raises(SettingsError, match="pip install trackio"):
        open_writer("trackio", "p", "r", tmp_path, {})
