"""Attention over sequences that share prefixes: each token sees its own sequence, and shared tokens are computed once.

On a CPU it is a cascade, as inference engines use it for shared prompts. It calls torch's flash attention once for each
piece, causally, and once for each shared prefix, with all tokens that see it. The results for a token are parts of one
softmax. They are weighed by their sums of exponentials:

    out = sum_i exp(lse_i - lse) out_i,    lse = log sum_i exp(lse_i).

Each call's backward pass gets the complete ``out`` and ``lse``, and gives its part of the gradient: flash attention
recomputes exp(q k - lse), which are then the token's weights over its whole sequence. So no key or value is copied, and
no score is kept. Where pieces are so short that the calls would take most of the time, keys and values are copied
instead: one call attends within each sequence by itself, and only attention computes shared tokens again.

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

CALL_SCORES = 1024
"""Scores of a head in separate rows that take about as long as one call of a cascade. It was measured on one core with
4 heads of 32 and 9 heads of 64, forward and backward: 2,000 and 1,000 scores."""


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
        way: Callable[..., Tensor] = _Separate.apply if is_finely_branched(tree) else _Cascade.apply
        return way(query, key, value, tree, scale).transpose(1, 2)
    return attend_by_mask(query, key, value, tree, scale, _compiled_flex()).transpose(1, 2)


def is_finely_branched(tree: PrefixTree) -> bool:
    """Whether separate rows take less time on a CPU than a cascade."""
    rows, width = tree.separate.shape
    return rows * width * width <= CALL_SCORES * len(tree.readings)


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
        dtype = ctx.saved_tensors[0].dtype
        # In float32: torch's backward pass takes 4 to 14 times as long in bfloat16.
        query, key, value, out, lse = (each.float() for each in ctx.saved_tensors)
        gradient = gradients[0].float()
        sums = [torch.zeros_like(each) for each in (query, key, value)]
        for reading in ctx.tree.readings:
            own, seen = _places(reading)
            inputs = gradient[:, :, own], query[:, :, own], key[:, :, seen], value[:, :, seen]
            outputs = out[:, :, own], lse[:, :, own]
            parts = _flash_backward(*inputs, *outputs, 0.0, reading.is_causal, scale=ctx.scale)
            for total, part, where in zip(sums, parts, (own, seen, seen), strict=True):
                total[:, :, where] += part
        return *(each.to(dtype) for each in sums), None, None


class _Separate(torch.autograd.Function):
    """One call over right-padded rows [N, heads, S, size]. Padding comes last, so no token of a sequence sees it."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, tree: PrefixTree, scale: float | None) -> Tensor:
        places, own = torch.from_numpy(tree.separate.places), torch.from_numpy(tree.separate.own)
        shape = tree.separate.shape
        inputs = [_separated(each, places, shape) for each in (query, key, value)]
        rows, lse = _flash(*inputs, 0.0, True, scale=scale)
        ctx.save_for_backward(query, key, value, rows, lse, places, own)
        ctx.shape, ctx.scale = shape, scale
        return _joined(rows, own)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        *saved, rows, lse, places, own = ctx.saved_tensors
        # In float32, as in a cascade.
        inputs = [_separated(each.float(), places, ctx.shape) for each in saved]
        # A shared token's output is that of one row, so other rows' gradients, and those of padding, are 0.
        gradient = torch.zeros(len(places), *gradients[0].transpose(1, 2).shape[2:])
        gradient.index_copy_(0, own, gradients[0][0].transpose(0, 1).float())
        gradient = gradient.unflatten(0, ctx.shape).transpose(1, 2)
        of_query, *others = _flash_backward(gradient, *inputs, rows.float(), lse, 0.0, True, scale=ctx.scale)
        found = [_joined(of_query, own)]
        for each, parts in zip(saved[1:], others, strict=True):
            # All rows' parts are added up, on one place after the other, whatever the threads.
            total = torch.zeros_like(each[0].transpose(0, 1), dtype=torch.float32)
            total.index_add_(0, places, parts.transpose(1, 2).flatten(0, 1))
            found.append(total.transpose(0, 1).unsqueeze(0))
        return *(one.to(saved[0].dtype) for one in found), None, None


def _separated(tensor: Tensor, places: Tensor, shape: tuple[int, int]) -> Tensor:
    """[1, heads, T, size] by place becomes rows [N, heads, S, size]."""
    by_row: Tensor = tensor[0].transpose(0, 1).index_select(0, places)
    return by_row.view(*shape, *by_row.shape[1:]).transpose(1, 2)


def _joined(rows: Tensor, own: Tensor) -> Tensor:
    """Rows [N, heads, S, size] become [1, heads, T, size] by place."""
    by_place: Tensor = rows.transpose(1, 2).flatten(0, 1).index_select(0, own)
    return by_place.transpose(0, 1).unsqueeze(0)


def _places(reading: Reading) -> tuple[slice, slice]:
    return slice(reading.first, reading.last), slice(reading.seen_first, reading.seen_last)
