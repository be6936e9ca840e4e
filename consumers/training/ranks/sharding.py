"""A model sharded over the ranks of one machine (FSDP2), an optimizer for each rank's rows, and gathering of weights.

``fully_shard`` hooks into a module's forward pass, so every computation with a model goes through ``ScoringRoot``. Each
rank keeps rows of every parameter in float32. A layer is gathered only while it is used, in ``training.dtype``.
Gradients are summed over the ranks, not averaged, and also kept as rows in float32. Modules outside of the layers
(embedding, last norm, output layer) are gathered in float32, the type that they have without ranks.

Collective operations match only if all ranks make the same calls in the same order. So a rank without rows computes a
micro-batch without trained tokens, whose gradient is 0.
"""

import os
from collections.abc import Iterable, Mapping
from datetime import timedelta
from math import sqrt
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from streamrl.consumers.algorithms.packing import body_of, states_at
from streamrl.consumers.training.checkpoints.shards import PiecedTensors, part_name
from streamrl.consumers.training.model import WeightCopy, as_on_disk, open_scorer
from streamrl.consumers.training.optimizer import MOMENTS, RECENT_NORMS, GuardedAdamW
from streamrl.consumers.training.settings import TrainingSettings
from streamrl.schemas.errors import ModelError

HOST = "127.0.0.1"
STUCK_S = 600.0
"""Seconds after which a collective operation counts as stuck, because a rank is lost. While models load, ranks wait in
one for the slowest."""


def rank_device(training: TrainingSettings, rank: int) -> torch.device:
    """The device of a rank, made the current one of this thread.

    Raises:
        ModelError: there are fewer devices than ranks.
    """
    count = torch.cuda.device_count() if training.device != "cpu" else 0
    if count == 0 and training.device != "cuda":
        return torch.device("cpu")
    if count < training.ranks:
        raise ModelError(
            f"expected a CUDA device for each of training.ranks={training.ranks}, found {count}; lower training.ranks, "
            "or make more devices visible to this process (CUDA_VISIBLE_DEVICES)"
        )
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)


def offer_meeting() -> TCPStore:
    """A store at which the ranks of this machine meet; the others connect to its ``port``."""
    return TCPStore(HOST, 0, is_master=True, wait_for_workers=False)


def join_ranks(store: Store, rank: int, ranks: int, device: torch.device) -> DeviceMesh:
    """Meet the other ranks; returns the mesh of all ranks."""
    # Otherwise gloo resolves the host's name to find an interface, which may fail in a container.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=STUCK_S))
    return init_device_mesh(device.type, (ranks,))


def leave_ranks() -> None:
    """Leave the group of ranks, if this process is in one."""
    if dist.is_initialized():
        dist.destroy_process_group()


class ScoringRoot(nn.Module):
    """Every computation with a model, as the forward pass of one module."""

    def __init__(self, model: Any, training: TrainingSettings) -> None:
        super().__init__()
        self.model = model
        self._packing = training.packing
        self._scorer = open_scorer(model, training)

    def forward(self, *inputs: Tensor, only_states: bool) -> tuple[Tensor, ...]:
        """Log-probs and entropy like ``CompletionScorer``; with ``only_states``, the hidden states at positions."""
        if only_states:
            return (states_at(body_of(self.model.get_decoder()), self._packing, *inputs),)
        return self._scorer(*inputs)


class ShardedScorer:
    """A ``Scorer`` of a model, which it shards."""

    def __init__(self, model: Any, training: TrainingSettings, mesh: DeviceMesh) -> None:
        # First, before sharding: its probes call parts of the model directly.
        self._root = ScoringRoot(model, training)
        shard(self._root, layers_of(model), training, mesh)

    def __call__(self, input_ids: Tensor, mask: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
        """See ``CompletionScorer``."""
        logprobs, entropy = self._call_root(input_ids, mask, temperatures, only_states=False)
        return logprobs, entropy

    def states_at(self, input_ids: Tensor, row: Tensor, column: Tensor) -> Tensor:
        """Last hidden states [K, H], see ``packing.states_at``."""
        return self._call_root(input_ids, row, column, only_states=True)[0]

    def _call_root(self, *inputs: Tensor, only_states: bool) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = self._root(*inputs, only_states=only_states)
        if not torch.is_grad_enabled():
            reshard(self._root)
        return found


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The layers that are gathered one at a time: those that the model's class names as not to be split."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    found = [module for module in model.modules() if type(module).__name__ in names]
    if not found:
        lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList)]
        found = max(lists, key=len, default=[])
    # A weight that two modules share must be in a single group: the root's.
    owners: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    return [layer for layer in found if all(owners[id(parameter)] == 1 for parameter in layer.parameters())]


