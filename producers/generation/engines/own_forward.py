"""Prefill and decode by a model's own forward pass, over a key-value cache whose rows have different lengths."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

SMALLEST = 64
"""Fewest positions that are allocated: growing from 1 by doubling would copy six times needlessly."""


class OwnForward:
    """Prefill and decode by the forward pass of any causal language model. See ``SlotForward``."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._lowest = torch.finfo(model.dtype).min
        self._indices = torch.arange(1, device=model.device)
        self.cache = SlotCache(model.config.get_text_config().num_hidden_layers)

    def prefill(self, prefixes: Sequence[Sequence[int]], rows: Sequence[Sequence[int]]) -> None:
        """See ``SlotForward``."""
        device = self._model.device
        longest = max(len(prefix) for prefix in prefixes)
        # Right-padded [prompts, longest]. Causal attention hides the padding from all real tokens, so no mask is
        # needed, and the padding's keys and values are not copied into the cache.
        padded = torch.tensor([[*prefix, *[0] * (longest - len(prefix))] for prefix in prefixes], device=device)
        prefilled = DynamicCache(config=self._model.config)
        positions = torch.arange(longest, device=device).unsqueeze(0)
        self._model(
            input_ids=padded, position_ids=positions, past_key_values=prefilled, use_cache=True, logits_to_keep=1
        )
        for index, (prefix, of_prefix) in enumerate(zip(prefixes, rows, strict=True)):
            self.cache.fill(of_prefix, prefilled, index, len(prefix))

    def decode(self, tokens: torch.Tensor, positions: torch.Tensor, longest: int) -> torch.Tensor:
        """See ``SlotForward``."""
        self.cache.positions.set(positions, longest)
        # Grown by doubling and kept, to avoid an allocation at each step.
        if len(self._indices) < longest:
            self._indices = torch.arange(2 * longest, device=positions.device)
        # Added to attention's scores [n, heads, 1, longest]: 0 up to a row's own position, the lowest number after it.
        column = positions.unsqueeze(1)
        hidden = self._indices[:longest] > column
        mask = torch.zeros(hidden.shape, dtype=self._model.dtype, device=positions.device).masked_fill_(
            hidden, self._lowest
        )
        output = self._model(
            input_ids=tokens.unsqueeze(1),
            attention_mask=mask[:, None, None, :],
            position_ids=column,
            past_key_values=self.cache,
            use_cache=True,
        )
        logits: torch.Tensor = output.logits[:, -1]
        return logits


class SlotCache(Cache):  # type: ignore[misc]
    """Key-value cache of a batch whose rows have different lengths: row r holds one completion's tokens from 0 on.

    The model gets it as ``past_key_values`` at every decode step. Rows in use are always the first ones, so attention
    reads no others. Unused memory is zero, never uninitialised: masked positions are multiplied, too, and zero times
    NaN is NaN.
    """

    def __init__(self, num_layers: int) -> None:
        self.positions = WritePositions()
        self._slots = [SlotLayer(self.positions) for _ in range(num_layers)]
        super().__init__(layers=list(self._slots))

    def reserve(self, rows: int, length: int, used_rows: int, used_length: int) -> None:
        """Make room for rows × length. Grows by doubling, and shrinks when a quarter would suffice."""
        room = (room_for(rows, self.positions.room[0], 1), room_for(length, self.positions.room[1], SMALLEST))
        if room != self.positions.room:
            self.positions.room = room
            for layer in self._slots:
                layer.resize(used_rows, used_length)

    def fill(self, rows: Sequence[int], prefilled: Cache, index: int, length: int) -> None:
        """Copy row ``index`` of a prefilled cache into rows; ``length``: its real tokens."""
        for layer, source in zip(self._slots, prefilled.layers, strict=True):
            if not isinstance(source, DynamicLayer) or source.keys is None or source.values is None:
                raise TypeError(f"a {type(source).__name__} cache layer")
            layer.fill(rows, source.keys[index, :, :length], source.values[index, :, :length])

    def move(self, source: int, target: int, length: int) -> None:
        """Copy one row over another in all layers."""
        for layer in self._slots:
            layer.move(source, target, length)

    def release(self) -> None:
        """Release all memory."""
        self.positions.room = (0, 0)
        for layer in self._slots:
            layer.keys = layer.values = torch.empty(0)
            layer.is_initialized = False


class SlotLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values of one layer, each [rows, heads, capacity, head size]."""

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, positions: "WritePositions") -> None:
        super().__init__()
        self.positions = positions

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate the reserved room, with the shapes of the model's own states."""
        rows, capacity = self.positions.room
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys = key_states.new_zeros(rows, key_states.shape[1], capacity, key_states.shape[3])
        self.values = value_states.new_zeros(rows, value_states.shape[1], capacity, value_states.shape[3])
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write one token of each row. Returns the keys and values for attention: all rows in use, up to the longest.

        The states are [rows, heads, 1, head size]; the results are views of the cache, [rows, heads, longest, head
        size].
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._write(self.keys, key_states)
        self._write(self.values, value_states)
        rows, longest = self.positions.rows, self.positions.longest
        return self.keys[:rows, :, :longest], self.values[:rows, :, :longest]

    def resize(self, rows: int, length: int) -> None:
        """Move to the reserved room, keeping the first rows × length."""
        if not self.is_initialized:
            return
        old_keys, old_values = self.keys, self.values
        self.lazy_initialization(old_keys, old_values)
        self.keys[:rows, :, :length] = old_keys[:rows, :, :length]
        self.values[:rows, :, :length] = old_values[:rows, :, :length]

    def fill(self, rows: Sequence[int], keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write the same keys and values [heads, length, head size] to the start of rows."""
        if not self.is_initialized:
            self.lazy_initialization(keys.unsqueeze(0), values.unsqueeze(0))
        for row in rows:
            self.keys[row, :, : keys.shape[1]] = keys
            self.values[row, :, : values.shape[1]] = values

    def move(self, source: int, target: int, length: int) -> None:
        """Copy one row over another."""
        if self.is_initialized:
            self.keys[target, :, :length] = self.keys[source, :, :length]
            self.values[target, :, :length] = self.values[source, :, :length]

    def _write(self, cache: torch.Tensor, states: torch.Tensor) -> None:
        # One scatter over a flat view [rows * heads * capacity, head size], as each row writes at its own position.
        _, heads, capacity, size = cache.shape
        flat = self.positions.flat(heads, capacity)
        cache.view(-1, size).index_copy_(0, flat, states.reshape(-1, size))


class WritePositions:
    """The positions that the next decode step writes, one for each of n rows; shared by all layers.

    ``rows`` and ``longest``: rows and positions in use. ``room``: allocated rows × positions.
    """

    def __init__(self) -> None:
        self.rows = 0
        self.longest = 0
        self.room = (0, 0)
        self._positions = torch.empty(0)
        self._flat: dict[tuple[int, int], torch.Tensor] = {}

    def set(self, positions: torch.Tensor, longest: int) -> None:
        """Set the positions (n) of the next step's tokens. The largest is ``longest - 1``."""
        self._positions, self.rows, self.longest = positions, len(positions), longest
        self._flat.clear()

    def flat(self, heads: int, capacity: int) -> torch.Tensor:
        """Indices (n × heads) of those positions in a cache flattened to (rows × heads × capacity)."""
        # Position p of head h of row r is at index (r * heads + h) * capacity + p. Layers may differ in their number of
        # heads; layers with the same number share the indices of a step.
        key = (heads, capacity)
        if key not in self._flat:
            first = torch.arange(self.rows * heads, device=self._positions.device) * capacity
            self._flat[key] = first + self._positions.repeat_interleave(heads)
        return self._flat[key]


def room_for(needed: int, current: int, smallest: int) -> int:
    """Size to allocate. Doubling bounds the copies per token; shrinking only at a quarter avoids oscillation."""
    if needed > current:
        return max(needed, 2 * current, smallest)
    if current > max(4 * needed, smallest):
        return max(2 * needed, smallest)
    return current
