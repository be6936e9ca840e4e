"""A policy in memory that takes recorded steps again, the variations of a step, and the restore points.

``ScratchPolicy`` computes with the trainer's own learner, in one compute thread with the trainer's number of torch
threads: floating-point sums are split by thread, so another number would change the last bits. It can be restored to a
snapshot, so that a step can be taken as recorded and again under a ``Variation``. A ``RestorePoint`` is a checkpoint of
the step's chain, or the initial model.

Nothing here writes to a run's directory. ``keep_tensors`` writes to a directory that the user names.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from streamrl.consumers.algorithms.advantages import ModelLimits
from streamrl.consumers.algorithms.estimators import SCALE_EPSILON
from streamrl.consumers.algorithms.losses import BatchTotals, denominator
from streamrl.consumers.algorithms.settings import AlgorithmSettings
from streamrl.consumers.batching.dealing import deal_rows
from streamrl.consumers.batching.micro_batches import Group
from streamrl.consumers.batching.settings import BatchingSettings
from streamrl.consumers.training.checkpoints.manifest import CheckpointManifest
from streamrl.consumers.training.checkpoints.store import CheckpointStore
from streamrl.consumers.training.companions import open_companions
from streamrl.consumers.training.model import load_reference, named_tensors, open_policy, resolve_device
from streamrl.consumers.training.policy import limits_of
from streamrl.consumers.training.ports import StepOutcome
from streamrl.consumers.training.settings import TrainingSettings
from streamrl.consumers.training.step import PolicyLearner
from streamrl.inspection.replay.steps import ChainSegment, RecordedMicroBatches, StepBatch, rebatched, recorded_batch
from streamrl.schemas.errors import CheckpointError, UserError
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.reports import RecordRef
from streamrl.schemas.weights import ADAPTER, WEIGHTS


@dataclass(frozen=True)
class StepConfig:
    """The settings that a step is computed with.

    ``initial_model``: the policy before step 1, and the reference of the KL term. ``seed``: for weights that the
    initial model's files lack, such as a new head.
    """

    algorithm: AlgorithmSettings
    training: TrainingSettings
    max_completion_length: int
    initial_model: str
    seed: int = 0


@dataclass(frozen=True)
class PolicySnapshot:
    """A copy of weights and optimizer state after ``step`` steps."""

    step: int
    parameters: dict[str, Tensor]
    optimizer: dict[str, Tensor]


@dataclass(frozen=True)
class ObservedStep:
    """An optimizer step: its outcome, the L2 norms of its scaled gradient by tensor, and its update by tensor."""

    outcome: StepOutcome
    gradient_norms: dict[str, float]
    update: dict[str, Tensor]


class ScratchPolicy:
    """Model and learner as in the trainer. Only one thread may use it at a time."""

    def __init__(self, config: StepConfig, directory: Path | str, step: int, optimizer: Mapping[str, Tensor]) -> None:
        """Load the weights of a checkpoint, or the initial model with no optimizer state and ``step`` 0.

        Raises:
            ModelError: there is no model, or the device does not exist.
        """
        self.device = resolve_device(config.training)
        training = config.training
        # Seeded before loading, as in the trainer: loading draws weights that the files lack.
        torch.manual_seed(config.seed)
        restored = None if str(directory) == config.initial_model else Path(directory)
        self.model = open_policy(config.initial_model, restored, self.device, training)
        self._frozen: dict[str, Any] = {}
        # A new learner is at step 0 and has no optimizer state. The step also decides the learning rate.
        self.use_config(config)
        self.learner.step = step
        self.learner.load_optimizer_tensors(dict(optimizer))

    def use_config(self, config: StepConfig) -> None:
        """Compute with these settings from now on. The optimizer is new and has no state."""
        self.config = config
        companions = open_companions(
            self.model, config.initial_model, config.algorithm, config.training, self._frozen_model
        )
        self.learner = PolicyLearner(
            self.model, companions, config.algorithm, config.training, config.max_completion_length
        )

    def _frozen_model(self, path: str, device: torch.device) -> Any:
        # A what-if switches between two configurations, which may need the same model.
        if path not in self._frozen:
            self._frozen[path] = load_reference(path, device)
        return self._frozen[path]

    @property
    def limits(self) -> ModelLimits:
        """The model's limits on its inputs."""
        return limits_of(self.model.config)

    def snapshot(self) -> PolicySnapshot:
        """A copy of the current weights and optimizer state."""
        parameters = {name: tensor.detach().clone() for name, tensor in self.model.named_parameters()}
        return PolicySnapshot(self.learner.step, parameters, self.learner.optimizer_tensors())

    def restore(self, snapshot: PolicySnapshot, config: StepConfig) -> None:
        """Restore weights and optimizer state, and continue with these settings."""
        # Copied into the model's own tensors, because tied layers share them.
        with torch.no_grad():
            for name, tensor in self.model.named_parameters():
                tensor.copy_(snapshot.parameters[name])
        # The old learner may have left a gradient on the model, which the new one would not expect.
        self.model.zero_grad(set_to_none=True)
        self.use_config(config)
        self.learner.step = snapshot.step
        # Cloned, because AdamW changes its moments in place, and the snapshot must not change.
        self.learner.load_optimizer_tensors({name: tensor.clone() for name, tensor in snapshot.optimizer.items()})

    def take_step(self, batch: StepBatch) -> StepOutcome:
        """Take an optimizer step exactly as the trainer does. If the trainer has several ranks, its sums have another
        order.
        """
        self._accumulate(batch)
        return self.learner.finish_step(batch.reward_deviation)

    def take_observed_step(self, batch: StepBatch) -> ObservedStep:
        """Take a step as ``take_step`` does, and record the gradient and the update by tensor."""
        before = {name: tensor.detach().clone() for name, tensor in self.model.named_parameters()}
        self._accumulate(batch)
        norms: dict[str, float] = {}
        # The callback runs when the gradient is scaled and not yet clipped. If a step has several updates, it is the
        # first one's.
        outcome = self.learner.finish_step(batch.reward_deviation, lambda: norms.update(self._gradient_norms(1.0)))
        # The update is w_after - w_before: all zeros if the step was refused.
        with torch.no_grad():
            update = {name: tensor - before[name] for name, tensor in self.model.named_parameters()}
        return ObservedStep(outcome, norms, update)

    def scale(self, batch: StepBatch) -> float:
        """The factor of the summed gradient: 1 / (the loss's denominator), as the learner applies it.

        With ``scale_rewards = "batch"`` advantages are divided by the deviation of the batch's rewards. It is known
        only at the end of a step, so it is applied to the gradient.
        """
        algorithm = self.config.algorithm
        scale = 1.0 / denominator(algorithm, BatchTotals(*batch.totals), self.config.max_completion_length)
        return scale / (batch.reward_deviation + SCALE_EPSILON) if algorithm.scale_rewards == "batch" else scale

    def gradient_norm(self, batch: StepBatch, scale: float) -> float:
        """L2 norm of the batch's gradient times ``scale``. Weights and optimizer do not change."""
        with self._gradient_only(batch):
            norms = self._gradient_norms(scale)
        # ||g|| = sqrt(sum over tensors of ||g_t||²), summed in float64
        return float(torch.linalg.vector_norm(torch.tensor(list(norms.values()), dtype=torch.float64)))

    def gradients(self, batch: StepBatch) -> dict[str, Tensor]:
        """The scaled gradient of a batch by parameter, on the CPU. Weights and optimizer do not change."""
        scale = self.scale(batch)
        with self._gradient_only(batch):
            return {
                name: (parameter.grad * scale).cpu()
                for name, parameter in self.model.named_parameters()
                if parameter.grad is not None
            }

    def tensors(self) -> dict[str, Tensor]:
        """The float32 weights by their names on disk, and the critic's, on the CPU. Later steps change them."""
        critic = self.learner.critic
        return named_tensors(self.model) | ({} if critic is None else critic.weights())

    def _accumulate(self, batch: StepBatch) -> None:
        ranks, packing = self.config.training.ranks, self.config.training.packing
        for micro_batch in batch.micro_batches:
            # A micro-batch for several ranks fills the memory of all of them. Computed share by share, it fits here.
            rows = range(len(micro_batch.refs))
            shares = deal_rows(micro_batch, rows, ranks, packing) if ranks > 1 else []
            parts = [micro_batch.repacked(share) for share in shares if share] or [micro_batch]
            for part in parts:
                self.learner.accumulate(part)

    @contextmanager
    def _gradient_only(self, batch: StepBatch) -> Iterator[None]:
        if not self.learner.algorithm.is_separable:
            raise UserError(
                f"expected an algorithm whose gradient is a sum over trajectories, got {self.config.algorithm.name} "
                "with credit of the whole batch or several updates a step, where a trajectory has no gradient of its "
                "own; leave out --bisect, --row-gradients"
            )
        # Gradients add up in place. So another batch's gradient must not enter this one, nor this one the next step.
        self.learner.discard()
        try:
            self._accumulate(batch)
            yield
        finally:
            self.learner.discard()

    def _gradient_norms(self, scale: float) -> dict[str, float]:
        # ||s·g_t|| = s ||g_t|| for s > 0, so the gradient itself need not be scaled.
        return {
            name: float(torch.linalg.vector_norm(parameter.grad)) * scale
            for name, parameter in self.model.named_parameters()
            if parameter.grad is not None
        }


