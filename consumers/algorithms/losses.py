"""Token losses of the GRPO family as un-normalised sums, so that a batch may be split into any micro-batches.

With mu the behaviour policy, pi the current one, sg stop-gradient, w = pi / mu, C the importance-sampling cap:

- ratio "behaviour": r = min(w, C), token loss -min(r A, clip(r, 1 - e_low, 1 + e_high) A). Staleness is clipped;
  for A < 0 the cap is PPO's dual clip (arXiv 1912.09729).
- ratio "proximal": r = pi / sg(pi), token loss -sg(min(w, C)) min(r A, clip(r) A). With one update per batch r is 1
  and nothing is clipped: REINFORCE with truncated importance sampling.

To each token beta w (exp(d) - d - 1) is added, d = log ref - log pi: the k3 estimator of KL(pi || ref), weighted since
tokens are drawn from mu (DeepSeek-V3.2, arXiv 2512.02556); see ``_divergence``.
Averages: grpo (arXiv 2402.03300), dapo (arXiv 2503.14476), dr_grpo (arXiv 2503.20783); see ``denominator``.

Invariant accumulated_micro_batches_equal_one_batch: sums divided by ``denominator`` at the end do not depend on the
split; nothing in here averages over a micro-batch.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from consumers.algorithms.settings import AlgorithmSettings
from schemas.errors import ModelError

MAX_LOGITS = 1 << 26
"""Logits held at once, 256 MiB in float32; above that they are made in pieces, and made again for the gradient."""

Head = Callable[[Tensor], Tensor]


class CompletionScorer:
    """Log-probabilities of a micro-batch's completions; applies the output layer only where a token is trained.

    Right padding needs no attention mask: a causal model's trained positions never look at what follows them.

    Models whose logits are not simply output layer (last hidden state), such as soft-capped ones, are found out by a
    probe, and pay for the logits of every position. ``float32_head``: the output layer computes in float32 from float32
    states, also under autocast; the rest of the model does not.

    Raises:
        ModelError: ``float32_head`` with such a model.
    """

    def __init__(self, model: Any, *, float32_head: bool = False) -> None:
        self._model = model
        self._decoder = model.get_decoder()
        self._head: Head | None = model.get_output_embeddings()
        if not self._head_is_plain():
            if float32_head:
                raise ModelError(
                    "expected a model whose logits are its output layer's for training.cast_lm_head_to_fp32, got "
                    f"{type(model).__name__}, which alters them; switch the setting off"
                )
            self._head = None
        elif float32_head:
            self._head = partial(_in_float32, self._head)

    @torch.no_grad()
    def _head_is_plain(self) -> bool:
        # ``get_decoder`` of a model without one of its own returns the model itself.
        if self._head is None or self._decoder is self._model:
            return False
        probe = torch.arange(4, device=self._model.device).unsqueeze(0) % self._vocabulary
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
        states = states[row, column - 1]  # the position before a token predicts it; [K, hidden] or [K, vocabulary]
        scored, entropy = _score(states, self._head, input_ids[row, column], temperatures[row], self._vocabulary)
        return torch.zeros_like(mask).index_put((row, column), scored), entropy

    @property
    def _vocabulary(self) -> int:
        return int(self._model.config.get_text_config().vocab_size)


def _in_float32(head: Head, states: Tensor) -> Tensor:
    # Of the module itself and not of a copy, so that the gradient reaches its weight, tied or not. Without this context
    # autocast would round both factors to bfloat16 again.
    with torch.autocast(states.device.type, enabled=False):
        return head(states.float())


def _score(
    states: Tensor, head: Head | None, targets: Tensor, temperatures: Tensor, vocabulary: int
) -> tuple[Tensor, Tensor]:
    size = max(1, MAX_LOGITS // vocabulary)
    # Without a head ``states`` are all the logits already, so pieces would save nothing.
    if len(targets) <= size or head is None:
        return _score_piece(states, head, targets, temperatures)
    # Checkpointed, or autograd would keep the logits of every piece, [size, vocabulary], until the backward pass.
    pieces = [
        checkpoint(_score_piece, part, head, target, temperature, use_reentrant=False)
        for part, target, temperature in zip(
            *(torch.split(tensor, size) for tensor in (states, targets, temperatures)), strict=True
        )
    ]
    return torch.cat([scored for scored, _ in pieces]), torch.stack([entropy for _, entropy in pieces]).sum()


def _score_piece(states: Tensor, head: Head | None, targets: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probs [K] of ``targets`` and the sum of the K entropies, in float32."""
    # log p(t) = z_t / T - logsumexp(z / T); float32, since autocast gives bfloat16 logits, too coarse for the sum.
    logits = (states if head is None else head(states)).float() / temperatures.unsqueeze(1)
    normaliser = torch.logsumexp(logits, dim=-1)
    scored = logits.gather(1, targets.unsqueeze(1)).squeeze(1) - normaliser
    with torch.no_grad():  # H = logsumexp(z) - sum p z, in nats
        probabilities = torch.exp(logits - normaliser.unsqueeze(1))
        entropy = (normaliser - (probabilities * logits).sum(dim=-1)).sum()
    return scored, entropy


@dataclass(frozen=True)
class LossSums:
    """``loss``: a scalar to differentiate. ``metrics``: scalar sums (and ``_min``/``_max`` extremes) over tokens."""

    loss: Tensor
    metrics: dict[str, Tensor]


