"""The modes of the loop, on a real model: what they have in common, and what they do not."""

import asyncio
import json
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from streamrl.consumers.algorithms.settings import AlgorithmSettings
from streamrl.consumers.batching.settings import BatchingSettings
from streamrl.consumers.training.failpoints import Failpoint
from streamrl.schemas.errors import SettingsError
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.reports import StepReport
from streamrl.schemas.trajectories import Trajectory
from tests.consumers.training.factories import VOCABULARY, make_trajectory
from tests.consumers.training.trainer_harness import LOOP, TRAINING, TrainerHarness, group

GROUPS = 8
STEPS = 3
NARROW: dict[str, Any] = {"batching": BatchingSettings(token_budget=48), "lookahead": 1.0}


@dataclass
class Passed:
    """The points that a trainer passed."""

    points: list[Failpoint] = field(default_factory=list)

    def __call__(self, point: Failpoint) -> None:
        self.points.append(point)

    def groups_before_the_first_gradient(self) -> int:
        return self.points[: self.points.index(Failpoint.GRADIENT_ADDED)].count(Failpoint.GROUP_TAKEN)


def loop(mode: str, **changes: Any) -> Any:
    return LOOP.model_copy(update={"mode": mode, "groups_per_step": GROUPS, **changes})


def trajectories(number: int) -> list[Trajectory]:
    """A group of completions of unlike lengths, sampled by the weights of the step that trains it."""
    random = np.random.default_rng(number)
    version = PolicyVersion(1, number // GROUPS)
    return [
        make_trajectory(
            f"p/{number}/0",
            index,
            reward=float(random.random()),
            tokens=random.integers(1, VOCABULARY, size=int(random.integers(2, 40))).tolist(),
            version=version,
            created_at=float(number),
        )
        for index in range(2)
    ]


async def trained(
    root: Path, model_path: Path, mode: str, algorithm: AlgorithmSettings
) -> tuple[list[StepReport], dict[str, torch.Tensor], Passed]:
    """The steps, the last weights, and the points passed."""
    harness, passed = TrainerHarness.make(root, model_path), Passed()
    for number in range(GROUPS * STEPS):
        await harness.publish(*trajectories(number))
    trainer = harness.trainer(
        loop=loop(mode),
        algorithm=algorithm,
        training=TRAINING.model_copy(update={"max_steps": STEPS}),
        **NARROW,
        failpoint=passed,
    )
    async with harness.running(trainer):
        await harness.until_version(1, STEPS)
    steps = [report for report in harness.reports() if report.group_ids]
    return steps, dict(load_file(root / "weights" / f"1-{STEPS}" / "model.safetensors")), passed


def ids(report: StepReport) -> set[str]:
    return {ref.trajectory_id for batch in report.micro_batches for ref in batch}


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
async def test_stream_trains_what_synchronous_does_and_its_gradient_equals_it(
    tmp_path: Path, model_path: Path, loss_type: str
) -> None:
    algorithm = AlgorithmSettings.model_validate({"loss_type": loss_type})
    whole, expected, waited = await trained(tmp_path / "synchronous", model_path, "synchronous", algorithm)
    streamed, found, began = await trained(tmp_path / "stream", model_path, "stream", algorithm)
    assert [ids(report) for report in streamed] == [ids(report) for report in whole]
    assert [report.micro_batches for report in streamed] != [report.micro_batches for report in whole]
    for one, other in zip(streamed, whole, strict=True):
        assert one.metrics["grad_norm"] == pytest.approx(other.metrics["grad_norm"], rel=1e-4)
        assert one.metrics["loss"] == pytest.approx(other.metrics["loss"], rel=1e-4, abs=1e-6)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-6)
    initial = load_file(model_path / "model.safetensors")
    assert any(not torch.allclose(tensor, initial[name], atol=1e-4) for name, tensor in expected.items())
    assert waited.groups_before_the_first_gradient() == GROUPS
    assert began.groups_before_the_first_gradient() < GROUPS


@pytest.mark.parametrize("mode", ["stream", "one_step_async", "trajectory_async"])
async def test_training_starts_on_the_first_trajectories(tmp_path: Path, model_path: Path, mode: str) -> None:
    harness, passed = TrainerHarness.make(tmp_path, model_path), Passed()
    async with harness.running(harness.trainer(loop=loop(mode), **NARROW, failpoint=passed)):
        for number in range(GROUPS - 1):
            await harness.publish(*trajectories(number))
        await harness.until(lambda: Failpoint.GRADIENT_ADDED in passed.points)


