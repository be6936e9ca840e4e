"""Log-probabilities and token losses as un-normalised sums, so that a batch may be split into any micro-batches.

Symbols: mu is the behaviour policy, pi the current one, and pi0 the one at the start of the step (pi itself with one
update a batch). sg is stop-gradient, A a token's advantage. ``ratio`` defines the ratio r and its weight c:

- "behaviour": r = pi / mu, c = 1. Staleness is clipped. With r truncated at C, this is PPO's dual clip for A < 0
  (arXiv 1912.09729).
- "proximal": r = pi / pi0, c = sg(pi0 / mu) (decoupled PPO, arXiv 2110.00641 and 2505.24298). With one update a batch,
  r is 1 and nothing is clipped: REINFORCE with importance weights.

``importance_sampling_mode`` keeps weights w within [floor, C]. TIS limits them; MIS and IcePop (arXiv 2510.18855) set
weights outside to 0. A weight is a token's, or the product over a sequence. The mode acts on c, and on r if r is
pi / mu.

``policy_loss``, with l = 1 - e_low, h = 1 + e_high:

- clip (PPO, arXiv 1707.06347; clip-higher, DAPO, arXiv 2503.14476): -c min(r A, clip(r, l, h) A);
- gspo (arXiv 2507.18071): the same with s = exp(mean of log r over the sequence) instead of r;
- cispo (MiniMax-M1, arXiv 2506.13585): -c sg(clip(r, l, h)) A log pi;
- dppo (arXiv 2602.04879, as implemented in prime-rl): -c keep r A, where keep is 0 for a token whose probability has
  moved by more than e_high up (A > 0) or e_low down (A < 0);
- reinforce (arXiv 2402.14740 with weights): -c A log pi, with c = sg(pi / mu) if ``ratio`` is "behaviour".

Each token's loss also gets ``log_ratio_penalty`` (log pi / mu)^2, and beta times an estimate of KL(pi || ref), see
``_divergence``. Averages: grpo (arXiv 2402.03300), dapo (arXiv 2503.14476), dr_grpo (arXiv 2503.20783); see
``denominator``. Preference losses (DPO, IPO) are of whole sequences: ``preference_losses``.

Invariant accumulated_micro_batches_equal_one_batch: sums divided by ``denominator`` at the end do not depend on the
split; nothing here averages over a micro-batch.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from streamrl.consumers.algorithms.packing import body_of, logits_of, states_at
from streamrl.consumers.algorithms.settings import PAIRWISE, AlgorithmSettings
from streamrl.consumers.batching.settings import Packing
from streamrl.schemas.errors import ModelError

MAX_LOGITS = 1 << 26
"""Most logits held at once, 256 MiB in float32; more are computed in pieces, and again for the gradient."""

Head = Callable[[Tensor], Tensor]


class CompletionScorer:
    """Log-probabilities of a micro-batch's completions; applies the output layer only to trained tokens.

    ``packing``: whether the model runs on padded rows or on joined documents (``packing.py``), which its attention must
    keep apart. ``float32_head``: the output layer computes in float32 from float32 states, even under autocast; the
    rest of the model does not.

    A probe finds models whose logits are not simply output layer (last hidden state), such as soft-capped ones. For
    these the logits of every position are computed.

    Raises:
        ModelError: ``float32_head`` with such a model.
    """

    def __init__(self, model: Any, *, float32_head: bool = False, packing: Packing = "padded") -> None:
        self._model = model
        self._packing = packing
        self._decoder = model.get_decoder()
        self._head: Head | None = model.get_output_embeddings()
        if not self._head_is_plain():
            if float32_head:
                raise ModelError(
                    "expected a model whose logits are its output layer's for training.cast_lm_head_to_fp32, got "
                    f"{type(model).__name__}, which changes them afterwards; switch the setting off"
                )
            self._head = None
        elif float32_head:
            self._head = partial(_in_float32, self._head)
        self._body = body_of(self._decoder) if self._head is not None else logits_of(model)

    @torch.no_grad()
    def _head_is_plain(self) -> bool:
        # ``get_decoder`` of a model without a decoder returns the model itself.
        if self._head is None or self._decoder is self._model:
            return False
        probe = torch.arange(4, device=self._model.device).unsqueeze(0) % self._vocabulary
        hidden = self._decoder(input_ids=probe, use_cache=False).last_hidden_state
        return torch.allclose(self._head(hidden), self._model(input_ids=probe, use_cache=False).logits, atol=1e-5)

    def __call__(self, input_ids: Tensor, mask: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probs [B, S] float32 in nats at each sample's temperature, 0 where ``mask`` is 0; and the summed entropy.

        ``input_ids`` int64 [B, S], right padded; ``mask`` [B, S], 0 at the first position; ``temperatures`` [B].
        """
        row, column = torch.nonzero(mask, as_tuple=True)
        # States of the positions before each token, which predict it; [K, hidden] or [K, vocabulary].
        states = states_at(self._body, self._packing, input_ids, row, column - 1)
        scored, entropy = _score(states, self._head, input_ids[row, column], temperatures[row], self._vocabulary)
        return torch.zeros_like(mask).index_put((row, column), scored), entropy

    @property
    def _vocabulary(self) -> int:
        return int(self._model.config.get_text_config().vocab_size)


