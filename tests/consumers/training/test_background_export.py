"""Weights are exported from a copy beside the next step; nobody is told of them before they can be fetched."""

import asyncio
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from streamrl.consumers.training.failpoints import Failpoint
from streamrl.consumers.training.model import WeightCopy, load_model, named_tensors
from streamrl.consumers.training.policy import ComputeThread
from streamrl.consumers.training.trainer import Trainer
from streamrl.schemas.errors import DiskFull
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.weights.export import WeightExporter
from tests.consumers.training.trainer_harness import TRAINING, TrainerHarness
from tests.progress import within

SPARSE = TRAINING.model_copy(update={"checkpoint_every": 50})


@dataclass
class Gate:
    """The place where weights are exported: a thread, before which calls wait while the gate is shut."""

    opened: asyncio.Event
    thread: ComputeThread = field(default_factory=lambda: ComputeThread(1))

    async def __call__(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        await self.opened.wait()
        return await self.thread(call, *args, **kwargs)

    def close(self) -> None:
        self.thread.close()


def gated(
    harness: TrainerHarness, *, shut_at: Failpoint | None = None, **changes: Any
) -> tuple[Trainer, asyncio.Event, list[Failpoint]]:
    """A trainer, the gate before its exports, which is shut at a point if asked, and the points that it passes."""
    opened, passed, opens = asyncio.Event(), list[Failpoint](), iter((False, True))
    opened.set()

    def open_compute() -> Any:
        return Gate(opened) if next(opens) else ComputeThread(1)

    def failpoint(point: Failpoint) -> None:
        passed.append(point)
        if point is shut_at:
            opened.clear()

    return harness.trainer(open_compute=open_compute, failpoint=failpoint, **changes), opened, passed


@pytest.fixture
def harness(tmp_path: Path, model_path: Path) -> TrainerHarness:
    return TrainerHarness.make(tmp_path, model_path)


async def test_the_next_step_is_computed_while_weights_are_exported(tmp_path: Path, model_path: Path) -> None:
    straight, held = (TrainerHarness.make(tmp_path / name, model_path) for name in ("straight", "held"))
    for harness in (straight, held):
        for number in range(6):
            await harness.publish_group(number)
    async with straight.running(straight.trainer(training=SPARSE)):
        await straight.until_version(1, 3)
    trainer, opened, passed = gated(held, shut_at=Failpoint.START_ANNOUNCED, training=SPARSE)
    async with held.running(trainer):
        # The second step is taken; it is not copied, let alone the third begun, before the first one is exported.
        await held.until(lambda: passed.count(Failpoint.LEFT_OUT_SKIPPED) == 2)
        await asyncio.sleep(0.05)
        assert passed.count(Failpoint.WEIGHTS_COPIED) == 1
        assert passed.count(Failpoint.GROUP_TAKEN) == 4
        assert [report.version for report in held.reports()] == [PolicyVersion(1, 0)]
        opened.set()
        await held.until_version(1, 3)
    assert [report.version.number for report in held.reports()] == [0, 1, 2, 3]
    assert [report.digests for report in held.reports()] == [report.digests for report in straight.reports()]
    for number in (1, 2, 3):
        one, other = (harness.root / "weights" / f"1-{number}" / "model.safetensors" for harness in (straight, held))
        assert one.read_bytes() == other.read_bytes()


async def test_an_orderly_end_waits_for_the_export(harness: TrainerHarness) -> None:
    trainer, opened, passed = gated(harness, training=SPARSE)
    stop = asyncio.Event()
    running = asyncio.create_task(trainer.run(stop))
    await harness.until(lambda: Failpoint.START_ANNOUNCED in passed)
    opened.clear()
    for number in range(2):
        await harness.publish_group(number)
    await harness.until(lambda: Failpoint.METRICS_WRITTEN in passed)
    stop.set()
    await harness.until(lambda: Failpoint.SNAPSHOT_TAKEN in passed)
    await asyncio.sleep(0.05)
    assert not running.done()
    opened.set()
    await within(running, 20)
    assert harness.reports()[-1].version == PolicyVersion(1, 1)
    assert [manifest.step for manifest in harness.store().manifests()] == [1]


async def test_every_announced_version_can_be_fetched(harness: TrainerHarness) -> None:
    checked: list[PolicyVersion] = []

    def failpoint(point: Failpoint) -> None:
        if point is Failpoint.ANNOUNCED:
            report = harness.reports()[-1]
            manifest = (harness.root / "weights" / str(report.version) / "manifest.json").read_bytes()
            assert hashlib.sha256(manifest).hexdigest() == report.manifest_sha256
            checked.append(report.version)

    async with harness.running(harness.trainer(training=SPARSE, failpoint=failpoint)):
        for number in range(4):
            await harness.publish_group(number)
        await harness.until_version(1, 2)
    assert checked[-1] == PolicyVersion(1, 2)


async def test_an_export_that_fails_ends_a_trainer_that_waits_for_groups(
    harness: TrainerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = WeightExporter.export

    def export(self: WeightExporter, tensors: Any, texts: Any, version: PolicyVersion, *rest: Any) -> str:
        if version.number == 1:
            raise DiskFull("expected room, got none")
        return plain(self, tensors, texts, version, *rest)

    monkeypatch.setattr(WeightExporter, "export", export)
    for number in range(2):
        await harness.publish_group(number)
    with pytest.raises(DiskFull):
        await within(harness.trainer(training=SPARSE).run(asyncio.Event()), 20)
    assert [report.step for report in harness.reports()] == [0]


async def test_steps_between_exports_are_reported_without_weights(harness: TrainerHarness) -> None:
    changes = {"weight_sync_steps": 2, "max_steps": 3}
    for number in range(6):
        await harness.publish_group(number)
    async with harness.running(harness.trainer(training=SPARSE.model_copy(update=changes))):
        await harness.until_version(1, 3)
    reports = harness.reports()
    assert [report.manifest_sha256 is not None for report in reports] == [True, False, True, True]
    assert all(report.digests for report in reports)


def test_a_copy_stays_as_it_was_until_the_next_one(model_path: Path) -> None:
    model, copy = load_model(model_path, torch.device("cpu")), WeightCopy(torch.bfloat16)
    before = {name: tensor.bfloat16() for name, tensor in named_tensors(model).items()}
    taken = copy.take(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 1.0
    assert taken.keys() == before.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in taken.items())
    pointers = {name: tensor.data_ptr() for name, tensor in taken.items()}
    again = copy.take(model)
    assert {name: tensor.data_ptr() for name, tensor in again.items()} == pointers
    assert all(torch.equal(tensor, named_tensors(model)[name].bfloat16()) for name, tensor in again.items())
