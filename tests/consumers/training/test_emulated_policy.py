import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from streamrl.consumers.training.emulation import EmulatedCompute, EmulatedDevice, EmulatedPolicy, forward_backward_s
from streamrl.consumers.training.trainer import Trainer
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.profiles import TrainingCosts
from streamrl.schemas.topics import TRAJECTORIES
from streamrl.schemas.trajectories import Trajectory
from streamrl.weights.export import WeightExporter
from tests.consumers.training.factories import make_micro_batch
from tests.consumers.training.trainer_harness import RUN, TrainerHarness

DURATIONS = TrainingCosts(
    forward_backward_s_per_token=0.5, forward_backward_s_per_micro_batch=1.0, optimizer_step_s=7.0, export_s=3.0
)


@pytest.fixture
def harness(tmp_path: Path) -> TrainerHarness:
    return TrainerHarness.make(tmp_path, Path("no model"))


def emulated(harness: TrainerHarness, scale: float = 1000.0, durations: TrainingCosts = DURATIONS) -> Trainer:
    device, exporting = EmulatedDevice(scale), EmulatedDevice(scale)

    def open_policy(restored: Any) -> EmulatedPolicy:
        weights = WeightExporter(harness.root / "weights", 20)
        return EmulatedPolicy(durations, device, exporting, weights, harness.store(), restored)

    return harness.trainer(
        open_policy=open_policy,
        open_compute=lambda: EmulatedCompute(device),
        open_exporter=lambda: EmulatedCompute(exporting),
    )


def test_a_micro_batch_costs_by_its_tokens_their_squares_and_itself() -> None:
    batch = make_micro_batch(5)
    lengths = batch.lengths.astype(float)
    plain = TrainingCosts(
        forward_backward_s_per_token=2, forward_backward_s_per_squared_token=3, forward_backward_s_per_micro_batch=5
    )
    assert forward_backward_s(batch, plain) == pytest.approx(2 * lengths.sum() + 3 * (lengths**2).sum() + 5)
    padded = plain.model_copy(update={"padding_counts": True})
    rows, width = batch.input_ids.shape
    assert forward_backward_s(batch, padded) == pytest.approx(2 * rows * width + 3 * rows * width**2 + 5)
    ids = batch.input_ids.copy()
    ids[1:, :3], ids[1:, 3] = ids[0, :3], range(30, 34)
    ids[0, 3] = 34
    shared = replace(batch, input_ids=ids, packing="shared")  # a prompt of three tokens, computed once
    tokens, squares = lengths.sum() - 4 * 3, (lengths**2).sum() - 4 * 3**2
    assert forward_backward_s(shared, padded) == pytest.approx(2 * tokens + 3 * squares + 5)


async def test_steps_take_their_time_and_publish_real_weights(harness: TrainerHarness) -> None:
    async with harness.running(emulated(harness)):
        for number in range(4):
            await harness.publish_group(number)
        await harness.until_version(1, 2)
    start, first, second = harness.reports()
    assert [report.step for report in (start, first, second)] == [0, 1, 2]
    for report in (first, second):
        refs = [ref for batch in report.micro_batches for ref in batch]
        logs = harness.bus.log(TRAJECTORIES.full_name(RUN)).partitions
        messages = [logs[ref.partition][ref.offset].message() for ref in refs]
        tokens = sum(len(one.token_ids) + 3 for one in messages if isinstance(one, Trajectory))
        expected = 0.5 * tokens + len(report.micro_batches) + 7.0
        assert report.metrics["emulated/train_s"] == pytest.approx(expected)
    manifest = json.loads((harness.root / "weights" / "1-2" / "manifest.json").read_bytes())
    assert [file["name"] for file in manifest["files"]] == ["model.safetensors", "config.json"]


async def test_a_restart_goes_on_from_the_checkpoint(harness: TrainerHarness) -> None:
    async with harness.running(emulated(harness)):
        for number in range(4):
            await harness.publish_group(number)
        await harness.until_version(1, 2)
    async with harness.running(emulated(harness)):
        await harness.until_version(2, 2)
        for number in range(4, 6):
            await harness.publish_group(number, version=PolicyVersion(1, 2))
        await harness.until_version(2, 3)
    assert all(len(report.group_ids) == 2 for report in harness.reports() if report.group_ids)
    restored = harness.store().newest()
    assert restored is not None
    assert restored.state.manifest.policy_version == PolicyVersion(2, 3)
