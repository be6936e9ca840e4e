"""The attention that a model computes with: torch's or flash attention's, over rows or within the documents of a row.

``attend_within_documents`` calls torch's scaled dot-product attention once for each document. This equals a
block-diagonal causal mask, without its T x T entries in memory. Flash attention is called once for all documents.
Documents that share prefixes have an attention of their own (``prefix_attention.py``). A model that must keep documents
apart is checked when it is opened: by its configuration's layer types, and by a probe.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from streamrl.consumers.algorithms.packing import DOCUMENT_LENGTHS, PREFIX_TREE, body_of, logits_of, states_at
from streamrl.consumers.batching.settings import Packing
from streamrl.consumers.training.prefix_attention import attend_along_prefixes, why_not_on
from streamrl.consumers.training.settings import TrainingSettings
from streamrl.schemas.errors import ModelError

WITHIN_DOCUMENTS, ALONG_PREFIXES = "sdpa_within_documents", "along_prefixes"
_LAYERS: dict[Packing, frozenset[str]] = {
    "varlen": frozenset({"full_attention", "sliding_attention"}),
    "shared": frozenset({"full_attention"}),
}
"""Types of layers, in the words of configurations, that each way of packing supports."""
_PROBED = (5, 1, 4, 6)
"""Lengths of the probe's documents. The third shares its first 3 tokens with the first one, the fourth its first 2."""


def attend_within_documents(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Causal attention within each document; query, key and value are [B, heads, T, size].

    ``options`` may hold ``document_lengths``; without them a row is one document. Returns [B, T, heads, size].
    """
    lengths: Sequence[int] = options.pop(DOCUMENT_LENGTHS, None) or (query.shape[2],)
    window = options.get("sliding_window")
    documents = zip(*(torch.split(each, list(lengths), dim=2) for each in (query, key, value)), strict=True)
    pieces = [sdpa_attention_forward(module, q, k, v, _window_mask(q, window), **options)[0] for q, k, v in documents]
    return torch.cat(pieces, dim=1), None


def attend_to_tree(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Causal attention along shared prefixes, for a row [1, heads, T, size] and its ``prefix_tree`` in ``options``.

    Without a tree it is plain causal attention. Returns [B, T, heads, size].

    Raises:
        ValueError: the layer asks for more than causal attention.
    """
    tree = options.pop(PREFIX_TREE, None)
    if tree is None:
        found: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
        return found
    if extra := [name for name in ("sliding_window", "softcap", "position_bias") if options.get(name) is not None]:
        raise ValueError(f"attention with {extra[0]}")
    return attend_along_prefixes(query, key, value, tree, options.get("scaling")), None


def _window_mask(query: Tensor, window: int | None) -> Tensor | None:
    """Mask of the last ``window`` positions including the own one, bool [1, 1, L, L]; None: a causal mask is enough."""
    length = query.shape[2]
    if window is None or length <= window:
        return None
    everything = torch.ones(length, length, dtype=torch.bool, device=query.device)
    return everything.tril().triu(1 - window)[None, None]


def restore(model: Any) -> None:
    """Undo ``prepare``, to inspect the model in full precision, which flash attention does not support."""
    if getattr(model.config, "_attn_implementation", None) in (
        WITHIN_DOCUMENTS,
        ALONG_PREFIXES,
        "flash_attention_2",
    ):
        model.set_attn_implementation("sdpa")


def prepare(model: Any, training: TrainingSettings) -> None:
    """Set the model's attention to what the settings say.

    Raises:
        ModelError: the model cannot keep the documents of one row apart, or does not support this attention.
    """
    if training.packing != "padded":
        _refuse_unless_apart(model, training.packing)
    if training.packing == "shared":
        _refuse_where_not_computed(training)
    if training.attn_implementation != "sdpa":
        _set_attention(model, training.attn_implementation)


def _refuse_where_not_computed(training: TrainingSettings) -> None:
    found = f"training.attn_implementation = {training.attn_implementation}"
    if training.attn_implementation == "sdpa":
        found = why_not_on("cuda" if torch.cuda.is_available() and training.device != "cpu" else "cpu")
    if found:
        raise ModelError(
            f'expected torch\'s own attention for training.packing="shared", got {found}; set it to "varlen"'
        )


def _refuse_unless_apart(model: Any, packing: Packing) -> None:
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ()) - _LAYERS[packing]
    if kinds:
        raise _not_apart(model, packing, f"layers of {sorted(kinds)[0]}")
    if "position_ids" not in inspect.signature(model.get_decoder().forward).parameters:
        raise _not_apart(model, packing, "no position_ids")
    # Only a model that supports flash attention passes the width of a sliding window to its attention.
    if not all(getattr(model, name, False) for name in ("_supports_sdpa", "_supports_flash_attn")):
        raise _not_apart(model, packing, "an attention of its own")
    expected = _probe(model, "padded")
    ALL_ATTENTION_FUNCTIONS.register(WITHIN_DOCUMENTS, attend_within_documents)
    ALL_ATTENTION_FUNCTIONS.register(ALONG_PREFIXES, attend_to_tree)
    _set_attention(model, WITHIN_DOCUMENTS if packing == "varlen" else ALONG_PREFIXES)
    try:
        found = _probe(model, packing)
    except (RuntimeError, TypeError, ValueError) as error:
        raise _not_apart(model, packing, (str(error).strip() or repr(error)).splitlines()[0]) from error
    if not torch.allclose(found, expected, rtol=0.0, atol=1e-4 * float(expected.abs().max())):
        raise _not_apart(model, packing, "states that depend on a document's neighbours")


def _not_apart(model: Any, packing: Packing, found: str) -> ModelError:
    return ModelError(
        f'expected a model that keeps the documents of one row apart for training.packing="{packing}", got '
        f'{type(model).__name__} with {found}; set it to "padded"'
    )


def _set_attention(model: Any, attention: str) -> None:
    try:
        model.set_attn_implementation(attention)
    except (ImportError, ValueError) as error:
        message = (str(error).strip() or repr(error)).splitlines()[0]
        raise ModelError(
            f"expected {attention} for {type(model).__name__}, got: {message}; "
            'set training.attn_implementation = "sdpa", or install it'
        ) from error


@torch.no_grad()
def _probe(model: Any, packing: Packing) -> Tensor:
    """Hidden states [K, H] of all K positions of the probe's documents."""
    device, vocabulary = model.device, int(model.config.get_text_config().vocab_size)
    count = len(_PROBED)
    ids = (torch.arange(count * max(_PROBED), device=device) * 7 % vocabulary).view(count, -1)
    ids[2, :3], ids[3, :2] = ids[0, :3], ids[0, :2]
    wanted = torch.arange(max(_PROBED), device=device) < torch.tensor(_PROBED, device=device).unsqueeze(1)
    row, column = torch.nonzero(wanted, as_tuple=True)
    decoder = model.get_decoder()
    body = logits_of(model) if decoder is model else body_of(decoder)
    return states_at(body, packing, ids, row, column)
