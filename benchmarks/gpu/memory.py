"""How much device memory a trainer and a worker take, in closed form. Nothing here is measured.

Bytes of the trainer, for P parameters in float32 with AdamW, as ``consumers.training`` keeps them:

    whole model:  4 P weights + 4 P gradients + 8 P moments + 2 P bfloat16 copies of autocast; with
                  ``training.optimizer_offload`` without the moments: 16 P are in the processor's memory, moments
                  and copies of weights and gradients
    adapter:      4 P weights + 2 P copies, and 16 bytes a parameter of the adapter
    activations:  2 L T H, what checkpointing keeps of T tokens in L layers of width H, and
                  ``LAYER_BYTES`` T H of the one layer that is recomputed
    logits:       ``LOGIT_BYTES`` for each of the 2^26 that are computed at once

A worker holds 2 P / (tensor parallel size), and its cache 4 L K bytes a token, K the width of a layer's keys, in
bfloat16.
"""

from dataclasses import dataclass

GIB = 1 << 30
USABLE = 0.92
"""Of a device's memory: the rest is CUDA's context, and pieces between tensors."""
LAYER_BYTES = 34
"""Activations of a layer per token and unit of width, without attention's square (Korthikanti et al., Reducing
Activation Recomputation in Large Transformer Models, 2022, equation 1)."""
LOGITS, LOGIT_BYTES = 1 << 26, 12
"""Logits at once (``consumers.algorithms.losses``); bfloat16, float32, gradient."""
WHOLE_BYTES, FROZEN_BYTES, ADAPTER_BYTES = 18, 6, 16
MOMENT_BYTES = 8
"""Of what ``training.optimizer_offload`` keeps off the device."""


@dataclass(frozen=True)
class KnownModel:
    """``width``: of hidden states; ``kv_width``: of a layer's keys, all heads; ``attention_width``: of its queries."""

    name: str
    parameters: float
    layers: int
    width: int
    kv_width: int
    feed_forward: int
    attention_width: int

    @property
    def adapted(self) -> int:
        """Parameters of an adapter of rank 1 of all linear layers of one layer."""
        attention = 2 * (self.width + self.attention_width) + 2 * (self.width + self.kv_width)
        return attention + 3 * (self.width + self.feed_forward)


SHAPES = (
    KnownModel("Qwen2.5-0.5B", 0.49e9, 24, 896, 128, 4864, 896),
    KnownModel("Qwen2.5-1.5B", 1.54e9, 28, 1536, 256, 8960, 1536),
    KnownModel("Qwen3-4B", 4.02e9, 36, 2560, 1024, 9728, 4096),
    KnownModel("Qwen3-8B", 8.19e9, 36, 4096, 1024, 12288, 4096),
    KnownModel("Qwen3-14B", 14.8e9, 40, 5120, 1024, 17408, 5120),
    KnownModel("Qwen3-32B", 32.8e9, 64, 5120, 1024, 25600, 8192),
)
"""From their configurations."""


def activation_bytes(shape: KnownModel, tokens: int) -> float:
    """Of a micro-batch of so many tokens, with activation checkpointing; logits included."""
    kept = 2.0 * shape.layers * tokens * shape.width
    return kept + LAYER_BYTES * tokens * shape.width + LOGITS * LOGIT_BYTES


def trainer_bytes(shape: KnownModel, tokens: int, *, lora_rank: int = 0, optimizer_offload: bool = False) -> float:
    """Of a trainer on one device; rank 0: of all weights."""
    elsewhere = MOMENT_BYTES if optimizer_offload else 0
    if not lora_rank:
        return (WHOLE_BYTES - elsewhere) * shape.parameters + activation_bytes(shape, tokens)
    adapter = lora_rank * shape.layers * shape.adapted
    return FROZEN_BYTES * shape.parameters + (ADAPTER_BYTES - elsewhere) * adapter + activation_bytes(shape, tokens)


def largest_micro_batch(
    shape: KnownModel, memory: float, *, lora_rank: int = 0, optimizer_offload: bool = False, most: int = 16_384
) -> int:
    """Tokens of the largest micro-batch that fits, of ``most`` halved as often as needed; 0: none of 1024."""
    tokens = most
    while tokens >= 1024:
        if trainer_bytes(shape, tokens, lora_rank=lora_rank, optimizer_offload=optimizer_offload) <= USABLE * memory:
            return tokens
        tokens //= 2
    return 0


def cache_tokens(shape: KnownModel, memory: float, devices: int, utilization: float = 0.9) -> int:
    """Tokens of context that vLLM's cache holds over so many devices of a worker; 0: the weights do not fit."""
    room = devices * utilization * memory - 2 * shape.parameters - devices * 2 * GIB  # 2 GiB for what runs in between
    return max(0, int(room / (4.0 * shape.layers * shape.kv_width)))


def smallest_tensor_parallel_size(shape: KnownModel, memory: float, tokens: int = 1 << 18) -> int:
    """Fewest devices, 1, 2, 4 or 8, whose cache holds so many tokens; 0: none of them."""
    fits = (size for size in (1, 2, 4, 8) if cache_tokens(shape, memory, size) >= tokens)
    return next(fits, 0)
