"""The most tokens a second that a trainer's device could compute: its measured matrix products against the model's.

The model FLOP utilisation (MFU) compares a trainer's speed with it, as in Chowdhery et al., PaLM, 2022
(arXiv:2204.02311), appendix B. There the peak is the manufacturer's; here it is measured, so that CPUs have one.
"""

import time
from dataclasses import dataclass
from typing import Any

import torch

SMALLEST, LARGEST = 256, 4096
LONG_ENOUGH_S = 0.005
"""Seconds of a product from which on its start no longer counts."""
REPETITIONS = 5
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Settings of models in which a token uses only some of the weights."""


@dataclass(frozen=True)
class ComputeLimit:
    """``flops_per_s``: of the device's matrix products; ``flops_per_token``: of forward and backward pass."""

    flops_per_s: float
    flops_per_token: float

    def metrics(self, tokens: int, seconds: float) -> dict[str, float]:
        """A step's metrics. ``tokens``: computed in ``seconds``, prompts included."""
        limit = self.flops_per_s / self.flops_per_token
        found = {"perf/limit_tok/s": limit, "perf/matmul_tflops": self.flops_per_s / 1e12}
        if seconds > 0:
            found["perf/mfu"] = tokens * self.flops_per_token / seconds / self.flops_per_s
        return found


def flops_per_token(model: Any) -> float | None:
    """FLOPs of a forward and a backward pass for one token, by the model's weights; None if they do not tell.

    A weight of a matrix product takes 2 FLOPs forward and 2 for the gradient of its input, and 2 for its own gradient
    if it is trained. Attention between tokens is not counted: it is small for sequences much shorter than
    12 x layers x hidden size.
    """
    config = model.config.get_text_config()
    if any(getattr(config, name, None) for name in EXPERTS):
        return None
    looked_up, projected = model.get_input_embeddings(), model.get_output_embeddings()
    # The table of input embeddings takes part in a product only if it is also the output layer.
    is_tied = projected is not None and projected.weight is looked_up.weight
    skipped = None if is_tied else looked_up.weight
    # Vectors, such as those of norms, are no matrices.
    weights = [weight for weight in model.parameters() if weight is not skipped and weight.dim() >= 2]
    return float(sum((6 if weight.requires_grad else 4) * weight.numel() for weight in weights)) or None


def matmul_flops_per_s(device: torch.device, dtype: torch.dtype) -> float:
    """FLOPs a second of square matrix products on a device; takes about 0.1 s, and draws no random number."""
    size, rate = SMALLEST, 0.0
    while size <= LARGEST:
        left, right = (torch.ones((size, size), dtype=dtype, device=device) for _ in range(2))
        seconds = min(_product_s(left, right) for _ in range(REPETITIONS))
        rate = max(rate, 2 * size**3 / seconds)
        if seconds >= LONG_ENOUGH_S:
            break
        size *= 2
    return rate


def _product_s(left: torch.Tensor, right: torch.Tensor) -> float:
    def wait() -> None:
        if left.is_cuda:
            torch.cuda.synchronize(left.device)

    wait()
    started_at = time.perf_counter()
    torch.mm(left, right)
    wait()
    return max(1e-9, time.perf_counter() - started_at)
