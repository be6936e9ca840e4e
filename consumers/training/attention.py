"""The attention that a model computes with: torch's or flash attention's, over rows or within the documents of a row.

``attend_within_documents`` calls torch's scaled dot-product attention once a document, the block-diagonal causal mask
without ever holding its T x T entries; flash attention is called once for all of them. Of a model that is to keep
documents apart it is made sure when it is opened: by what its configuration says of its layers, and by a probe.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from streamrl.consumers.algorithms.packing import DOCUMENT_LENGTHS, body_of, logits_of, states_at
from streamrl.consumers.batching.settings import Packing
from streamrl.consumers.training.settings import TrainingSettings
from streamrl.schemas.errors import ModelError

WITHIN_DOCUMENTS = "sdpa_within_documents"
_MASKED_BY_WINDOW = ("full_attention", "sliding_attention")
_PROBED = (5, 1, 4)
"""Lengths of the probe's documents."""


def attend_within_documents(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Causal attention of [B, heads, T, size] each; of the documents of ``document_lengths``, within each of them.

    Without them a row is one document. Returns [B, T, heads, size].
    """
    lengths: Sequence[int] = options.pop(DOCUMENT_LENGTHS, None) or (query.shape[2],)
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


def prepare(model: Any, training: TrainingSettings) -> None:
    """Let a model's attention be what the settings say.

    Raises:
        ModelError: it cannot compute the documents of one row apart, or there is no such attention.
    """
    if training.packing == "varlen":
        _refuse_unless_apart(model)
    if training.attn_implementation != "sdpa":
        _set_attention(model, training.attn_implementation)


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
