"""Process groups of a weight sender and the ranks of one engine, for broadcasting tensors; and their check sum.

The sender is rank 0. Over gloo, between CPUs, torch broadcasts. Over NCCL, between GPUs, both ends are vLLM's
(``NCCLTrainerWeightTransferEngine``, and its counterpart in the ranks), so that their buffers agree.
"""

import socket
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore

Group = Any
"""``dist.ProcessGroupGloo``: torch has no type hints for its collectives."""
Backend = Literal["gloo", "nccl"]
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def word_sum(tensor: torch.Tensor) -> int:
    """Sum of a tensor's elements, their bytes read as integers of the same size, modulo 2^64 in two's complement.

    Computed on the tensor's device. It finds transfer errors, not deliberate changes.
    """
    words = tensor.detach().contiguous().view(_WORDS[tensor.itemsize])
    return int(words.sum(dtype=torch.int64).item())


Tensors = Mapping[str, torch.Tensor]
"""Tensors by name, in the order in which they are sent."""


class SendingGroup(Protocol):
    """The sender's end of a group."""

    @property
    def meeting(self) -> Mapping[str, Any]:
        """What the ranks need to join: the argument of vLLM's ``init_weight_transfer_engine``."""
        ...

    def send(self, tensors: Tensors) -> None:
        """Broadcast all tensors. The first call waits until every rank has joined. Blocks.

        Raises:
            RuntimeError: a rank did not join, or is gone.
        """
        ...

    def close(self) -> None:
        """Leave; idempotent."""
        ...


def open_group(backend: Backend, host: str, ranks: int, timeout_s: float) -> SendingGroup:
    """A group that waits for ``ranks`` ranks, which reach it at ``host``."""
    return GlooGroup(host, ranks, timeout_s) if backend == "gloo" else NcclGroup(host, ranks, timeout_s)


@dataclass
class GlooGroup:
    """Sends tensors from memory to memory, over gloo."""

    host: str
    ranks: int
    timeout_s: float
    _store: TCPStore = field(init=False)
    _group: Group | None = None

    def __post_init__(self) -> None:
        self._store = _store(self.host, 0, self.ranks + 1, self.timeout_s, is_first=True)

    @property
    def meeting(self) -> Mapping[str, Any]:
        """See ``SendingGroup``."""
        return {
            "master_address": self.host,
            "master_port": self._store.port,
            "rank_offset": 1,
            "world_size": self.ranks + 1,
            "timeout_s": self.timeout_s,
        }

    def send(self, tensors: Tensors) -> None:
        """See ``SendingGroup``."""
        if self._group is None:
            self._group = _gloo(self._store, self.host, 0, self.ranks + 1, self.timeout_s)
        for tensor in tensors.values():
            broadcast(self._group, tensor)

    def close(self) -> None:
        """See ``SendingGroup``."""
        self._group = None


@dataclass
class NcclGroup:
    """Sends tensors from this process's GPU to the ranks' GPUs, packed into vLLM's buffers (two of one gigabyte)."""

    host: str
    ranks: int
    timeout_s: float
    _port: int = field(init=False)
    _engine: Any = None

    def __post_init__(self) -> None:
        with closing(socket.create_server(("", 0))) as free:
            self._port = free.getsockname()[1]

    @property
    def meeting(self) -> Mapping[str, Any]:
        """See ``SendingGroup``."""
        return self._address | {"rank_offset": 1, "packed": True}

    @property
    def _address(self) -> dict[str, Any]:
        return {"master_address": self.host, "master_port": self._port, "world_size": self.ranks + 1}

    def send(self, tensors: Tensors) -> None:
        """See ``SendingGroup``. Waits without end for a rank that is gone, as NCCL does."""
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine

        source = _OnDevice(tensors)
        if self._engine is None:
            info = NCCLTrainerInitInfo(rank=0, **self._address)
            self._engine = NCCLTrainerWeightTransferEngine.trainer_init(info, client=_NoControl(), source=source)
        self._engine.source = source
        self._engine.send_weights()

    def close(self) -> None:
        """See ``SendingGroup``."""
        if self._engine is not None:
            self._engine.shutdown()
            self._engine = None


@dataclass(frozen=True)
class _OnDevice:
    """A ``WeightSource`` for vLLM: the tensors' description, then the tensors, each copied to the GPU just in time."""

    tensors: Tensors

    def metadata(self) -> list[Any]:
        from vllm.distributed.weight_transfer.base import ParamMeta

        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.tensors.items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, tensor.cuda()) for name, tensor in self.tensors.items())


class _NoControl:
    """A ``VLLMWeightSyncClient`` that does nothing: the ranks' own worker controls them, once it has its turn."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        pass

    def start_weight_update(self) -> None:
        pass

    def update_weights(self, update_info: Any) -> None:
        pass

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        pass


def join_gloo(address: str, port: int, rank: int, world_size: int, timeout_s: float) -> Group:
    """A rank's end of a ``GlooGroup``.

    Raises:
        RuntimeError: the others did not join in time.
    """
    store = _store(address, port, world_size, timeout_s, is_first=False)
    return _gloo(store, address, rank, world_size, timeout_s)


def _store(address: str, port: int, world_size: int, timeout_s: float, *, is_first: bool) -> TCPStore:
    timeout = timedelta(seconds=timeout_s)
    return TCPStore(address, port, world_size, is_master=is_first, timeout=timeout, wait_for_workers=False)


def _gloo(store: Store, sender: str, rank: int, world_size: int, timeout_s: float) -> Group:
    # By default gloo uses the address of this host's name, which may not lead to the sender. torch has no public way
    # to choose another one.
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # noqa: SLF001
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=_own_address_towards(sender))]  # noqa: SLF001
    options._timeout = timedelta(seconds=timeout_s)  # noqa: SLF001
    return dist.ProcessGroupGloo(store, rank, world_size, options)


def _own_address_towards(host: str) -> str:
    family, kind, _, _, where = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(where)  # sends nothing: UDP
        return str(probe.getsockname()[0])


def broadcast(group: Group, tensor: torch.Tensor) -> None:
    """Copy rank 0's tensor into the tensor of every rank."""
    options = dist.BroadcastOptions()
    options.rootRank = 0
    group.broadcast([tensor], options).wait()