@dataclass(frozen=True)
class BatchTotals:
    """What a finished batch is divided by: its trained sequences and trained tokens."""

    sequences: int
    tokens: int


def denominator(settings: AlgorithmSettings, totals: BatchTotals, max_completion_length: int) -> float:
    """What the accumulated loss sum is divided by; at least 1, so that an empty batch stays finite."""
    match settings.loss_type:
        case "grpo":
            return float(max(totals.sequences, 1))
        case "dapo":
            return float(max(totals.tokens, 1))
        case "dr_grpo":
            return float(max(totals.sequences, 1) * max_completion_length)


def token_losses(
    settings: AlgorithmSettings,
    logprobs: Tensor,
    behaviour_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    reference_logprobs: Tensor | None = None,
) -> LossSums:
    """Sum of token losses and of token metrics.

    ``logprobs``, ``behaviour_logprobs``, ``reference_logprobs`` and ``mask`` (0 or 1) are [B, S] float32, log-probs
    in nats at the sampling temperature; ``advantages`` is [B]. Values where the mask is 0 are not looked at.
    """
    trained = mask > 0  # bool [B, S]
    # log w = log pi - log mu, [B, S]; masked before any exp, whose overflow would make the gradient 0 x inf.
    log_ratio = torch.where(trained, logprobs - behaviour_logprobs, 0.0)
    advantage = advantages.unsqueeze(1).expand_as(log_ratio)
    losses, clipped = _surrogate(settings, log_ratio, advantage)
    metrics = _ratio_metrics(log_ratio.detach(), advantage, clipped, trained)
    if reference_logprobs is not None and settings.beta > 0:
        gap = torch.where(trained, reference_logprobs - logprobs, 0.0)
        divergence = _divergence(settings, gap, log_ratio)
        losses = losses + settings.beta * divergence
        metrics["kl"] = divergence.detach().sum()
    weights = trained.to(losses.dtype)
    if settings.loss_type == "grpo":  # 1 / |o_i| here, 1 / sequences in ``denominator``: each sequence counts the same
        weights = weights / weights.sum(dim=1, keepdim=True).clamp(min=1)
    return LossSums(torch.where(trained, losses * weights, 0.0).sum(), metrics)


def _truncated_weight(settings: AlgorithmSettings, log_ratio: Tensor) -> Tensor:
    """min(w, C)."""
    cap = settings.importance_sampling_cap
    # Truncated in log space: clamping exp's overflow would turn its gradient into 0 x inf.
    return torch.exp(log_ratio if cap is None else log_ratio.clamp(max=math.log(cap)))


def _own_ratio(log_ratio: Tensor) -> Tensor:
    """The ratio pi / sg(pi): its value is 1, its gradient that of log pi."""
    return torch.exp(log_ratio - log_ratio.detach())


def _divergence(settings: AlgorithmSettings, gap: Tensor, log_ratio: Tensor) -> Tensor:
    """Estimate of KL(pi || ref) at each token [B, S], >= 0; ``gap`` is d = log ref - log pi.

    sg(min(w, C)) r k3 with r = pi / sg(pi) and k3 = exp(d) - d - 1. Below the cap that is w k3 in value and gradient
    (arXiv 2512.02556, section 3.1): its gradient is w (log pi - log ref) grad log pi, whose expectation under mu is the
    gradient of KL(pi || ref). Without the weight it is (1 - exp(d)) grad log pi, which on policy is the gradient of
    KL(ref || pi), and off policy of neither.
    """
    k3 = torch.exp(gap) - gap - 1  # unlike -d never negative for a single token
    if not settings.use_bias_correction_kl:
        return k3
    return _truncated_weight(settings, log_ratio).detach() * _own_ratio(log_ratio) * k3


def _surrogate(settings: AlgorithmSettings, log_ratio: Tensor, advantage: Tensor) -> tuple[Tensor, Tensor]:
    """Token losses [B, S] and the signed mask of clipped tokens [B, S]: -1 at the floor, 1 at the ceiling."""
    floor, ceiling = settings.clip_range
    weight = _truncated_weight(settings, log_ratio)
    if settings.ratio == "behaviour":
        ratio, outer = weight, torch.ones_like(weight)
    else:
        ratio, outer = _own_ratio(log_ratio), weight.detach()
    losses = -outer * torch.minimum(ratio * advantage, ratio.clamp(floor, ceiling) * advantage)
    # Outside the range a token is clipped only where min picks the constant: beyond it in the direction A pushes to.
    value = ratio.detach()
    low = (value < floor) & (advantage < 0)
    high = (value > ceiling) & (advantage > 0)
    return losses, high.int() - low.int()


def _ratio_metrics(log_ratio: Tensor, advantage: Tensor, clipped: Tensor, trained: Tensor) -> dict[str, Tensor]:
    """Sums over trained tokens, and the extremes of w = pi / mu."""
    weight = torch.exp(log_ratio)
    return {
        "ratio": weight[trained].sum(),
        "ratio_min": torch.where(trained, weight, torch.inf).min(),
        "ratio_max": torch.where(trained, weight, -torch.inf).max(),
        "mismatch_kl": (weight - log_ratio - 1)[trained].sum(),  # k3 of KL(mu || pi): tokens are drawn from mu
        "clip_low": ((clipped < 0) & trained).sum(),
        "clip_high": ((clipped > 0) & trained).sum(),
    }
