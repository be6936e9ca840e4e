"""A model's hidden states at chosen positions of a micro-batch, padded, packed or shared (``training.packing``).

Padded, the body of the model runs on [B, S]. Right padding needs no mask, since earlier positions of a causal model
never see later ones. Packed ("varlen"), the B documents are joined in one row [1, T] without padding. Position ids
restart with each document, and attention stays within it, so its states are the same as without the others. A document
is cut after the last position whose state is needed. Shared, the row has a prefix of several documents, such as a
group's prompt, only once (``prefixes.py``). So its states get the gradients of all these documents.

Attention gets the documents' bounds, or their tree, as keyword arguments. A Hugging Face model passes them to every
layer, and keeps them for layers that gradient checkpointing computes again. Flash attention reads its own arguments
(``cu_seq_lens_q`` and similar), every other attention ``document_lengths`` or ``prefix_tree``. This module does not
choose a model's attention.

Invariant a_document_is_independent_of_its_neighbours: they change neither its states nor its gradient. Shared, they
change only the order of sums.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from streamrl.consumers.batching.prefixes import prefix_tree
from streamrl.consumers.batching.settings import Packing

Body = Callable[..., Tensor]
"""The part of a model that sees other positions: maps a Hugging Face model's inputs to states [B, S, H]."""

DOCUMENT_LENGTHS = "document_lengths"
"""Keyword argument with the lengths of a row's documents: ints, in their order."""
PREFIX_TREE = "prefix_tree"
"""Keyword argument with the ``PrefixTree`` of a row's tokens."""


def body_of(decoder: Any) -> Body:
    """A function that computes the last hidden states, without the output layer."""
    return partial(_output, decoder, "last_hidden_state")


def logits_of(model: Any) -> Body:
    """A function that computes the logits of every position."""
    return partial(_output, model, "logits")


def _output(module: Any, name: str, **inputs: Any) -> Tensor:
    found: Tensor = getattr(module(use_cache=False, **inputs), name)
    return found


def states_at(body: Body, packing: Packing, input_ids: Tensor, row: Tensor, column: Tensor) -> Tensor:
    """States [K, H] of K positions (``row``, ``column``, int64 [K]) of right-padded ``input_ids`` [B, S]."""
    if packing == "padded":
        return body(input_ids=input_ids)[row, column]
    lengths = torch.zeros(len(input_ids), dtype=torch.int64, device=input_ids.device)  # [B], 0 if no state is needed
    lengths = lengths.scatter_reduce(0, row, column + 1, "amax")
    if not len(row):
        lengths[0] = 1  # a rank without work must still call the model, because all ranks make the same calls
    if packing == "shared":
        return _states_in_tree(body, input_ids, lengths, row, column)
    positions = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
    kept = positions < lengths.unsqueeze(1)  # bool [B, S], with T true entries
    bounds = _bounds(lengths[lengths > 0])
    states = body(input_ids=input_ids[kept].unsqueeze(0), position_ids=positions[kept].unsqueeze(0), **bounds)[0]
    starts = lengths.cumsum(0) - lengths
    return states[starts[row] + column]


def _states_in_tree(body: Body, input_ids: Tensor, lengths: Tensor, row: Tensor, column: Tensor) -> Tensor:
    tree = prefix_tree(input_ids.cpu().numpy(), lengths.cpu().numpy())
    rows, columns, places = (torch.from_numpy(each).to(row.device) for each in (tree.row, tree.column, tree.places))
    row_ids, positions = input_ids[rows, columns].unsqueeze(0), columns.unsqueeze(0)
    states = body(input_ids=row_ids, position_ids=positions, **{PREFIX_TREE: tree})[0]
    # A prompt's last state is taken once for each completion. The gradient of ``index_select`` adds them up in a fixed
    # order, that of an index with brackets does not if there are several threads.
    return states.index_select(0, places[row, column])


def _bounds(lengths: Tensor) -> dict[str, Any]:
    """Keyword arguments with the bounds of documents of these lengths, int64 [D], for any attention."""
    ends = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    numbers = tuple(lengths.tolist())
    longest = max(numbers)
    flash = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}
    return {DOCUMENT_LENGTHS: numbers} | flash
