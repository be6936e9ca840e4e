"""The policy being trained, with everything that touches its tensors: learning, checkpoints, export.

All of it runs in the trainer's one compute thread, so that the event loop can continue to poll. The exception is work
on a snapshot: it is a copy, and is exported in another thread while the next step is computed. Knows no bus.
"""

import copy
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
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
from streamrl.consumers.training.checkpoints.manifest import CARD, CheckpointManifest
from streamrl.consumers.training.checkpoints.storage import CheckpointStorage, remove_leftovers
from streamrl.consumers.training.checkpoints.store import CheckpointStore, TrainerState, VerifiedCheckpoint
from streamrl.consumers.training.companions import open_companions
from streamrl.consumers.training.compute_limit import ComputeLimit, flops_per_token, matmul_flops_per_s
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
"""Most positions of a model whose configuration names no limit, such as one without position embeddings."""


@dataclass(frozen=True)
class PolicyPaths:
    """Where the initial model is, and where checkpoints and weight versions go.

    ``card``: returns the text of a checkpoint's ``README.md``; None: it gets none.
    """

    model: str
    checkpoints: CheckpointStorage
    weights: Path
    card: Callable[[CheckpointManifest], str] | None = None


@dataclass(frozen=True)
class LearnerPlan:
    """What a learner is made from: the model whose weights it starts with, the initial model, and settings.

    ``seed``: for weights that the files lack, such as a new head.
    """

    model: str
    initial_model: str
    algorithm: AlgorithmSettings
    training: TrainingSettings
    max_completion_length: int
    seed: int

    @property
    def restored(self) -> Path | None:
        """The checkpoint's directory, if the learner starts from one."""
        return Path(self.model) if self.model != self.initial_model else None