def shard(root: nn.Module, layers: Iterable[nn.Module], training: TrainingSettings, mesh: DeviceMesh) -> None:
    """Shard the parameters of the layers and of the rest of the root by rows, in place; gradients are summed."""
    bfloat16 = torch.bfloat16 if training.dtype == "bfloat16" else None
    # Inputs are not cast: autocast leaves float32 between layers, with and without ranks.
    precision = MixedPrecisionPolicy(param_dtype=bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    whole = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(root, mesh=mesh, mp_policy=whole)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            # Summed, because the divisor of a micro-batch's gradient is known only at the end of the step. Gloo
            # supports plain sums too.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def reshard(root: nn.Module) -> None:
    """Free parameters that the root keeps gathered for a backward pass, if none follows; a step makes them stale."""
    assert isinstance(root, FSDPModule)
    root.reshard()


def rows_of(parameter: Tensor, mesh: DeviceMesh) -> tuple[int, int]:
    """First (inclusive) and last (exclusive) of this rank's rows."""
    count, rank = parameter.shape[0], mesh.get_local_rank()
    most = -(-count // mesh.size())  # the same cuts as torch.chunk
    return min(rank * most, count), min((rank + 1) * most, count)


def local_rows(tensor: Tensor) -> Tensor:
    """This rank's rows, in the same memory."""
    own = tensor.detach()
    return own.to_local() if isinstance(own, DTensor) else own


class ShardedAdamW(GuardedAdamW):
    """``GuardedAdamW`` for this rank's rows. All ranks make the same calls, and get the same norms."""

    def __init__(
        self, named: Iterable[tuple[str, nn.Parameter]], training: TrainingSettings, max_norm: float, mesh: DeviceMesh
    ) -> None:
        self._sharded = list(named)
        self._mesh = mesh
        rows = [(name, nn.Parameter(local_rows(each), each.requires_grad)) for name, each in self._sharded]
        self._rows = dict(rows)
        # If a parameter has fewer rows than there are ranks, the last ranks have none.
        super().__init__([(name, own) for name, own in rows if own.numel()] or rows, training, max_norm)

    def scale(self, factor: float) -> float:
        """Multiply the accumulated gradient; returns the L2 norm over all ranks' rows afterwards."""
        for name, parameter in self._sharded:
            self._rows[name].grad = None if parameter.grad is None else local_rows(parameter.grad)
        square = torch.tensor(super().scale(factor) ** 2, dtype=torch.float64, device=self._mesh.device_type)
        dist.all_reduce(square, group=self._mesh.get_group())
        return sqrt(float(square))

    def clear(self) -> None:
        """Drop the accumulated gradient."""
        super().clear()
        for _, parameter in self._sharded:
            parameter.grad = None

    def load_rows(self, tensors: PiecedTensors, prefix: str = "") -> None:
        """Restore this rank's rows from the tensors of all ranks; reads only these rows."""
        own = {f"{name}.{moment}": f"{prefix}{name}.{moment}" for name in self._rows for moment in MOMENTS}
        shapes = {name: rows_of(parameter, self._mesh) for name, parameter in self._sharded}
        found = {
            key: tensors.rows(stored, *shapes[key.rpartition(".")[0]]) if not key.endswith(".step") else tensors[stored]
            for key, stored in own.items()
            if stored in tensors
        }
        if prefix + RECENT_NORMS in tensors:
            found[RECENT_NORMS] = tensors[prefix + RECENT_NORMS]
        self.load(found)


def write_part(directory: Path, tensors: Mapping[str, Tensor], mesh: DeviceMesh) -> None:
    """Write this rank's file of the optimizer's state. Values that are not cut are written by the first rank only."""
    rank = mesh.get_local_rank()
    kept = {
        name: tensor
        for name, tensor in tensors.items()
        if rank == 0 or (tensor.ndim and tensor.numel() and not name.endswith(RECENT_NORMS))
    }
    save_file(kept, directory / part_name(rank, mesh.size()))


def gathered(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """All rows, on this rank's device; floats as ``dtype`` if given, which is applied before they are sent."""
    own = tensor.detach()
    if dtype is not None and own.is_floating_point():
        own = own.to(dtype)
    return own.full_tensor() if isinstance(own, DTensor) else own


def unique_state(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name, shared ones once, in the same order on all ranks."""
    seen: set[int] = set()
    found: dict[str, Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            found[name] = tensor
    return found


class GatheredCopy(WeightCopy):
    """A ``WeightCopy`` of a sharded model, on rank 0; the other ranks must call ``send_weights`` at the same time."""

    def take(self, model: Any) -> dict[str, Tensor]:
        """Gather the weights, floats as ``dtype``; overwrites the last call's copy."""
        for name, tensor in unique_state(model).items():
            whole = gathered(tensor, self.dtype)
            if name not in self._memory:
                self._memory[name] = torch.empty(whole.shape, dtype=whole.dtype, pin_memory=whole.is_cuda)
            self._memory[name].copy_(whole, non_blocking=True)
        if any(tensor.is_pinned() for tensor in self._memory.values()):
            torch.cuda.synchronize()
        return as_on_disk(model, dict(self._memory))


def send_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """The other ranks' part of ``GatheredCopy.take``."""
    for tensor in unique_state(model).values():
        gathered(tensor, dtype)
