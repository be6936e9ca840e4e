"""A model's hidden states at wanted positions of a micro-batch, padded or packed (``training.packing``).

Padded, the body of the model runs on [B, S]: right padding needs no mask, since a causal model's earlier positions
never look at what follows them. Packed ("varlen"), the B documents stand one behind the other in one row [1, T]
without padding: position ids begin anew with each, and attention stays within each, so that a document's states are
those it has by itself. A document goes as far as states of it are wanted.

Attention gets the documents' bounds as keyword arguments, which transformers hands down to every layer and keeps for
layers that gradient checkpointing computes again: flash attention its own (``cu_seq_lens_q`` and its like); elsewhere
``attend_within_documents`` calls torch's scaled dot-product attention once a document, the block-diagonal causal mask
without ever holding its T x T entries. A model that does not follow is found out by a probe when it is opened.

Invariant a_document_is_computed_by_itself: its states and its gradient do not depend on its neighbours.
"""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from consumers.batching.settings import Packing
from schemas.errors import ModelError

Attention = Literal["sdpa", "flash_attention_2"]
Body = Callable[..., Tensor]
"""The part of a model that sees other positions: inputs as a Hugging Face model takes them to states [B, S, H]."""

WITHIN_DOCUMENTS = "sdpa_within_documents"
_LENGTHS = "document_lengths"
_MASKED_BY_WINDOW = ("full_attention", "sliding_attention")
_PROBED = (5, 1, 4)
"""Lengths of the probe's documents."""


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
    return {_LENGTHS: numbers} | flash


def attend_within_documents(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Causal attention of [B, heads, T, size] each; of the documents of ``document_lengths``, within each of them.

    Without them a row is one document. Returns [B, T, heads, size].
    """
    lengths: Sequence[int] = options.pop(_LENGTHS, None) or (query.shape[2],)
    window = options.get("sliding_window")
    documents = zip(*(torch.split(each, list(lengths), dim=2) for each in (query, key, value)), strict=True)
    pieces = [sdpa_attention_forward(module, q, k, v, _window_mask(q, window), **options)[0] for q, k, v in documents]
    return torch.cat(pieces, dim=1), None


def _window_mask(query: Tensor, window: int | None) -> Tensor | None:
    """Bool [1, 1, L, L] of the last ``window`` positions, its own among them; None: plainly causal."""
    length = query.shape[2]
    if window is None or length <= window:
        return None
    everything = torch.ones(length, length, dtype=torch.bool, device=query.device)
    return everything.tril().triu(1 - window)[None, None]


def restore(model: Any) -> None:
    """Undo ``prepare``: to look into the model, which flash attention allows in half precision only."""
    if getattr(model.config, "_attn_implementation", None) in (WITHIN_DOCUMENTS, "flash_attention_2"):
        model.set_attn_implementation("sdpa")


def prepare(model: Any, packing: Packing, attention: Attention) -> None:
    """Let a model's attention be what the settings say.

    Raises:
        ModelError: it cannot compute the documents of one row apart, or there is no such attention.
    """
    if packing == "varlen":
        _refuse_unless_apart(model)
    if attention != "sdpa":
        _set_attention(model, attention)


def _refuse_unless_apart(model: Any) -> None:
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ()) - set(_MASKED_BY_WINDOW)
    if kinds:
        raise _not_apart(model, f"layers of {sorted(kinds)[0]}")
    if "position_ids" not in inspect.signature(model.get_decoder().forward).parameters:
        raise _not_apart(model, "no position_ids")
    # Only a model that works with flash attention hands the width of a sliding window down to its attention.
    if not all(getattr(model, name, False) for name in ("_supports_sdpa", "_supports_flash_attn")):
        raise _not_apart(model, "an attention of its own")
    expected = _probe(model, "padded")
    ALL_ATTENTION_FUNCTIONS.register(WITHIN_DOCUMENTS, attend_within_documents)
    _set_attention(model, WITHIN_DOCUMENTS)
    try:
        found = _probe(model, "varlen")
    except (RuntimeError, TypeError, ValueError) as error:
        raise _not_apart(model, (str(error).strip() or repr(error)).splitlines()[0]) from error
    if not torch.allclose(found, expected, rtol=0.0, atol=1e-4 * float(expected.abs().max())):
        raise _not_apart(model, "states that depend on a document's neighbours")


def _not_apart(model: Any, found: str) -> ModelError:
    return ModelError(
        f'expected a model that keeps the documents of one row apart for training.packing="varlen", got '
        f'{type(model).__name__} with {found}; set it to "padded"'
    )


def _set_attention(model: Any, attention: str) -> None:
    try:
        model.set_attn_implementation(attention)
    except (ImportError, ValueError) as error:
        said = (str(error).strip() or repr(error)).splitlines()[0]
        raise ModelError(
            f"expected {attention} for {type(model).__name__}, got: {said}; "
            'set training.attn_implementation = "sdpa", or install it'
        ) from error


@torch.no_grad()
def _probe(model: Any, packing: Packing) -> Tensor:
    """States [K, H] of all positions of some documents."""
    device, vocabulary = model.device, int(model.config.get_text_config().vocab_size)
    count = len(_PROBED)
    ids = (torch.arange(count * max(_PROBED), device=device) * 7 % vocabulary).view(count, -1)
    wanted = torch.arange(max(_PROBED), device=device) < torch.tensor(_PROBED, device=device).unsqueeze(1)
    row, column = torch.nonzero(wanted, as_tuple=True)
    decoder = model.get_decoder()
    body = logits_of(model) if decoder is model else body_of(decoder)
    return states_at(body, packing, ids, row, column)