@dataclass(frozen=True)
class Variation:
    """The changes of a what-if. ``changes``: the changes in words.

    ``batching`` None: micro-batches stay as recorded where possible. ``only`` (empty: all) and ``without`` name
    trajectories by id or ``partition@offset``. Trajectories keep the advantages that they have within their whole
    groups.
    """

    config: StepConfig
    changes: tuple[str, ...] = ()
    batching: BatchingSettings | None = None
    only: frozenset[str] = frozenset()
    without: frozenset[str] = frozenset()

    def batch(
        self,
        groups: Iterable[Group],
        recorded: RecordedMicroBatches,
        run_batching: BatchingSettings,
        limits: ModelLimits,
    ) -> StepBatch:
        """The step's batch under this variation. ``run_batching``: used if the recorded micro-batches do not apply.

        Raises:
            UserError: a named trajectory is not in the step, or no trajectory is left.
        """
        members = tuple(groups)
        # Other settings may allow other trajectories in the step. Then the recorded packing does not apply.
        packing = self.config.training.packing
        batch = rebatched(members, self.config.algorithm, self.batching or run_batching, limits, packing)
        if self.batching is None and set(batch.samples) == {ref.trajectory_id for rows in recorded for ref in rows}:
            batch = recorded_batch(members, recorded, self.config.algorithm, limits)
        return self._selected(batch)

    def _selected(self, batch: StepBatch) -> StepBatch:
        if not self.only and not self.without:
            return batch
        refs = [ref for part in batch.micro_batches for ref in part.refs]
        only, without = (ids_among(refs, sorted(given)) for given in (self.only, self.without))
        left = (only or {ref.trajectory_id for ref in refs}) - without
        if not left:
            raise UserError("expected --only and --without to leave a trajectory in the step, got none")
        return batch.keeping(left)


