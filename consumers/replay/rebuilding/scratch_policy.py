"""A policy in memory that takes recorded steps again, and can be put back. Writes no file; knows no history.

All of it runs in one compute thread with the trainer's number of threads, or results would differ in the last bits.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from consumers.algorithms.advantages import SCALE_EPSILON
from consumers.algorithms.credit import ModelLimits
from consumers.algorithms.losses import BatchTotals, denominator
from consumers.algorithms.settings import AlgorithmSettings
from consumers.replay.steps.batches import Batch
from consumers.training.model import load_model, load_reference, named_tensors, resolve_device
from consumers.training.policy import NO_LIMIT
from consumers.training.ports import StepOutcome
from consumers.training.settings import TrainingSettings
from consumers.training.step import PolicyLearner


@dataclass(frozen=True)
class Recipe:
    """How a step is computed. ``initial_model``: where the chain and the KL term's reference begin; ``seed``: for
    weights that the initial model's files leave open.
    """

    algorithm: AlgorithmSettings
    training: TrainingSettings
    max_completion_length: int
    initial_model: str
    seed: int = 0


@dataclass(frozen=True)
class Moment:
    """Weights and optimizer after ``step`` steps; its tensors are its own."""

    step: int
    parameters: dict[str, Tensor]
    optimizer: dict[str, Tensor]


@dataclass(frozen=True)
class Taken:
    """An optimizer step: its outcome, norms of its scaled gradient by tensor, and what it added to each tensor."""

    outcome: StepOutcome
    gradient_norms: dict[str, float]
    update: dict[str, Tensor]


class ScratchPolicy:
    """Model and learner. Not safe for two threads at once."""

    def __init__(self, recipe: Recipe, directory: Path | str, step: int, optimizer: Mapping[str, Tensor]) -> None:
        """Load the weights of a checkpoint, or the initial model with no optimizer state and ``step`` 0.

        Raises:
            ModelError: there is no model, or no such device.
        """
        self.device = resolve_device(recipe.training)
        training = recipe.training
        torch.manual_seed(recipe.seed)
        self.model = load_model(directory, self.device, gradient_checkpointing=training.gradient_checkpointing)
        self._references: dict[str, Any] = {}
        self.follow(recipe)
        self.learner.step = step
        self.learner.load_optimizer_tensors(dict(optimizer))

    def follow(self, recipe: Recipe) -> None:
        """Compute by these settings from now on, with a new optimizer that has no state."""
        self.recipe = recipe
        self.learner = PolicyLearner(
            self.model, self.reference, recipe.algorithm, recipe.training, recipe.max_completion_length
        )

    @property
    def reference(self) -> Any | None:
        """The frozen initial model, if the KL term needs it."""
        path = self.recipe.initial_model
        if self.recipe.algorithm.beta == 0:
            return None
        if path not in self._references:
            self._references[path] = load_reference(path, self.device)
        return self._references[path]

    @property
    def limits(self) -> ModelLimits:
        """What the model can take."""
        config = self.model.config
        positions = getattr(config, "max_position_embeddings", None) or NO_LIMIT
        return ModelLimits(vocabulary=int(config.vocab_size), positions=int(positions))

    def moment(self) -> Moment:
        """A copy of this moment."""
        parameters = {name: tensor.detach().clone() for name, tensor in self.model.named_parameters()}
        return Moment(self.learner.step, parameters, self.learner.optimizer_tensors())

    def back_to(self, moment: Moment, recipe: Recipe) -> None:
        """Put weights and optimizer back, to go on by these settings."""
        with torch.no_grad():
            for name, tensor in self.model.named_parameters():
                tensor.copy_(moment.parameters[name])
        self.model.zero_grad(set_to_none=True)
        self.follow(recipe)
        self.learner.step = moment.step
        self.learner.load_optimizer_tensors({name: tensor.clone() for name, tensor in moment.optimizer.items()})

    def take(self, batch: Batch) -> StepOutcome:
        """One optimizer step, exactly as the trainer takes it."""
        for micro_batch in batch.micro_batches:
            self.learner.accumulate(micro_batch)
        return self.learner.finish_step(batch.reward_deviation)

    def take_observed(self, batch: Batch) -> Taken:
        """``take``, with the gradient and the update by tensor."""
        before = {name: tensor.detach().clone() for name, tensor in self.model.named_parameters()}
        for micro_batch in batch.micro_batches:
            self.learner.accumulate(micro_batch)
        norms = self._gradient_norms(self.scale(batch))
        outcome = self.learner.finish_step(batch.reward_deviation)
        with torch.no_grad():
            update = {name: tensor - before[name] for name, tensor in self.model.named_parameters()}
        return Taken(outcome, norms, update)

    def scale(self, batch: Batch) -> float:
        """What the summed gradient of this batch is multiplied by."""
        algorithm = self.recipe.algorithm
        scale = 1.0 / denominator(algorithm, BatchTotals(*batch.totals), self.recipe.max_completion_length)
        return scale / (batch.reward_deviation + SCALE_EPSILON) if algorithm.scale_rewards == "batch" else scale

    def gradient_norm(self, batch: Batch, scale: float) -> float:
        """Norm of the batch's gradient times ``scale``; weights and optimizer stay as they are."""
        with self._gradient_only(batch):
            norms = self._gradient_norms(scale)
        return float(torch.linalg.vector_norm(torch.tensor(list(norms.values()), dtype=torch.float64)))

    def gradients(self, batch: Batch) -> dict[str, Tensor]:
        """The scaled gradient of a batch by parameter, on the CPU; weights and optimizer stay as they are."""
        scale = self.scale(batch)
        with self._gradient_only(batch):
            return {
                name: (parameter.grad * scale).cpu()
                for name, parameter in self.model.named_parameters()
                if parameter.grad is not None
            }

    def tensors(self) -> dict[str, Tensor]:
        """The float32 weights by their names on disk, on the CPU; later steps change them."""
        return named_tensors(self.model)

    @contextmanager
    def _gradient_only(self, batch: Batch) -> Iterator[None]:
        self.learner.discard()
        try:
            for micro_batch in batch.micro_batches:
                self.learner.accumulate(micro_batch)
            yield
        finally:
            self.learner.discard()

    def _gradient_norms(self, scale: float) -> dict[str, float]:
        return {
            name: float(torch.linalg.vector_norm(parameter.grad)) * scale
            for name, parameter in self.model.named_parameters()
            if parameter.grad is not None
        }
