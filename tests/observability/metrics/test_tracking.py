import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from bus.memory import MemoryBus
from bus.port import Outgoing
from observability.metrics import tracking as module
from observability.metrics.settings import TrackingSettings
from observability.metrics.tracking import Tracker, open_writer
from schemas.errors import SettingsError
from schemas.identifiers import PolicyVersion
from tests.schemas.examples import examples


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
    stop = asyncio.Event()
    stop.set()
    await tracked.run(stop)


def with_notebooks(monkeypatch: pytest.MonkeyPatch, **notebooks: Notebook) -> None:
    def open_notebook(name: str, _project: str, _run: str, folder: Path, _config: object) -> Notebook:
        folder.mkdir(parents=True, exist_ok=True)
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


async def test_tracking_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full, fine = Notebook(fails_at=2), Notebook()
    with_notebooks(monkeypatch, wandb=full, trackio=fine)
    await finished(tracker(await bus_with((1, 1), (1, 2), (1, 3)), tmp_path, "wandb", "tensorboard", "trackio"))
    assert (full.steps, fine.steps) == ([1], [1, 2, 3])


async def test_tensorboard_gets_every_metric_at_its_step(tmp_path: Path) -> None:
    await finished(tracker(await bus_with((1, 1), (1, 2)), tmp_path, "tensorboard"))
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    tensors = [(each.step, each.wall_time) for each in events.Tensors("reward")]
    assert [step for step, _ in tensors] == [1, 2]
    assert tensors[0][1] == examples()["step-report"].sent_at


@pytest.mark.slow
async def test_wandb_gets_an_offline_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    await finished(tracker(await bus_with((1, 1), (1, 2)), tmp_path, "wandb"))
    (kept,) = (tmp_path / "wandb").rglob("run-*.wandb")
    assert b"reward" in kept.read_bytes()


def test_a_tracker_whose_package_is_missing_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "trackio", None)
    with pytest.raises(SettingsError, match="pip install trackio"):
        open_writer("trackio", "p", "r", tmp_path, {})