async def test_synchronous_waits_for_the_last_trajectory(tmp_path: Path, model_path: Path) -> None:
    harness, passed = TrainerHarness.make(tmp_path, model_path), Passed()
    async with harness.running(harness.trainer(loop=loop("synchronous"), **NARROW, failpoint=passed)):
        for number in range(GROUPS - 1):
            await harness.publish(*trajectories(number))
        await harness.until(lambda: passed.points.count(Failpoint.GROUP_TAKEN) == GROUPS - 1)
        assert Failpoint.GRADIENT_ADDED not in passed.points
        await harness.publish(*trajectories(GROUPS - 1))
        await harness.until_version(1, 1)


@pytest.mark.parametrize("name", ["grpo", "rloo"])
async def test_groups_of_one_sample_are_trained_with_no_advantage(tmp_path: Path, model_path: Path, name: str) -> None:
    """There is nothing to compare it with: it counts, and moves nothing but by weight decay."""
    harness = TrainerHarness.make(tmp_path, model_path)
    algorithm = AlgorithmSettings.model_validate({"name": name, "scale_rewards": "batch"})
    training = TRAINING.model_copy(update={"weight_decay": 0.0})
    trainer = harness.trainer(
        loop=LOOP.model_copy(update={"num_generations": 1}), algorithm=algorithm, training=training
    )
    for number in range(4):
        await harness.publish_group(number, (float(number),))
    async with harness.running(trainer):
        await harness.until_version(1, 2)
    steps = [report for report in harness.reports() if report.group_ids]
    assert [ids(report) for report in steps] == [{"p/0/0/0", "p/1/0/0"}, {"p/2/0/0", "p/3/0/0"}]
    assert [report.metrics["grad_norm"] for report in steps] == [0.0, 0.0]
    assert [report.metrics["reward"] for report in steps] == [0.5, 2.5]
    assert harness.skips() == []
    first, last = (load_file(tmp_path / "weights" / name / "model.safetensors") for name in ("1-0", "1-2"))
    assert all(torch.equal(tensor, last[key]) for key, tensor in first.items())


def test_groups_of_one_sample_with_dynamic_sampling_are_refused(tmp_path: Path, model_path: Path) -> None:
    one = LOOP.model_copy(update={"num_generations": 1})
    with pytest.raises(SettingsError, match="num_generations"):
        TrainerHarness.make(tmp_path, model_path).trainer(loop=one, algorithm=AlgorithmSettings(dynamic_sampling=True))


async def test_waiting_for_the_very_first_group_is_not_step_time(tmp_path: Path, model_path: Path) -> None:
    harness, now = TrainerHarness.make(tmp_path, model_path), [1000.0]
    async with harness.running(harness.trainer(monotonic=lambda: now[0])):
        for step in (1, 2):
            await asyncio.sleep(0.2)  # by now it waits
            now[0] += 100.0
            for number in (2 * step, 2 * step + 1):
                await harness.publish(*group(number))
            await harness.until_version(1, step)
    first, second = [report.metrics for report in harness.reports() if report.group_ids]
    assert (first.get("time/wait_for_batch", 0.0), second["time/wait_for_batch"]) == (0.0, 100.0)
    assert (first["time/step"] < 1.0, second["time/step"]) == (True, 100.0)


async def test_the_spans_of_a_step_follow_each_other_and_name_its_phases(tmp_path: Path, model_path: Path) -> None:
    harness = TrainerHarness.make(tmp_path, model_path)
    training = TRAINING.model_copy(update={"checkpoint_every": 10})
    async with harness.running(harness.trainer(training=training)):
        for step in (1, 2):
            for number in (2 * step, 2 * step + 1):
                await harness.publish(*group(number))
            await harness.until_version(1, step)
    _, line = [json.loads(text) for text in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    names = [name for name, _, _ in line["spans"]]
    assert names[0] == "wait_for_batch"
    assert names[-4:] == ["forward_backward", "optimizer", "broadcast_weights", "announce"]
    ends = [moment for _, start, end in line["spans"] for moment in (start, end)]
    assert all(later - sooner > -2e-3 for sooner, later in pairwise(ends))
    assert abs(line["time"] - ends[-1]) < 5.0
    assert line["padding/bucket_0"] >= 0.0