class TrainedPolicy:
    """Model, learner and stores of one trainer process. Not thread-safe."""

    _write_optimizer: Callable[[Path], None] | None = None
    """Writes an optimizer state that is spread over ranks into a directory; None: the learner holds all of it."""

    def __init__(
        self,
        paths: PolicyPaths,
        algorithm: AlgorithmSettings,
        training: TrainingSettings,
        max_completion_length: int,
        restored: VerifiedCheckpoint | None,
        seed: int = 0,
    ) -> None:
        """Load the model and the learner's state, from the checkpoint if there is one.

        Raises:
            ModelError: there is no model, or no such device.
        """
        start = str(restored.directory) if restored else paths.model
        plan = LearnerPlan(start, paths.model, algorithm, training, max_completion_length, seed)
        self.learner = self._open_learner(plan)
        self._base_sha256 = base_sha256(paths.model) if training.lora.rank else ""
        self._has_removed_leftovers = False
        self._copy = self._open_copy()
        self._copied: dict[str, Tensor] | None = None
        self._texts_by_dtype: dict[str, dict[str, str]] = {}
        self._paths = paths
        self._training = training
        self._checkpoints = CheckpointStore(paths.checkpoints, training.keep_checkpoints)
        self._weights = WeightExporter(paths.weights, training.keep_weight_versions, training.weight_transfer)
        # Restore the generators' state last, because loading and wrapping models draws random numbers.
        if restored is not None:
            self.learner.step = restored.state.manifest.step
            self._load_optimizer(restored)
            _restore_rng(restored.state.rng)

    def _open_learner(self, plan: LearnerPlan) -> PolicyLearner:
        training = plan.training
        device = resolve_device(training)
        torch.manual_seed(plan.seed)  # before loading the model, which draws weights that are missing in the files
        model = open_policy(plan.initial_model, plan.restored, device, training)
        companions = open_companions(model, plan.initial_model, plan.algorithm, training)
        return PolicyLearner(model, companions, plan.algorithm, training, plan.max_completion_length)

    def _open_copy(self) -> WeightCopy:
        return WeightCopy(torch.float32)  # digests are those of the trained weights, not of the exported type

    def _load_optimizer(self, restored: VerifiedCheckpoint) -> None:
        self.learner.load_optimizer_tensors(restored.state.optimizer)

    @property
    def step(self) -> int:
        """Optimizer steps taken since the start of the run."""
        return self.learner.step

    @property
    def limits(self) -> ModelLimits:
        """The model's vocabulary and longest sequence."""
        return limits_of(self.learner.model.config)

    @property
    def adapter(self) -> WeightAdapter | None:
        """What workers must know about the trained adapter; None if all weights are trained."""
        lora = self._training.lora
        if not lora.rank:
            return None
        return WeightAdapter(base_sha256=self._base_sha256, rank=lora.rank, scale=lora.scaled_alpha / lora.rank)

    def speed_metrics(self, tokens: int, seconds: float) -> dict[str, float]:
        """See ``Policy``. The limit is measured at the first call."""
        return {} if self._compute_limit is None else self._compute_limit.metrics(tokens, seconds)

    @cached_property
    def _compute_limit(self) -> ComputeLimit | None:
        model, dtype = self.learner.model, getattr(torch, self._training.dtype)
        flops = flops_per_token(model)
        return None if flops is None else ComputeLimit(matmul_flops_per_s(model.device, dtype), flops)

    def accumulate(self, batch: MicroBatch) -> None:
        """Add the gradient of a micro-batch."""
        self.learner.accumulate(batch)

    def discard(self) -> None:
        """Drop the accumulated gradient."""
        self.learner.discard()

    def finish_step(self, reward_deviation: float) -> StepOutcome:
        """Apply the accumulated gradient unless there is a problem with it; clears it in either case."""
        self._copied = None  # it holds the weights from before the step
        return self.learner.finish_step(reward_deviation)

    def snapshot(self) -> "CopiedWeights":
        """A copy of the present weights, in the memory of the previous copy."""
        self._copied = self._copy.take(self.learner.model)
        return CopiedWeights(self._copied, self._critic_weights(), self.step, self._export)

    def _critic_weights(self) -> dict[str, Tensor]:
        critic = self.learner.critic
        return {} if critic is None else critic.weights()

    def _export(self, tensors: Mapping[str, Tensor], step: int, version: PolicyVersion, now: float) -> str:
        if not self._has_removed_leftovers:
            # Only here, where this trainer holds a lineage: a standby must not remove files that the leader is writing.
            remove_leftovers(self._paths.weights)
            self._has_removed_leftovers = True
        dtype = self._training.dtype
        rounded = with_floats_as(getattr(torch, dtype), tensors)
        return self._weights.export(rounded, self._texts(dtype), version, step, now, self.adapter)

    def checkpoint(
        self, manifest: CheckpointManifest, reader: Mapping[str, Any], report: bytes, lineage: Lineage
    ) -> str:
        """Write a checkpoint of this moment; returns its path or URL."""
        assert isinstance(lineage, Lineage), "claimed from the same store"
        state = TrainerState(manifest, self.learner.optimizer_tensors(), _rng_tensors(), dict(reader), report)
        return self._checkpoints.write(state, partial(self._write_model, manifest), lineage, self._write_optimizer)

    def _tensors(self) -> Mapping[str, Tensor]:
        """The weights by name, on the CPU, in float32; from the snapshot if that holds the present weights."""
        # For a large model a copy from the device takes longer than the optimizer does.
        return self._all_tensors() if self._copied is None else self._copied

    def _all_tensors(self) -> Mapping[str, Tensor]:
        return named_tensors(self.learner.model)

    def _write_model(self, manifest: CheckpointManifest, directory: Path) -> None:
        name = ADAPTER if self._training.lora.rank else WEIGHTS
        save_file(dict(self._tensors()), directory / name, metadata={"format": "pt"})
        # Always float32: weights rounded to ``training.dtype`` would not resume the same run.
        for name, text in self._texts("float32").items():
            (directory / name).write_text(text)
        copy_tokenizer(self._paths.model, directory)
        if self._paths.card is not None:
            (directory / CARD).write_text(self._paths.card(manifest))

    def _texts(self, dtype: str) -> dict[str, str]:
        """The configuration files for weights of this type; training changes none of them."""
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
        config = copy.deepcopy(model.config)  # a copy: the files' dtype is not that of the model in memory
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
        """Write the weights to the store; returns the sha256 of their manifest."""
        return self.write(self.tensors, self.step, version, now)

    def digests(self) -> dict[str, str]:
        """xxh3-128, in hex, of each float32 tensor's little-endian bytes, by its name on disk; with the critic's."""
        return digests_of({**self.tensors, **self.critic})


def limits_of(config: Any) -> ModelLimits:
    """Vocabulary and longest sequence by a model's configuration; of a multimodal one, its language model's."""
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
    # No copy on little-endian machines. Flat, because ``cast`` refuses several dimensions when one is 0.
    return array.astype(array.dtype.newbyteorder("<"), copy=False).reshape(-1).data.cast("B")


def _rng_tensors() -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    return states | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})


def _restore_rng(states: dict[str, Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


class ComputeThread:
    """Runs calls one at a time in its own thread."""

    def __init__(self, threads: int) -> None:
        """``threads``: CPU threads of one torch operation; 0: torch decides."""
        self._threads = threads
        # One thread, so that the policy has one caller at a time; further calls queue up in order.
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="compute", initializer=self._prepare)

    def _prepare(self) -> None:
        # OpenMP keeps this number for each calling thread, so it is set here and not in the main thread.
        if self._threads:
            torch.set_num_threads(self._threads)

    async def __call__(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The call's result; its exceptions are raised here."""
        return await in_thread(partial(call, *args, **kwargs), executor=self._pool)

    def close(self) -> None:
        """Wait for the call in progress, and end the thread."""
        self._pool.shutdown(wait=True, cancel_futures=True)