def _in_float32(head: Head, states: Tensor) -> Tensor:
    # Uses the module itself, not a copy, so that the gradient reaches its weight, tied or not. Without this context,
    # autocast would round both factors to bfloat16 again.
    with torch.autocast(states.device.type, enabled=False):
        return head(states.float())


def _score(
    states: Tensor, head: Head | None, targets: Tensor, temperatures: Tensor, vocabulary: int
) -> tuple[Tensor, Tensor]:
    size = max(1, MAX_LOGITS // vocabulary)
    # Without a head, ``states`` are the logits already, so pieces would save nothing.
    if len(targets) <= size or head is None:
        return _score_piece(states, head, targets, temperatures)
    # Checkpointed: otherwise autograd keeps the logits of every piece, [size, vocabulary], until the backward pass.
    pieces = [
        checkpoint(_score_piece, part, head, target, temperature, use_reentrant=False)
        for part, target, temperature in zip(
            *(torch.split(tensor, size) for tensor in (states, targets, temperatures)), strict=True
        )
    ]
    return torch.cat([scored for scored, _ in pieces]), torch.stack([entropy for _, entropy in pieces]).sum()


def _score_piece(states: Tensor, head: Head | None, targets: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probs [K] of ``targets`` and the sum of the K entropies, in float32."""
    # In float32, as the temperatures are: autocast's bfloat16 logits are too coarse for sums over a vocabulary.
    logits = (states if head is None else head(states)) / temperatures.unsqueeze(1)
    score: Callable[..., tuple[Tensor, Tensor]] = _Scores.apply
    return score(logits, targets.unsqueeze(1))


class _Scores(torch.autograd.Function):
    """Log-probs [K] of ``targets`` [K, 1] and the sum of the K entropies, which has no gradient, of logits z [K, V].

    log p(t) = z_t - log sum exp(z),    H = log sum exp(z) - sum p z in nats,    d log p(t) / dz = (1 at t) - p.

    Written out, because these few passes over all logits are half of those that autograd would make.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        largest = logits.amax(1, keepdim=True)
        weights = (logits - largest).exp_()  # p = weights / total
        total = weights.sum(1, keepdim=True)
        normaliser = largest + total.log()
        ctx.save_for_backward(weights, total, targets)
        with torch.autocast(logits.device.type, enabled=False):  # which would take this product in bfloat16
            weighted = torch.linalg.vecdot(weights, logits).unsqueeze(1)
        entropy = (normaliser - weighted / total).sum()
        ctx.mark_non_differentiable(entropy)
        return (logits.gather(1, targets) - normaliser).squeeze(1), entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        weights, total, targets = ctx.saved_tensors
        gradient = gradients[0].unsqueeze(1)
        return (weights * (-gradient / total)).scatter_add_(1, targets, gradient), None


@dataclass(frozen=True)
class LossSums:
    """Sums of a micro-batch. ``loss``: a scalar to differentiate. ``metrics``: scalar sums over tokens, and extremes
    whose names end in ``_min`` or ``_max``.
    """

    loss: Tensor
    metrics: dict[str, Tensor]


@dataclass(frozen=True)
class BatchTotals:
    """The numbers of trained sequences and trained tokens in a complete batch, for ``denominator``."""

    sequences: int
    tokens: int


@dataclass(frozen=True)
class TokenBatch:
    """B sequences of S positions. Values where ``mask`` is 0 are ignored.

    All tensors are [B, S]; log-probs are in nats at the sampling temperature. ``logprobs``: of the policy, with a
    gradient. ``behaviour_logprobs``: of the weights that sampled. ``proximal_logprobs``: of the policy at the start of
    the step; None: this is the start. ``reference_logprobs``: None: there is no reference. ``mask``: 0 or 1.
    ``advantages`` may also be [B], if all tokens of a sequence have the same.
    """

    logprobs: Tensor
    behaviour_logprobs: Tensor
    advantages: Tensor
    mask: Tensor
    proximal_logprobs: Tensor | None = None
    reference_logprobs: Tensor | None = None

    @cached_property
    def trained(self) -> Tensor:
        """Which tokens are trained, bool [B, S]."""
        return self.mask > 0

    @cached_property
    def log_ratio(self) -> Tensor:
        """Log pi / mu, [B, S], 0 for tokens that are not trained."""
        # Masked before any exp, because its overflow would make the gradient 0 x inf.
        return torch.where(self.trained, self.logprobs - self.behaviour_logprobs, 0.0)

    @cached_property
    def start_log_ratio(self) -> Tensor:
        """Log pi0 / mu, [B, S], without a gradient."""
        if self.proximal_logprobs is None:
            return self.log_ratio.detach()
        return torch.where(self.trained, self.proximal_logprobs - self.behaviour_logprobs, 0.0)

    @cached_property
    def step_log_ratio(self) -> Tensor:
        """Log pi / pi0, [B, S]."""
        return self.log_ratio - self.start_log_ratio

    @cached_property
    def token_advantages(self) -> Tensor:
        """Advantages of all tokens, [B, S]."""
        wide = self.advantages if self.advantages.ndim == 2 else self.advantages.unsqueeze(1)
        return wide.expand_as(self.log_ratio)

    def row(self, number: int) -> "TokenBatch":
        """A single sequence of the batch."""
        here = slice(number, number + 1)
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: value[here] for name, value in given.items() if value is not None})


