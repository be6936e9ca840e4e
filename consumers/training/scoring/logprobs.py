"""Log-probabilities of completion tokens under a causal model, computed at completion positions only.

Right padding needs no attention mask here: a causal model's trained positions never look at what follows them.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

MAX_LOGITS = 1 << 26
"""Logits held at once; above that they are made in pieces, and made again for the gradient."""

Head = Callable[[Tensor], Tensor]


class CompletionScorer:
    """Scores the completions of a micro-batch; applies the output layer only where a token is trained.

    Models whose logits are not simply output layer (last hidden state), such as soft-capped ones, are found out by a
    probe, and pay for the logits of every position.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._decoder = model.get_decoder()
        self._head: Head | None = model.get_output_embeddings()
        if not self._head_is_plain():
            self._head = None

    @torch.no_grad()
    def _head_is_plain(self) -> bool:
        if self._head is None or self._decoder is self._model:
            return False
        probe = torch.arange(4, device=self._model.device).unsqueeze(0) % self._model.config.vocab_size
        hidden = self._decoder(input_ids=probe, use_cache=False).last_hidden_state
        return torch.allclose(self._head(hidden), self._model(input_ids=probe, use_cache=False).logits, atol=1e-5)

    def __call__(self, input_ids: Tensor, mask: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probs [B, S] float32 in nats at each sample's temperature, 0 where ``mask`` is 0; summed entropy.

        ``input_ids`` int64 [B, S], right padded; ``mask`` [B, S], 0 at the first position; ``temperatures`` [B].
        """
        row, column = torch.nonzero(mask, as_tuple=True)
        if self._head is not None:
            states = self._decoder(input_ids=input_ids, use_cache=False).last_hidden_state
        else:
            states = self._model(input_ids=input_ids, use_cache=False).logits
        states = states[row, column - 1]
        scored, entropy = _score(states, self._head, input_ids[row, column], temperatures[row], self._vocabulary)
        return torch.zeros_like(mask).index_put((row, column), scored), entropy

    @property
    def _vocabulary(self) -> int:
        return int(self._model.config.vocab_size)


def _score(
    states: Tensor, head: Head | None, targets: Tensor, temperatures: Tensor, vocabulary: int
) -> tuple[Tensor, Tensor]:
    size = max(1, MAX_LOGITS // vocabulary)
    if len(targets) <= size or head is None:
        return _score_piece(states, head, targets, temperatures)
    pieces = [
        checkpoint(_score_piece, part, head, target, temperature, use_reentrant=False)
        for part, target, temperature in zip(
            *(torch.split(tensor, size) for tensor in (states, targets, temperatures)), strict=True
        )
    ]
    return torch.cat([scored for scored, _ in pieces]), torch.stack([entropy for _, entropy in pieces]).sum()


def _score_piece(states: Tensor, head: Head | None, targets: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probs [K] of ``targets`` and the sum of the K entropies, in float32."""
    logits = (states if head is None else head(states)).float() / temperatures.unsqueeze(1)
    normaliser = torch.logsumexp(logits, dim=-1)
    scored = logits.gather(1, targets.unsqueeze(1)).squeeze(1) - normaliser
    with torch.no_grad():
        probabilities = torch.exp(logits - normaliser.unsqueeze(1))
        entropy = (normaliser - (probabilities * logits).sum(dim=-1)).sum()
    return scored, entropy