def ids_among(
    refs: Iterable[RecordRef], given: Iterable[str], *, run: str = "RUN", step: int | None = None
) -> set[str]:
    """Ids of trajectories that are given by id or ``partition@offset``. ``run``, ``step``: for the error message.

    Raises:
        UserError: one of them is not among the records.
    """
    # A position becomes the id of its record. Anything else must be an id itself.
    ids = {f"{ref.partition}@{ref.offset}": ref.trajectory_id for ref in refs}
    known, found = set(ids.values()), [ids.get(name, name) for name in given]
    if unknown := [name for name in found if name not in known]:
        of, number = ("the step", "N") if step is None else (f"step {step}", step)
        raise UserError(
            f"expected a trajectory that {of} trained, got {unknown[0]!r}; "
            f"`streamrl replay --run {run} --step {number}` lists them"
        )
    return set(found)


@dataclass(frozen=True)
class RestorePoint:
    """A model directory, and the optimizer state after ``version.number`` steps."""

    version: PolicyVersion
    model: Path | str
    optimizer: dict[str, Tensor] = field(default_factory=dict)


class RestorePoints(Protocol):
    """The checkpoints and weight versions of a run, which are only read."""

    def versions(self) -> list[PolicyVersion]:
        """Versions of the existing checkpoints, without verification."""
        ...

    def load(self, version: PolicyVersion) -> RestorePoint:
        """A verified checkpoint.

        Raises:
            CheckpointError: it no longer exists or does not verify.
        """
        ...

    def originals(self, version: PolicyVersion) -> dict[str, Tensor] | None:
        """The weights of a version as the trainer wrote them, if a checkpoint or the weights store has them."""
        ...


