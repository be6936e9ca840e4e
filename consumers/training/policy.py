"""The policy being trained, with everything that touches its tensors: learning, checkpoints, export.

All of it runs in the trainer's one compute thread, so that the event loop goes on polling; but for what is done with a
snapshot, which is a copy, and runs in another thread while the next step is computed. Knows no bus.
"""

import copy
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
import xxhash
from safetensors.torch import save_file
from torch import Tensor

from streamrl.bus.waiting import in_thread
from streamrl.consumers.algorithms.advantages import ModelLimits
from streamrl.consumers.algorithms.settings import AlgorithmSettings
from streamrl.consumers.batching.micro_batches import MicroBatch
from streamrl.consumers.training.adapters import ADAPTER_CONFIG, BASE, adapter_config, base_sha256, base_text, layers_of
from streamrl.consumers.training.checkpoints.catalogue import Lineage
from streamrl.consumers.training.checkpoints.manifest import CheckpointManifest
from streamrl.consumers.training.checkpoints.storage import CheckpointStorage, remove_leftovers
from streamrl.consumers.training.checkpoints.store import CheckpointStore, TrainerState, VerifiedCheckpoint
from streamrl.consumers.training.companions import open_companions
from streamrl.consumers.training.model import (
    WeightCopy,
    copy_tokenizer,
    named_tensors,
    open_policy,
    resolve_device,
    with_floats_as,
)
from streamrl.consumers.training.ports import StepOutcome
from streamrl.consumers.training.settings import TrainingSettings
from streamrl.consumers.training.step import PolicyLearner
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.weights import ADAPTER, WEIGHTS, WeightAdapter
from streamrl.weights.export import WeightExporter

P = ParamSpec("P")
T = TypeVar("T")

NO_LIMIT = 1 << 30
"""Positions of a model whose configuration names no limit, such as one without position embeddings."""


@dataclass(frozen=True)
class PolicyPaths:
    """Where the initial model is, and where checkpoints and weight versions go."""

    model: str
    checkpoints: CheckpointStorage
    weights: Path


@dataclass(frozen=True)
class LearnerPlan:
    """What a learner is made of: the model whose weights it begins with, the initial model, and settings.

    ``seed``: of weights that the files lack, such as a new head.
    """

    model: str
    initial_model: str
    algorithm: AlgorithmSettings
    training: TrainingSettings
    max_completion_length: int
    seed: int

    @property
    def restored(self) -> Path | None:
        """The checkpoint's directory, if it begins with one."""
        return Path(self.model) if self.model != self.initial_model else None


