"""Key-value cache of a batch whose rows have different lengths: row r holds the tokens of one completion from 0 on.

Knows nothing of requests. Rows in use are always the first ones, so that attention reads nothing else; unused memory
is zero, never uninitialised, because masked positions are still multiplied.
"""

from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer

_SMALLEST = 64


class Place:
    """Where the next decode step writes, shared by all layers: position p of row r for each of n rows."""

    def __init__(self) -> None:
        self.rows = 0
        self.longest = 0
        self.room = (0, 0)
        self._positions = torch.empty(0)
        self._flat: dict[tuple[int, int], torch.Tensor] = {}

    def set(self, positions: torch.Tensor, longest: int) -> None:
        """The tokens of the next step stand at these positions (n); the last of them is ``longest - 1``."""
        self._positions, self.rows, self.longest = positions, len(positions), longest
        self._flat.clear()

    def flat(self, heads: int, capacity: int) -> torch.Tensor:
        """Indices (n × heads) of those positions in a cache flattened to (rows × heads × capacity)."""
        key = (heads, capacity)
        if key not in self._flat:
            lines = torch.arange(self.rows * heads, device=self._positions.device) * capacity
            self._flat[key] = lines + self._positions.repeat_interleave(heads)
        return self._flat[key]


class SlotLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """Keys and values of one layer, each (rows, heads, capacity, head size)."""

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, place: Place) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.place = place

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate for the room that was reserved, with the shapes of the model's own states."""
        rows, capacity = self.place.room
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys = key_states.new_zeros(rows, key_states.shape[1], capacity, key_states.shape[3])
        self.values = value_states.new_zeros(rows, value_states.shape[1], capacity, value_states.shape[3])
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write one token of each row; returns all rows in use, up to the longest."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._write(self.keys, key_states)
        self._write(self.values, value_states)
        rows, longest = self.place.rows, self.place.longest
        return self.keys[:rows, :, :longest], self.values[:rows, :, :longest]

    def resize(self, rows: int, length: int) -> None:
        """Move to the reserved room; the first rows × length are kept."""
        if not self.is_initialized:
            return
        old_keys, old_values = self.keys, self.values
        self.lazy_initialization(old_keys, old_values)
        self.keys[:rows, :, :length] = old_keys[:rows, :, :length]
        self.values[:rows, :, :length] = old_values[:rows, :, :length]

    def fill(self, first: int, last: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Start rows first..last-1 with the same keys and values (heads, length, head size)."""
        if not self.is_initialized:
            self.lazy_initialization(keys.unsqueeze(0), values.unsqueeze(0))
        self.keys[first:last, :, : keys.shape[1]] = keys
        self.values[first:last, :, : values.shape[1]] = values

    def move(self, source: int, target: int, length: int) -> None:
        """Copy one row over another."""
        if self.is_initialized:
            self.keys[target, :, :length] = self.keys[source, :, :length]
            self.values[target, :, :length] = self.values[source, :, :length]

    def _write(self, cache: torch.Tensor, states: torch.Tensor) -> None:
        _, heads, capacity, size = cache.shape
        flat = self.place.flat(heads, capacity)
        cache.view(-1, size).index_copy_(0, flat, states.reshape(-1, size))


class SlotCache(Cache):
    """The cache that is passed to the model as ``past_key_values`` at every decode step."""

    def __init__(self, num_layers: int) -> None:
        self.place = Place()
        self._slots = [SlotLayer(self.place) for _ in range(num_layers)]
        super().__init__(layers=list(self._slots))

    def reserve(self, rows: int, length: int, used_rows: int, used_length: int) -> None:
        """Make room for rows × length; grows by doubling, shrinks when a quarter would do."""
        room = (_room(rows, self.place.room[0], 1), _room(length, self.place.room[1], _SMALLEST))
        if room != self.place.room:
            self.place.room = room
            for layer in self._slots:
                layer.resize(used_rows, used_length)

    def fill(self, first: int, last: int, prefilled: Cache, index: int, length: int) -> None:
        """Start rows first..last-1 from row ``index`` of a prefilled cache, of which ``length`` tokens are real."""
        for layer, source in zip(self._slots, prefilled.layers, strict=True):
            if not isinstance(source, DynamicLayer) or source.keys is None or source.values is None:
                raise TypeError(f"a {type(source).__name__} cache layer")
            layer.fill(first, last, source.keys[index, :, :length], source.values[index, :, :length])

    def move(self, source: int, target: int, length: int) -> None:
        """Copy one row over another in all layers."""
        for layer in self._slots:
            layer.move(source, target, length)

    def release(self) -> None:
        """Give all memory back."""
        self.place.room = (0, 0)
        for layer in self._slots:
            layer.keys = layer.values = torch.empty(0)
            layer.is_initialized = False


def _room(needed: int, current: int, smallest: int) -> int:
    if needed > current:
        return max(needed, 2 * current, smallest)
    if current > max(4 * needed, smallest):
        return max(2 * needed, smallest)
    return current
