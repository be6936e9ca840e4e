"""A policy that learns nothing, in as much time as learning takes; its weights are the number of its step.

Checkpoints, lineages and weight versions are real, so that relays, workers and restarts do what they always do.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from consumers.algorithms.advantages import ModelLimits
from consumers.batching.micro_batches import MicroBatch
from consumers.training.checkpoints.catalogue import Lineage
from consumers.training.checkpoints.manifest import CheckpointManifest
from consumers.training.checkpoints.storage import remove_leftovers
from consumers.training.checkpoints.store import CheckpointStore, TrainerState
from consumers.training.compute import EmulatedDevice
from consumers.training.ports import Lineage as Claim
from consumers.training.ports import Restored, StepOutcome
from consumers.training.weight_export import WEIGHTS, WeightStore
from schemas.identifiers import PolicyVersion
from schemas.profiles import TrainingCosts

NO_LIMIT = 1 << 30
CONFIG = json.dumps({"model_type": "emulated"})


class EmulatedPolicy:
    """A ``Policy`` whose calls book their time on a device."""

    def __init__(
        self,
        durations: TrainingCosts,
        device: EmulatedDevice,
        weights: WeightStore,
        checkpoints: CheckpointStore,
        restored: Restored | None,
    ) -> None:
        self._durations = durations
        self._device = device
        self._weights = weights
        self._checkpoints = checkpoints
        self._step = restored.state.manifest.step if restored else 0
        self._gathered_s = 0.0
        remove_leftovers(weights.root)

    @property
    def step(self) -> int:
        """Optimizer steps taken since the beginning of the run."""
        return self._step

    @property
    def limits(self) -> ModelLimits:
        """None."""
        return ModelLimits(vocabulary=NO_LIMIT, positions=NO_LIMIT)

    def accumulate(self, batch: MicroBatch) -> None:
        """Launch a forward and backward pass."""
        seconds = forward_backward_s(batch, self._durations)
        self._gathered_s += seconds
        self._device.launch(seconds)

    def discard(self) -> None:
        """Nothing is undone: what was launched still takes its time."""
        self._gathered_s = 0.0

    def finish_step(self, reward_deviation: float) -> StepOutcome:
        """Wait for the micro-batches, and for the optimizer."""
        self._device.finish(self._durations.optimizer_step_s)
        self._step += 1
        train_s, self._gathered_s = self._gathered_s + self._durations.optimizer_step_s, 0.0
        return StepOutcome(True, "", {"loss": 0.0, "emulated/train_s": train_s})

    def digests(self) -> dict[str, str]:
        """None are made: there is nothing to compare."""
        return {}

    def export(self, version: PolicyVersion, now: float) -> str:
        """Put the weights into the store; the sha256 of their manifest."""
        self._device.finish(self._durations.export_s)
        return self._weights.export(self._tensors(), {"config.json": CONFIG}, version, self._step, now)

    def checkpoint(self, manifest: CheckpointManifest, intake: Mapping[str, Any], report: bytes, lineage: Claim) -> str:
        """Write a checkpoint of this moment; where it is."""
        assert isinstance(lineage, Lineage), "claimed from the same store"
        self._device.finish(self._durations.checkpoint_s)
        state = TrainerState(manifest, optimizer={}, rng={}, intake=dict(intake), report=report)
        return self._checkpoints.write(state, self._write_model, lineage)

    def _tensors(self) -> dict[str, Tensor]:
        return {"step": torch.tensor([self._step], dtype=torch.int64)}

    def _write_model(self, directory: Path) -> None:
        save_file(self._tensors(), directory / WEIGHTS)
        (directory / "config.json").write_text(CONFIG)


def forward_backward_s(batch: MicroBatch, durations: TrainingCosts) -> float:
    """Emulated seconds of a micro-batch's forward and backward pass."""
    rows, width = batch.input_ids.shape
    tokens, squares = batch.num_tokens, int((batch.lengths.astype("int64") ** 2).sum())
    if durations.padding_counts:
        tokens, squares = rows * width, rows * width * width
    return (
        durations.forward_backward_s_per_micro_batch
        + durations.forward_backward_s_per_token * tokens
        + durations.forward_backward_s_per_squared_token * squares
    )