Surrogate = Callable[[TokenBatch], tuple[Tensor, Tensor]]
"""Returns token losses [B, S], and which tokens were clipped [B, S]: -1 at the floor, 1 at the ceiling, else 0."""


def denominator(settings: AlgorithmSettings, totals: BatchTotals, max_completion_length: int) -> float:
    """The divisor of the accumulated loss sum; at least 1, so that an empty batch stays finite."""
    if settings.name in PAIRWISE:
        return max(totals.sequences / 2, 1.0)
    match settings.loss_type:
        case "grpo":
            return float(max(totals.sequences, 1))
        case "dapo":
            return float(max(totals.tokens, 1))
        case "dr_grpo":
            return float(max(totals.sequences, 1) * max_completion_length)


def token_losses(settings: AlgorithmSettings, tokens: TokenBatch, surrogate: Surrogate | None = None) -> LossSums:
    """Sums of token losses and token metrics. ``surrogate``: replaces the one that ``policy_loss`` names."""
    losses, clipped = (surrogate or partial(policy_surrogate, settings))(tokens)
    metrics = _ratio_metrics(tokens, clipped)
    if settings.importance_sampling_mode.endswith("mask"):
        log_weights = tokens.log_ratio.detach() if settings.ratio == "behaviour" else tokens.start_log_ratio
        dropped = importance_weights(settings, log_weights, tokens.trained) == 0
        metrics["is_masked"] = (dropped & tokens.trained).sum()
    if settings.log_ratio_penalty > 0:
        losses = losses + settings.log_ratio_penalty * tokens.log_ratio.square()
    if tokens.reference_logprobs is not None and settings.has_own_kl_term:
        divergence = _divergence(settings, tokens)
        losses = losses + settings.beta * divergence
        metrics["kl"] = divergence.detach().sum()
    weights = tokens.trained.to(losses.dtype)
    if settings.loss_type == "grpo":  # 1 / |o_i| here, 1 / sequences in ``denominator``: each sequence counts the same
        weights = weights / weights.sum(dim=1, keepdim=True).clamp(min=1)
    return LossSums(torch.where(tokens.trained, losses * weights, 0.0).sum(), metrics)


