"""A forward pass for plain decoder models, with few tensor operations.

A small decode step spends most of its time on calls, not on arithmetic. So fewer operations make it faster. A plain
decoder has RMS norms before attention and before a gated MLP, rotary positions and full attention. Llama, Qwen2, Qwen3
and Mistral are plain decoders. ``why_not_plain`` names the part that makes a model another kind.

``PlainForward`` computes the same as the model's own forward pass, from the same parameters, up to rounding. It writes
the key-value cache in place. For a prefix it computes neither the last layer's output nor logits.

Parameters that are multiplied with the same input are adjacent in memory, and the model's parameters are views of them.
So weights that are copied over the model's parameters take effect here, too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from transformers import LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM

from streamrl.producers.generation.engines.own_forward import SMALLEST, room_for

_PLAIN = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)
_FIXED_ROTARY = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary positions whose frequencies do not depend on a sequence's length."""


def why_not_plain(model: Any) -> str:
    """Why ``PlainForward`` cannot compute this model; empty if it can."""
    if type(model) not in _PLAIN:
        return f"a {type(model).__name__}"
    config = model.config
    rotary = model.model.rotary_emb.rope_type
    if rotary not in _FIXED_ROTARY:
        return f"rotary positions of kind {rotary}"
    if config.hidden_act != "silu":
        return f"the activation {config.hidden_act}"
    layer = model.model.layers[0]
    if layer.self_attn.o_proj.bias is not None or layer.mlp.down_proj.bias is not None:
        return "biases after attention or in the MLP"
    return ""


