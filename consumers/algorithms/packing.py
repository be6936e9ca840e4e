"""A model's hidden states at wanted positions of a micro-batch, padded or packed (``training.packing``).

Padded, the body of the model runs on [B, S]: right padding needs no mask, since a causal model's earlier positions
never look at what follows them. Packed ("varlen"), the B documents stand one behind the other in one row [1, T]
without padding: position ids begin anew with each, and attention stays within each, so that a document's states are
those it has by itself. A document goes as far as states of it are wanted.

Attention gets the documents' bounds as keyword arguments, which a Hugging Face model hands down to every layer, and
keeps for layers that gradient checkpointing computes again: flash attention its own (``cu_seq_lens_q`` and its like),
any other ``document_lengths``. Which attention a model has is not decided here.

Invariant a_document_is_computed_by_itself: its states and its gradient do not depend on its neighbours.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from streamrl.consumers.batching.settings import Packing

Body = Callable[..., Tensor]
"""The part of a model that sees other positions: inputs as a Hugging Face model takes them to states [B, S, H]."""

DOCUMENT_LENGTHS = "document_lengths"
"""The keyword argument that says how long the documents of a row are: ints, in their order."""


def body_of(decoder: Any) -> Body:
    """The last hidden states of a model without its output layer."""
    return partial(_output, decoder, "last_hidden_state")


def logits_of(model: Any) -> Body:
    """The logits of every position."""
    return partial(_output, model, "logits")


def _output(module: Any, name: str, **inputs: Any) -> Tensor:
    found: Tensor = getattr(module(use_cache=False, **inputs), name)
    return found


def states_at(body: Body, packing: Packing, input_ids: Tensor, row: Tensor, column: Tensor) -> Tensor:
    """States [K, H] of K positions (``row``, ``column``, int64 [K]) of right-padded ``input_ids`` [B, S]."""
    if packing == "padded":
        return body(input_ids=input_ids)[row, column]
    lengths = torch.zeros(len(input_ids), dtype=torch.int64, device=input_ids.device)  # [B], 0 where none is wanted
    lengths = lengths.scatter_reduce(0, row, column + 1, "amax")
    if not len(row):
        lengths[0] = 1  # over ranks all make the same calls, also the one for which there is nothing to do
    positions = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
    kept = positions < lengths.unsqueeze(1)  # bool [B, S], T of which are true
    bounds = _bounds(lengths[lengths > 0])
    states = body(input_ids=input_ids[kept].unsqueeze(0), position_ids=positions[kept].unsqueeze(0), **bounds)[0]
    starts = lengths.cumsum(0) - lengths
    return states[starts[row] + column]


def _bounds(lengths: Tensor) -> dict[str, Any]:
    """Of documents of these lengths, int64 [D], for whichever attention the model has."""
    ends = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    numbers = tuple(lengths.tolist())
    longest = max(numbers)
    flash = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}
    return {DOCUMENT_LENGTHS: numbers} | flash