def importance_weights(settings: AlgorithmSettings, log_weights: Tensor, trained: Tensor) -> Tensor:
    """Weights [B, S], limited or masked as the settings say; ``log_weights`` must be 0 for tokens not trained."""
    mode, floor, cap = (
        settings.importance_sampling_mode,
        settings.importance_sampling_floor,
        settings.importance_sampling_cap,
    )
    if mode == "none":
        return torch.ones_like(log_weights)
    if mode.startswith("sequence"):
        log_weights = log_weights.sum(dim=1, keepdim=True).expand_as(log_weights)
    if mode.endswith("mask"):
        is_kept = torch.ones_like(trained) if cap is None else log_weights <= math.log(cap)
        if floor > 0:
            is_kept = is_kept & (log_weights >= math.log(floor))
        # Filled in log space, since exp may overflow and 0 x inf is NaN.
        return torch.where(is_kept, torch.exp(torch.where(is_kept, log_weights, 0.0)), 0.0)
    # Limited in log space: clamping exp's overflow would turn its gradient into 0 x inf.
    lowest = math.log(floor) if floor > 0 else None
    highest = None if cap is None else math.log(cap)
    return torch.exp(log_weights if lowest is highest is None else log_weights.clamp(min=lowest, max=highest))


def policy_surrogate(settings: AlgorithmSettings, tokens: TokenBatch) -> tuple[Tensor, Tensor]:
    """See ``Surrogate``; the formulas are in the module's docstring."""
    match settings.policy_loss:
        case "clip" | "gspo":
            return _clipped(settings, tokens)
        case "cispo":
            return _clipped_weights(settings, tokens)
        case "dppo":
            return _masked_by_probability(settings, tokens)
        case "reinforce":
            losses = -_outer_weights(settings, tokens, reinforce=True) * tokens.token_advantages * tokens.logprobs
            return losses, torch.zeros_like(tokens.log_ratio, dtype=torch.int32)


def _own_ratio(log_ratio: Tensor) -> Tensor:
    """The ratio pi / sg(pi): its value is 1, and its gradient is that of log pi."""
    return torch.exp(log_ratio - log_ratio.detach())


def _outer_weights(settings: AlgorithmSettings, tokens: TokenBatch, *, reinforce: bool = False) -> Tensor:
    """The weight c, [B, S], without a gradient; if r is pi / mu itself, only 1 or 0 for a token kept or masked."""
    if settings.ratio == "proximal":
        return importance_weights(settings, tokens.start_log_ratio, tokens.trained).detach()
    weights = importance_weights(settings, tokens.log_ratio, tokens.trained).detach()
    if reinforce:
        return weights
    is_masking = settings.importance_sampling_mode.endswith("mask")
    return (weights > 0).to(weights.dtype) if is_masking else torch.ones_like(weights)


def _log_ratio(settings: AlgorithmSettings, tokens: TokenBatch) -> Tensor:
    """Log r, or log s, [B, S]."""
    log_ratio = tokens.log_ratio if settings.ratio == "behaviour" else tokens.step_log_ratio
    if settings.policy_loss == "gspo":
        counts = tokens.trained.sum(dim=1, keepdim=True).clamp(min=1)
        log_ratio = (log_ratio.sum(dim=1, keepdim=True) / counts).expand_as(log_ratio)
    return log_ratio


def _limited_ratio(settings: AlgorithmSettings, tokens: TokenBatch) -> Tensor:
    """r, or s, [B, S]; limited if it is pi / mu and weights are limited for each token."""
    log_ratio = _log_ratio(settings, tokens)
    if settings.ratio == "behaviour" and settings.importance_sampling_mode == "token_truncate":
        return importance_weights(settings, log_ratio, tokens.trained)
    return torch.exp(log_ratio)


def _clipped(settings: AlgorithmSettings, tokens: TokenBatch) -> tuple[Tensor, Tensor]:
    floor, ceiling = settings.clip_range
    ratio, advantage = _limited_ratio(settings, tokens), tokens.token_advantages
    outer = _outer_weights(settings, tokens)
    losses = -outer * torch.minimum(ratio * advantage, ratio.clamp(floor, ceiling) * advantage)
    # A token outside the range is clipped only if min picks the constant: if A pushes further in the same direction.
    value = ratio.detach()
    low = (value < floor) & (advantage < 0)
    high = (value > ceiling) & (advantage > 0)
    return losses, high.int() - low.int()


def _clipped_weights(settings: AlgorithmSettings, tokens: TokenBatch) -> tuple[Tensor, Tensor]:
    floor, ceiling = settings.clip_range
    value = _limited_ratio(settings, tokens).detach()
    weights = _outer_weights(settings, tokens) * value.clamp(floor, ceiling)
    # The weight has no gradient, so a clipped token keeps the gradient of its log-prob.
    return -weights * tokens.token_advantages * tokens.logprobs, (value > ceiling).int() - (value < floor).int()


