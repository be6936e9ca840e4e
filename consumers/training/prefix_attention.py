"""Attention over sequences that share prefixes: each token sees its own sequence, and shared tokens are computed once.

On a CPU it is a cascade, as inference engines use it for shared prompts. It calls torch's flash attention once for each
piece, causally, and once for each shared prefix, with all tokens that see it. The results for a token are parts of one
softmax. They are weighed by their sums of exponentials:

    out = sum_i exp(lse_i - lse) out_i,    lse = log sum_i exp(lse_i).

Each call's backward pass gets the complete ``out`` and ``lse``, and gives its part of the gradient: flash attention
recomputes exp(q k - lse), which are then the token's weights over its whole sequence. So no key or value is copied, and
no score is kept.

On CUDA it is torch's compiled flex attention. A mask of blocks says which tokens see each other.
"""

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import torch
import torch.utils._triton as torch_triton
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from streamrl.consumers.batching.prefixes import PrefixTree, Reading

# The operations behind ``torch.nn.functional.scaled_dot_product_attention``, which does not return the sums.
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward  # noqa: SLF001


def why_not_on(device: str, *, has_triton: Callable[[], bool] = torch_triton.has_triton) -> str:
    """Why a type of device cannot compute this attention; empty if it can."""
    if device == "cpu":
        return ""
    if device != "cuda":
        return f"the device {device}"
    return "" if has_triton() else "a CUDA device without Triton, which flex attention is compiled with"


def attend_along_prefixes(query: Tensor, key: Tensor, value: Tensor, tree: PrefixTree, scale: float | None) -> Tensor:
    """Attention of the tree's T tokens; query is [1, heads, T, size], key and value may have fewer heads.

    Returns [1, T, heads, size].
    """
    device = query.device.type
    if torch.is_autocast_enabled(device):  # as torch's own attention does
        query, key, value = (each.to(torch.get_autocast_dtype(device)) for each in (query, key, value))
    if device == "cpu":
        cascade: Callable[..., Tensor] = _Cascade.apply
        return cascade(query, key, value, tree, scale).transpose(1, 2)
    return attend_by_mask(query, key, value, tree, scale, _compiled_flex()).transpose(1, 2)


def attend_by_mask(
    query: Tensor, key: Tensor, value: Tensor, tree: PrefixTree, scale: float | None, flex: Callable[..., Tensor]
) -> Tensor:
    """``attend_along_prefixes`` by flex attention, as a function of a block mask; returns [1, heads, T, size]."""
    mask = _block_mask(tree, query.device)
    return flex(query, key, value, block_mask=mask, scale=scale, enable_gqa=key.shape[1] != query.shape[1])


@cache
def _compiled_flex() -> Callable[..., Tensor]:
    # Dynamic: one kernel for any number of tokens. Without compilation, flex attention would keep all scores.
    compiled: Callable[..., Tensor] = torch.compile(flex_attention, dynamic=True)
    return compiled


@lru_cache(maxsize=1)  # all layers of a pass ask for the same one
def _block_mask(tree: PrefixTree, device: torch.device) -> BlockMask:
    ends = torch.from_numpy(tree.ends).to(device)

    def sees(batch: Tensor, head: Tensor, place: Tensor, seen: Tensor) -> Tensor:
        return (seen <= place) & (place < ends[seen])

    count = len(tree.ends)
    # Compiled, it does not make all T x T entries.
    return create_block_mask(sees, None, None, count, count, device=device, _compile=device.type == "cuda")


class _Cascade(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, tree: PrefixTree, scale: float | None) -> Tensor:
        batch, heads, count, size = query.shape
        # In float32, because parts are added up here. Tokens before heads in memory, as the model reads the result.
        out = query.new_empty(batch, count, heads, size, dtype=torch.float32).transpose(1, 2)
        lse = query.new_empty(batch, heads, count, dtype=torch.float32)
        for reading in tree.readings:
            own, seen = _places(reading)
            inputs = query[:, :, own], key[:, :, seen], value[:, :, seen]
            part, part_lse = _flash(*inputs, 0.0, reading.is_causal, scale=scale)
            if reading.is_causal:  # the first part of each token
                out[:, :, own], lse[:, :, own] = part, part_lse
                continue
            whole = torch.logaddexp(lse[:, :, own], part_lse)
            out[:, :, own] *= (lse[:, :, own] - whole).exp_().unsqueeze(-1)
            out[:, :, own] += part * (part_lse - whole).exp_().unsqueeze(-1)
            lse[:, :, own] = whole
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.tree, ctx.scale = tree, scale
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        sums = [torch.zeros_like(each, dtype=torch.float32) for each in (query, key, value)]
        for reading in ctx.tree.readings:
            own, seen = _places(reading)
            inputs = gradients[0][:, :, own], query[:, :, own], key[:, :, seen], value[:, :, seen]
            outputs = out[:, :, own], lse[:, :, own]
            parts = _flash_backward(*inputs, *outputs, 0.0, reading.is_causal, scale=ctx.scale)
            for total, part, where in zip(sums, parts, (own, seen, seen), strict=True):
                total[:, :, where] += part
        return *(each.to(query.dtype) for each in sums), None, None


def _places(reading: Reading) -> tuple[slice, slice]:
    return slice(reading.first, reading.last), slice(reading.seen_first, reading.seen_last)