class PlainForward:
    """Prefill and decode of a plain decoder over a cache of slots. See ``SlotForward``."""

    def __init__(self, model: Any) -> None:
        config, first = model.config, model.model.layers[0].self_attn
        self._heads, self._size = config.num_attention_heads, first.head_dim
        self._embedding: torch.Tensor = model.model.embed_tokens.weight
        self._head: torch.Tensor = model.lm_head.weight.t()
        self._norm, self._eps = model.model.norm.weight, float(config.rms_norm_eps)
        self._scale = float(first.scaling)
        self._rotary: Any = model.model.rotary_emb
        self._layers = [_Layer.of(layer) for layer in model.model.layers]
        self._is_single = model.dtype == torch.float32
        self.cache = PlainCache(len(self._layers), config.num_key_value_heads, self._embedding, self._size)
        self._cos = self._sin = self._embedding.new_empty(0, self._size)
        self._indices = torch.empty(0)
        self._lowest = torch.finfo(model.dtype).min

    def prefill(self, prefixes: Sequence[Sequence[int]], rows: Sequence[Sequence[int]]) -> None:
        """See ``SlotForward``."""
        count, longest = len(prefixes), max(len(prefix) for prefix in prefixes)
        # Right-padded [prefixes, longest]. Causal attention hides the padding from all real tokens. The padding's keys
        # and values are in the cache after a row's end, where each is overwritten before a token sees it.
        padded = [[*prefix, *[0] * (longest - len(prefix))] for prefix in prefixes]
        device = self._embedding.device
        targets = torch.tensor([row for of_prefix in rows for row in of_prefix], device=device)
        sources = torch.tensor([index for index, of_prefix in enumerate(rows) for _ in of_prefix], device=device)
        self._extend_tables(longest)
        cos, sin = self._cos[:longest].unsqueeze(1), self._sin[:longest].unsqueeze(1)
        hidden = functional.embedding(torch.tensor(padded, device=device).view(-1), self._embedding)
        for number, layer in enumerate(self._layers):
            heads = self._project(layer, hidden, (count, longest), cos, sin)
            # [prefixes, longest, heads, size] → [prefixes, heads, longest, size]
            states = heads.transpose(1, 2)
            keys, values = states[:, self._heads :].chunk(2, dim=1)
            self.cache.fill(number, targets, keys.index_select(0, sources), values.index_select(0, sources))
            if number + 1 < len(self._layers):
                attended = functional.scaled_dot_product_attention(
                    states[:, : self._heads], keys, values, is_causal=True, scale=self._scale, enable_gqa=True
                )
                hidden = self._finish(layer, hidden, attended.transpose(1, 2).reshape(len(hidden), -1))

    def decode(self, tokens: torch.Tensor, positions: torch.Tensor, longest: int) -> torch.Tensor:
        """See ``SlotForward``."""
        count = len(tokens)
        self._extend_tables(longest)
        cos, sin = self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)
        # One entry per row and head of keys, as the cache and attention have them.
        ends = positions.repeat_interleave(self.cache.kv_heads)
        places, mask = self.cache.places(ends), self._mask(ends, longest)
        hidden = functional.embedding(tokens, self._embedding)
        for number, layer in enumerate(self._layers):
            heads = self._project(layer, hidden, (count,), cos, sin)
            self.cache.write(number, places, heads)
            keys, values = self.cache.read(number, len(ends), longest)
            queries = heads[:, : self._heads].reshape(len(ends), -1, self._size)
            hidden = self._finish(layer, hidden, self._attend(queries, keys, values, mask).view(count, -1))
        return torch.mm(self._normed(hidden, self._norm), self._head)

    def _project(
        self, layer: "_Layer", hidden: torch.Tensor, shape: tuple[int, ...], cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        """Queries, keys and values [*shape, heads, size] of hidden states; queries and keys are rotated."""
        heads = layer.qkv(self._normed(hidden, layer.before_attention)).view(*shape, -1, self._size)
        kv_heads = (heads.shape[-2] - self._heads) // 2
        if layer.query_norm is not None and layer.key_norm is not None:
            queries, keys, _ = heads.split((self._heads, kv_heads, kv_heads), dim=-2)
            queries.copy_(self._normed(queries, layer.query_norm))
            keys.copy_(self._normed(keys, layer.key_norm))
        # x cos + (second half, first half) sin, where the sines of the first half are negative.
        turned = heads[..., : self._heads + kv_heads, :]
        halves_swapped = turned.roll(self._size // 2, -1)
        turned.mul_(cos).add_(halves_swapped.mul_(sin))
        return heads

    def _finish(self, layer: "_Layer", hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The layer's output from its input and from the output of its heads, both [tokens, …]."""
        hidden = self._add_product(hidden, attended, layer.output)
        gate, up = layer.gate_up(self._normed(hidden, layer.before_mlp)).chunk(2, -1)
        return self._add_product(hidden, functional.silu(gate).mul_(up), layer.down)

    def _attend(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """Attention of queries [n, queries per head of keys, size] to keys and values [n, longest, size]."""
        # In float32 two products of matrices take less time than the fused attention of a CPU.
        if self._is_single:
            scores = torch.baddbmm(mask, queries, keys.transpose(1, 2), alpha=self._scale)
            return torch.bmm(torch.softmax(scores, -1), values)
        queries, keys, values, mask = (tensor.unsqueeze(1) for tensor in (queries, keys, values, mask))
        return functional.scaled_dot_product_attention(queries, keys, values, mask, scale=self._scale)

    def _mask(self, ends: torch.Tensor, longest: int) -> torch.Tensor:
        """Added to scores [n, queries, longest]: 0 up to a row's own position, the lowest number after it."""
        # Grown by doubling and kept, to avoid an allocation at each step.
        if len(self._indices) < longest:
            self._indices = torch.arange(2 * longest, device=ends.device)
        hidden = self._indices[:longest] > ends.unsqueeze(1)
        return hidden.to(self._embedding.dtype).mul_(self._lowest).unsqueeze(1)

    # In half precision the next two round where the model's own forward rounds, as the trainer does.

    def _normed(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if self._is_single:
            return functional.rms_norm(hidden, weight.shape, weight, self._eps)
        # x / sqrt(mean(x²) + eps) * weight
        wide = hidden.float()
        return weight * wide.mul(torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self._eps)).to(hidden.dtype)

    def _add_product(self, hidden: torch.Tensor, inner: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.addmm(hidden, inner, weight) if self._is_single else hidden + torch.mm(inner, weight)

    def _extend_tables(self, longest: int) -> None:
        """Keep cosines and sines of all positions below ``longest``, as the model's own rotary module gives them."""
        if len(self._cos) >= longest:
            return
        positions = torch.arange(max(2 * longest, SMALLEST), device=self._embedding.device).unsqueeze(0)
        cos, sin = self._rotary(self._embedding, positions)
        half = self._size // 2
        self._cos, self._sin = cos[0], torch.cat((-sin[0, :, :half], sin[0, :, half:]), -1)


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer's parameters. Matrices are [in, out]."""

    qkv: "_Projection"
    gate_up: "_Projection"
    output: torch.Tensor
    down: torch.Tensor
    before_attention: torch.Tensor
    before_mlp: torch.Tensor
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None

    @classmethod
    def of(cls, layer: Any) -> "_Layer":
        """The parameters of a decoder layer, which become views of joint ones."""
        attention, mlp = layer.self_attn, layer.mlp
        normed = hasattr(attention, "q_norm")
        return cls(
            qkv=_Projection.of((attention.q_proj, attention.k_proj, attention.v_proj)),
            gate_up=_Projection.of((mlp.gate_proj, mlp.up_proj)),
            output=_Projection.of((attention.o_proj,)).weight,
            down=_Projection.of((mlp.down_proj,)).weight,
            before_attention=layer.input_layernorm.weight,
            before_mlp=layer.post_attention_layernorm.weight,
            query_norm=attention.q_norm.weight if normed else None,
            key_norm=attention.k_norm.weight if normed else None,
        )


@dataclass(frozen=True, slots=True)
class _Projection:
    """Several linear layers of one input as one: weight [in, out], bias [out]."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    @classmethod
    def of(cls, linears: Sequence[torch.nn.Linear]) -> "_Projection":
        """The joined parameters. The parameters of the linear layers become views of them."""
        joined = torch.cat([linear.weight for linear in linears])
        # [in, out] in memory: a CPU's product of few rows in float32 takes up to 40 % less time, in bfloat16 the same.
        if joined.dtype == torch.float32:
            joined = joined.t().contiguous().t()
        bias = None if linears[0].bias is None else torch.cat([linear.bias for linear in linears])
        start = 0
        for linear in linears:
            end = start + linear.out_features
            linear.weight = torch.nn.Parameter(joined[start:end], requires_grad=False)
            if bias is not None:
                linear.bias = torch.nn.Parameter(bias[start:end], requires_grad=False)
            start = end
        return cls(joined.t(), bias)

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """The product [tokens, out] of inputs [tokens, in]."""
        return torch.mm(inputs, self.weight) if self.bias is None else torch.addmm(self.bias, inputs, self.weight)


class PlainCache:
    """Keys and values of each layer, [2, rows, kv heads, capacity, size]: row r holds a completion's tokens from 0 on.

    Rows in use are always the first ones. Memory that was never written is zero: masked positions are multiplied, too,
    and zero times NaN is NaN.
    """

    def __init__(self, layers: int, kv_heads: int, like: torch.Tensor, size: int) -> None:
        self.kv_heads = kv_heads
        self._like, self._size = like, size
        self._room = (0, 0)
        self._layers = [self._empty() for _ in range(layers)]
        self._starts = torch.empty(0)

    def reserve(self, rows: int, length: int, used_rows: int, used_length: int) -> None:
        """See ``SlotRows``."""
        room = (room_for(rows, self._room[0], 1), room_for(length, self._room[1], SMALLEST))
        if room == self._room:
            return
        self._room = room
        for number, old in enumerate(self._layers):
            self._layers[number] = new = self._empty()
            new[:, :used_rows, :, :used_length] = old[:, :used_rows, :, :used_length]
        # Index of position 0 of each head of keys, then of values, in a layer flattened to [positions, size].
        heads = torch.arange(2 * room[0] * self.kv_heads, device=self._like.device)
        self._starts = (heads * room[1]).view(2, -1)

    def fill(self, layer: int, rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write keys and values [n, kv heads, length, size] to the start of n rows."""
        for kept, states in zip(self._layers[layer], (keys, values), strict=True):
            kept[:, :, : states.shape[2]].index_copy_(0, rows, states)

    def places(self, positions: torch.Tensor) -> torch.Tensor:
        """Where ``write`` puts a token at these positions, one for each row and head of keys."""
        return (self._starts[:, : len(positions)] + positions).view(-1)

    def write(self, layer: int, places: torch.Tensor, heads: torch.Tensor) -> None:
        """Write one token's keys and values per row, the last ones of its heads [rows, heads, size]."""
        states = heads.view(len(heads), -1, self.kv_heads, self._size)[:, -2:].transpose(0, 1).reshape(-1, self._size)
        self._layers[layer].view(-1, self._size).index_copy_(0, places, states)

    def read(self, layer: int, count: int, longest: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the first rows and positions, views [rows * kv heads, longest, size]."""
        keys, values = self._layers[layer].view(2, -1, self._room[1], self._size)[:, :count, :longest].unbind()
        return keys, values

    def move(self, source: int, target: int, length: int) -> None:
        """See ``SlotRows``."""
        for kept in self._layers:
            kept[:, target, :, :length] = kept[:, source, :, :length]

    def release(self) -> None:
        """See ``SlotRows``."""
        self._room = (0, 0)
        self._layers = [self._empty() for _ in self._layers]

    def _empty(self) -> torch.Tensor:
        rows, capacity = self._room
        return self._like.new_zeros(2, rows, self.kv_heads, capacity, self._size)