@dataclass
class StoredRestorePoints:
    """``RestorePoints`` of a run: its checkpoints, listed once on first use, and its weights store."""

    store: CheckpointStore
    weights: Path

    @cached_property
    def manifests(self) -> dict[PolicyVersion, CheckpointManifest]:
        """Manifests by version."""
        return {manifest.policy_version: manifest for manifest in self.store.manifests()}

    def versions(self) -> list[PolicyVersion]:
        """See ``RestorePoints``."""
        return list(self.manifests)

    def load(self, version: PolicyVersion) -> RestorePoint:
        """See ``RestorePoints``."""
        restored = self.store.load(self.manifests[version])
        return RestorePoint(version, restored.directory, dict(restored.state.optimizer))

    def originals(self, version: PolicyVersion) -> dict[str, Tensor] | None:
        """See ``RestorePoints``."""
        with suppress(CheckpointError, OSError, SafetensorError):  # a running trainer may prune both
            if version in self.manifests:
                return _tensors_in(self.store.load(self.manifests[version]).directory)
        with suppress(OSError, SafetensorError):
            return _tensors_in(self.weights / str(version))
        return None


def _tensors_in(directory: Path) -> dict[str, Tensor]:
    adapter = directory / ADAPTER
    return dict(load_file(adapter if adapter.exists() else directory / WEIGHTS))


def usable_restore_points(
    chain: Sequence[ChainSegment], step: int, versions: Iterable[PolicyVersion]
) -> list[PolicyVersion]:
    """Checkpoints from which step ``step`` + 1 can be rebuilt, nearest first.

    A checkpoint is usable if it lies on the chain: between the version that its segment started from and the segment's
    last step.
    """
    usable = [
        version
        for version in versions
        if version.number <= step
        and any(
            segment.lineage == version.lineage and segment.first - 1 <= version.number <= segment.last
            for segment in chain
        )
    ]
    return sorted(usable, key=lambda version: version.number, reverse=True)


def starts_at_initial_model(chain: Sequence[ChainSegment]) -> bool:
    """Whether the chain goes back to the initial model."""
    return bool(chain) and chain[0].first == 1


def keep_tensors(directory: Path, step: int, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Write ``directory/step_<step>/<name>.safetensors`` for each named set of tensors.

    Raises:
        UserError: the directory cannot be written to.
    """
    target = directory / f"step_{step}"
    try:
        target.mkdir(parents=True, exist_ok=True)
        for name, found in tensors.items():
            # safetensors stores a tensor as one block of bytes, and refuses views with strides.
            contiguous = {key: tensor.detach().cpu().contiguous() for key, tensor in found.items()}
            save_file(contiguous, target / f"{name}.safetensors", metadata={"format": "pt"})
    except OSError as error:
        raise UserError(f"expected a writable directory for --out, got {target}: {error.strerror}") from error