def _masked_by_probability(settings: AlgorithmSettings, tokens: TokenBatch) -> tuple[Tensor, Tensor]:
    anchor = tokens.behaviour_logprobs if settings.ratio == "behaviour" else tokens.proximal_logprobs
    before = tokens.logprobs.detach() if anchor is None else anchor
    advantage = tokens.token_advantages
    moved = torch.where(tokens.trained, torch.exp(tokens.logprobs.detach()) - torch.exp(before), 0.0)
    high = (moved > settings.upper_epsilon) & (advantage > 0)
    low = (moved < -settings.epsilon) & (advantage < 0)
    kept = (~(high | low)).to(moved.dtype)
    losses = -_outer_weights(settings, tokens) * kept * _limited_ratio(settings, tokens) * advantage
    return losses, high.int() - low.int()


def _divergence(settings: AlgorithmSettings, tokens: TokenBatch) -> Tensor:
    """Estimate of KL(pi || ref) at each token [B, S]; d = log ref - log pi.

    k1 = -d, k2 = d^2 / 2, k3 = exp(d) - d - 1 (Schulman 2020).

    With weights, k1 and k3 become c r k, with r = pi / sg(pi) and c = sg(w), limited. Below the cap this equals w k in
    value and gradient (DeepSeek-V3.2, arXiv 2512.02556, section 3.1). The gradient of weighted k3 is
    w (log pi - log ref) grad log pi; its expectation under mu is the gradient of KL(pi || ref). Without the weight it
    is (1 - exp(d)) grad log pi: on policy this is the gradient of KL(ref || pi), off policy of neither. The gradient of
    k2 is (log pi - log ref) grad log pi already, so k2 is only multiplied by c (arXiv 2510.01555).
    """
    assert tokens.reference_logprobs is not None
    gap = torch.where(tokens.trained, tokens.reference_logprobs - tokens.logprobs, 0.0)
    match settings.kl_estimator:
        case "k1":
            estimate = -gap
        case "k2":
            estimate = gap.square() / 2
        case "k3":
            estimate = torch.exp(gap) - gap - 1  # never negative for a single token, unlike -d
    if not settings.use_bias_correction_kl:
        return estimate
    weights = importance_weights(settings, tokens.log_ratio, tokens.trained).detach()
    if settings.kl_estimator == "k2":
        return weights * estimate
    return weights * _own_ratio(tokens.log_ratio) * estimate


def sequence_scores(tokens: TokenBatch) -> Tensor:
    """Log pi / ref of each completion, summed over its trained tokens, [B]."""
    assert tokens.reference_logprobs is not None
    return torch.where(tokens.trained, tokens.logprobs - tokens.reference_logprobs, 0.0).sum(dim=1)


def preference_losses(scores: Tensor, slopes: Tensor, halves: Tensor, tokens: TokenBatch) -> LossSums:
    """Losses of pairs whose two sequences may be in different micro-batches.

    ``scores`` [B]: from ``sequence_scores``, with a gradient. ``slopes`` [B]: the derivative d loss / d score of the
    pair's loss by this row's score, from a pass without gradient. ``halves`` [B]: half of the pair's loss. So the sum
    over both rows has the value and the gradient of the pair's loss.
    """
    loss = (slopes * (scores - scores.detach()) + halves).sum()
    return LossSums(loss, _ratio_metrics(tokens, torch.zeros_like(tokens.log_ratio, dtype=torch.int32)))


def _ratio_metrics(tokens: TokenBatch, clipped: Tensor) -> dict[str, Tensor]:
    """Sums over trained tokens, and the extremes of w = pi / mu."""
    log_ratio, trained = tokens.log_ratio.detach(), tokens.trained
    weight = torch.exp(log_ratio)
    return {
        "ratio": weight[trained].sum(),
        "ratio_min": torch.where(trained, weight, torch.inf).min(),
        "ratio_max": torch.where(trained, weight, -torch.inf).max(),
        "mismatch_kl": (weight - log_ratio - 1)[trained].sum(),  # k3 of KL(mu || pi): tokens are drawn from mu
        "clip_low": ((clipped < 0) & trained).sum(),
        "clip_high": ((clipped > 0) & trained).sum(),
    }
