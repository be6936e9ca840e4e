"""Code in the ranks of a vLLM engine that receives weights from a sender: transfer over gloo, and checksums.

Imported only there, since it imports vLLM. For NCCL, vLLM has a transfer engine of its own. Both load received tensors
with the model's own ``load_weights``, through vLLM's layerwise reloading, as vLLM does when it reads files.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from streamrl.producers.generation.engines.vllm_group import RankExtension
from streamrl.weights.groups import Group, broadcast, join_gloo, word_sum


@dataclass
class GlooInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """How to join the sender's group: the content of ``GlooGroup.meeting``."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    timeout_s: float


@dataclass
class GlooUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The tensors that are sent, in this order."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


class GlooWeightTransferEngine(WeightTransferEngine[GlooInitInfo, GlooUpdateInfo]):  # type: ignore[misc]
    """A rank's end of a ``GlooGroup``. Tensors are received in memory and copied from there to the model's device."""

    init_info_cls = GlooInitInfo
    update_info_cls = GlooUpdateInfo

    _group: Group | None = None

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        """Join the sender's group."""
        parallel = self.parallel_config
        rank = init_info.rank_offset + parallel.data_parallel_index * parallel.world_size + parallel.rank
        at = init_info.master_address, init_info.master_port
        self._group = join_gloo(*at, rank, init_info.world_size, init_info.timeout_s)

    def start_weight_update(self) -> None:
        """Prepare the model for weights in the layout of files."""
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: GlooUpdateInfo) -> None:
        """Load each tensor as it arrives."""
        if self._group is None:
            raise RuntimeError("expected a joined group before weights are received, got none")
        coming = self._tensors(self._group, update_info)
        self.model.load_weights(coming)
        for _ in coming:  # a model may not read tied tensors at the end, but the sender sends all
            pass

    @staticmethod
    def _tensors(group: Group, wanted: GlooUpdateInfo) -> Iterator[tuple[str, torch.Tensor]]:
        for name, dtype, shape in zip(wanted.names, wanted.dtype_names, wanted.shapes, strict=True):
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            broadcast(group, tensor)
            yield name, tensor

    def finish_weight_update(self) -> None:
        """Convert the weights to the layout in which the model computes."""
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Leave the group."""
        self._group = None


WeightTransferEngineFactory.register_engine("gloo", GlooWeightTransferEngine)


class ReceivingExtension(RankExtension):
    """A ``RankExtension`` that computes checksums of the tensors that its rank receives."""

    def sum_received(self) -> None:
        """Start computing checksums of received tensors, and forget earlier ones."""
        model: Any = self.get_model()  # type: ignore[attr-defined]
        if not hasattr(model, "received_sums"):
            load = model.load_weights

            def load_weights(weights: Iterable[tuple[str, torch.Tensor]], *args: Any, **kwargs: Any) -> Any:
                def summed() -> Iterable[tuple[str, torch.Tensor]]:
                    for name, tensor in weights:
                        model.received_sums[name] = word_sum(tensor)
                        yield name, tensor

                return load(summed(), *args, **kwargs)

            model.load_weights = load_weights
        model.received_sums = {}

    def received_sums(self) -> dict[str, int]:
        """``word_sum`` of each tensor received since ``sum_received``, by name."""
        model: Any = self.get_model()  # type: ignore[attr-defined]
        return dict(model.received_sums)