class TrainedPolicy:
    """Model, learner and stores of one trainer process. Not safe for two threads at once."""

    _write_optimizer: Callable[[Path], None] | None = None
    """Puts the optimizer's state into a directory, where it is not the learner's alone."""

    def __init__(
        self,
        paths: PolicyPaths,
        algorithm: AlgorithmSettings,
        training: TrainingSettings,
        max_completion_length: int,
        restored: VerifiedCheckpoint | None,
        seed: int = 0,
    ) -> None:
        """Load the model, from the checkpoint if there is one, and put the learner back where it was.

        Raises:
            ModelError: there is no model, or no such device.
        """
        begins_with = str(restored.directory) if restored else paths.model
        plan = LearnerPlan(begins_with, paths.model, algorithm, training, max_completion_length, seed)
        self.learner = self._open_learner(plan)
        self._base_sha256 = base_sha256(paths.model) if training.lora.rank else ""
        self._is_swept = False
        # Digests are of float32; without them the copy may be as small as what is exported.
        self._copy = self._open_copy(torch.float32 if training.tensor_digests else getattr(torch, training.dtype))
        self._copied: dict[str, Tensor] | None = None
        self._texts_by_dtype: dict[str, dict[str, str]] = {}
        self._paths = paths
        self._training = training
        self._checkpoints = CheckpointStore(paths.checkpoints, training.keep_checkpoints)
        self._weights = WeightExporter(paths.weights, training.keep_weight_versions, training.weight_transfer)
        # The random numbers' state comes last: loading and wrapping models draws from it.
        if restored is not None:
            self.learner.step = restored.state.manifest.step
            self._load_optimizer(restored)
            _restore_rng(restored.state.rng)

    def _open_learner(self, plan: LearnerPlan) -> PolicyLearner:
        training = plan.training
        device = resolve_device(training)
        torch.manual_seed(plan.seed)  # before the model: one without all of its weights draws the missing ones
        model = open_policy(plan.initial_model, plan.restored, device, training)
        companions = open_companions(model, plan.initial_model, plan.algorithm, training)
        return PolicyLearner(model, companions, plan.algorithm, training, plan.max_completion_length)

    def _open_copy(self, dtype: torch.dtype) -> WeightCopy:
        return WeightCopy(dtype)

    def _load_optimizer(self, restored: VerifiedCheckpoint) -> None:
        self.learner.load_optimizer_tensors(restored.state.optimizer)

    @property
    def step(self) -> int:
        """Optimizer steps taken since the beginning of the run."""
        return self.learner.step

    @property
    def limits(self) -> ModelLimits:
        """What the model can take."""
        return limits_of(self.learner.model.config)

    @property
    def adapter(self) -> WeightAdapter | None:
        """What workers have to know of the adapter that is trained; None where all weights are."""
        lora = self._training.lora
        if not lora.rank:
            return None
        return WeightAdapter(base_sha256=self._base_sha256, rank=lora.rank, scale=lora.scaled_alpha / lora.rank)

    def accumulate(self, batch: MicroBatch) -> None:
        """Add the gradient of a micro-batch."""
        self.learner.accumulate(batch)

    def discard(self) -> None:
        """Drop the gathered gradient."""
        self.learner.discard()

    def finish_step(self, reward_deviation: float) -> StepOutcome:
        """Apply the gathered gradient, unless it is not fit to be; either way it is gone afterwards."""
        self._copied = None  # of the weights from before the step
        return self.learner.finish_step(reward_deviation)

    def snapshot(self) -> "CopiedWeights":
        """A copy of the weights as they are, in the memory of the one before."""
        self._copied = self._copy.take(self.learner.model)
        return CopiedWeights(self._copied, self._critic_weights(), self.step, self._export)

    def _critic_weights(self) -> dict[str, Tensor]:
        critic = self.learner.critic
        return {} if critic is None else critic.weights()

    def _export(self, tensors: Mapping[str, Tensor], step: int, version: PolicyVersion, now: float) -> str:
        if not self._is_swept:
            # Only under a lineage: what looks left over may be that of a leader for which this one stands by.
            remove_leftovers(self._paths.weights)
            self._is_swept = True
        dtype = self._training.dtype
        rounded = with_floats_as(getattr(torch, dtype), tensors)
        return self._weights.export(rounded, self._texts(dtype), version, step, now, self.adapter)

    def checkpoint(
        self, manifest: CheckpointManifest, reader: Mapping[str, Any], report: bytes, lineage: Lineage
    ) -> str:
        """Write a checkpoint of this moment; where it is."""
        assert isinstance(lineage, Lineage), "claimed from the same store"
        state = TrainerState(manifest, self.learner.optimizer_tensors(), _rng_tensors(), dict(reader), report)
        return self._checkpoints.write(state, self._write_model, lineage, self._write_optimizer)

    def _tensors(self) -> Mapping[str, Tensor]:
        """The weights by name, on the CPU, in float32; from the snapshot if it is of them."""
        # For a large model a copy from the device takes longer than the optimizer does.
        if self._copied is not None and self._copy.dtype == torch.float32:
            return self._copied
        return self._all_tensors()

    def _all_tensors(self) -> Mapping[str, Tensor]:
        return named_tensors(self.learner.model)

    def _write_model(self, directory: Path) -> None:
        name = ADAPTER if self._training.lora.rank else WEIGHTS
        save_file(dict(self._tensors()), directory / name, metadata={"format": "pt"})
        # float32 whatever ``training.dtype`` is: rounded weights would not resume the same run.
        for name, text in self._texts("float32").items():
            (directory / name).write_text(text)
        copy_tokenizer(self._paths.model, directory)

    def _texts(self, dtype: str) -> dict[str, str]:
        """The configuration files that go with weights of this type; training changes none of them."""
        if dtype not in self._texts_by_dtype:
            self._texts_by_dtype[dtype] = self._configuration(dtype)
        return self._texts_by_dtype[dtype]

    def _configuration(self, dtype: str) -> dict[str, str]:
        model, lora = self.learner.model, self._training.lora
        if lora.rank:
            base = self._paths.model
            return {
                ADAPTER_CONFIG: adapter_config(lora, base, layers_of(model)),
                BASE: base_text(base, self._base_sha256),
            }
        config = copy.deepcopy(model.config)  # a copy: the dtype below is the files', not the model's in memory
        config.architectures = [type(model).__name__]
        config.dtype = dtype
        texts: dict[str, Callable[[], str]] = {"config.json": config.to_json_string}
        if model.can_generate():
            texts["generation_config.json"] = model.generation_config.to_json_string
        return {name: to_text() for name, to_text in texts.items()}


@dataclass(frozen=True)
class CopiedWeights:
    """``WeightSnapshot`` of the weights after ``step`` steps; ``write`` exports tensors of a step.

    ``critic``: the weights that no worker needs.
    """

    tensors: Mapping[str, Tensor]
    critic: Mapping[str, Tensor]
    step: int
    write: Callable[[Mapping[str, Tensor], int, PolicyVersion, float], str]

    def export(self, version: PolicyVersion, now: float) -> str:
        """Put them into the store; the sha256 of their manifest."""
        return self.write(self.tensors, self.step, version, now)

    def digests(self) -> dict[str, str]:
        """xxh3-128, in hex, of each float32 tensor's little-endian bytes, by its name on disk; the critic's, too."""
        return digests_of({**self.tensors, **self.critic})


def limits_of(config: Any) -> ModelLimits:
    """What a model of this configuration can take; a multimodal one keeps its language model's part apart."""
    text = config.get_text_config()
    positions = getattr(text, "max_position_embeddings", None) or NO_LIMIT
    return ModelLimits(vocabulary=int(text.vocab_size), positions=int(positions))


def digests_of(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """xxh3-128, in hex, of the little-endian bytes of each floating-point tensor."""
    return {
        name: xxhash.xxh3_128_hexdigest(_little_endian(tensor))
        for name, tensor in sorted(tensors.items())
        if tensor.is_floating_point()
    }


def _little_endian(tensor: Tensor) -> memoryview:
    array = tensor.numpy()
    # Without a copy on little-endian machines; flat, since ``cast`` of several dimensions is refused when one is 0.
    return array.astype(array.dtype.newbyteorder("<"), copy=False).reshape(-1).data.cast("B")


def _rng_tensors() -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    return states | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})


def _restore_rng(states: dict[str, Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


class ComputeThread:
    """Runs calls one after the other in its own thread."""

    def __init__(self, threads: int) -> None:
        """``threads``: CPU threads of one torch operation; 0 leaves torch's choice."""
        self._threads = threads
        # One thread is what keeps the policy to one caller at a time; further calls queue up in order.
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="compute", initializer=self._prepare)

    def _prepare(self) -> None:
        # OpenMP keeps this number per calling thread, so it is set here and not in the main thread.
        if self._threads:
            torch.set_num_threads(self._threads)

    async def __call__(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The call's result; what it raises is raised here."""
        return await in_thread(partial(call, *args, **kwargs), executor=self._pool)

    def close(self) -> None:
        """Wait for the call in progress, and end the thread."""
        self._pool.shutdown(wait=True, cancel_futures=True)
