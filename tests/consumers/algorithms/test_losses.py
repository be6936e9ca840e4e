import itertools
import math

import pytest
import torch
from torch import Tensor

from streamrl.consumers.algorithms.losses import BatchTotals, LossSums, TokenBatch, denominator, token_losses
from streamrl.consumers.algorithms.settings import AlgorithmSettings

MAX_LENGTH = 8


def rows(*values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def sums_of(
    settings: AlgorithmSettings,
    logprobs: Tensor,
    behaviour: Tensor,
    advantages: Tensor,
    mask: Tensor,
    reference: Tensor | None = None,
) -> LossSums:
    return token_losses(settings, TokenBatch(logprobs, behaviour, advantages, mask, reference_logprobs=reference))


def losses(settings: AlgorithmSettings, ratios: Tensor, advantages: list[float], mask: Tensor) -> LossSums:
    """Losses where pi / mu takes the given values, with mu = e^-1 at every token."""
    return sums_of(settings, torch.log(ratios) - 1.0, torch.full_like(ratios, -1.0), torch.tensor(advantages), mask)


def test_dapo_sums_the_clipped_surrogate_over_trained_tokens() -> None:
    settings = AlgorithmSettings(loss_type="dapo", epsilon=0.2, epsilon_high=0.28, importance_sampling_cap=None)
    ratios = rows([1.0, 1.5, 9.0], [0.5, 1.1, 1.0])
    sums = losses(settings, ratios, [2.0, -1.0], rows([1, 1, 0], [1, 1, 0]))
    # A=2: -(1·2) and -(1.28·2); A=-1: min(-0.5, -0.8) = -0.8 → +0.8, and +1.1
    assert sums.loss.item() == pytest.approx(-2.0 - 2.56 + 0.8 + 1.1)
    assert sums.metrics["clip_high"].item() == 1
    assert sums.metrics["clip_low"].item() == 1
    assert sums.metrics["ratio"].item() == pytest.approx(1.0 + 1.5 + 0.5 + 1.1)
    assert (sums.metrics["ratio_min"].item(), sums.metrics["ratio_max"].item()) == pytest.approx((0.5, 1.5))


def test_grpo_averages_each_sequence_over_its_own_tokens() -> None:
    settings = AlgorithmSettings(loss_type="grpo", importance_sampling_cap=None)
    sums = losses(settings, rows([1.0, 1.0, 1.0], [1.0, 1.0, 1.0]), [3.0, -4.0], rows([1, 1, 1], [0, 1, 0]))
    assert sums.loss.item() == pytest.approx(-3.0 + 4.0)


def test_denominators_are_sequences_tokens_and_sequences_times_the_length_limit() -> None:
    totals = BatchTotals(sequences=4, tokens=10)
    found = [denominator(AlgorithmSettings(loss_type=kind), totals, 7) for kind in ("grpo", "dapo", "dr_grpo")]
    assert found == [4.0, 10.0, 28.0]
    assert denominator(AlgorithmSettings(), BatchTotals(0, 0), 7) == 1.0


def test_the_cap_bounds_a_worsening_token_in_the_behaviour_form() -> None:
    mask = rows([1])
    open_ended = AlgorithmSettings(importance_sampling_cap=None)
    capped = AlgorithmSettings(importance_sampling_cap=2.0)
    assert losses(open_ended, rows([5.0]), [-1.0], mask).loss.item() == pytest.approx(5.0)
    assert losses(capped, rows([5.0]), [-1.0], mask).loss.item() == pytest.approx(2.0)


def test_a_capped_ratio_beyond_the_range_of_floats_has_a_finite_gradient() -> None:
    logprobs = torch.tensor([[-0.1]], requires_grad=True)
    sums = sums_of(AlgorithmSettings(), logprobs, torch.tensor([[-200.0]]), torch.tensor([-1.0]), torch.ones(1, 1))
    sums.loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.item() == 0.0


def test_the_proximal_form_is_reinforce_weighted_by_the_truncated_ratio() -> None:
    settings = AlgorithmSettings(ratio="proximal", importance_sampling_cap=2.0)
    logprobs = (torch.log(rows([0.5, 1.2, 6.0])) - 1.0).requires_grad_()
    sums = sums_of(settings, logprobs, torch.full_like(logprobs, -1.0), torch.tensor([3.0]), rows([1, 1, 1]))
    sums.loss.backward()
    assert sums.loss.item() == pytest.approx(-3.0 * (0.5 + 1.2 + 2.0))
    assert logprobs.grad is not None
    assert logprobs.grad[0].tolist() == pytest.approx([-1.5, -3.6, -6.0])
    assert sums.metrics["clip_low"].item() == sums.metrics["clip_high"].item() == 0


def test_the_kl_term_is_the_k3_estimator() -> None:
    settings = AlgorithmSettings(beta=0.1, use_bias_correction_kl=False)
    logprobs = rows([-1.0, -2.0]).requires_grad_()
    reference = rows([-1.5, -1.0])
    sums = sums_of(settings, logprobs, logprobs.detach() + 1.0, torch.zeros(1), rows([1, 1]), reference)
    k3 = (math.exp(-0.5) + 0.5 - 1) + (math.exp(1.0) - 1.0 - 1)
    assert sums.metrics["kl"].item() == pytest.approx(k3)
    assert sums.loss.item() == pytest.approx(0.1 * k3)
    sums.loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad[0].tolist() == pytest.approx([0.1 * (1 - math.exp(-0.5)), 0.1 * (1 - math.e)])


@pytest.mark.parametrize("ratio", ["behaviour", "proximal"])
def test_the_weighted_kl_term_follows_the_truncated_importance_ratio(ratio: str) -> None:
    """Ratios 1 (on policy), 0.5 and 6, which counts as 2; the value is w k3, the gradient w (log pi - log ref)."""
    settings = AlgorithmSettings(beta=0.1, ratio=ratio)
    logprobs = rows([-1.0, -2.0, -0.5]).requires_grad_()
    behaviour = logprobs.detach() - torch.log(rows([1.0, 0.5, 6.0]))
    reference = rows([-1.5, -1.0, -0.7])
    sums = sums_of(settings, logprobs, behaviour, torch.zeros(1), rows([1, 1, 1]), reference)
    weights, gaps = (1.0, 0.5, 2.0), (-0.5, 1.0, -0.2)
    expected = sum(w * (math.exp(gap) - gap - 1) for w, gap in zip(weights, gaps, strict=True))
    assert sums.metrics["kl"].item() == pytest.approx(expected)
    assert sums.loss.item() == pytest.approx(0.1 * expected)
    sums.loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad[0].tolist() == pytest.approx(
        [-0.1 * w * gap for w, gap in zip(weights, gaps, strict=True)], abs=1e-12
    )


def expected_kl_gradient(behaviour: Tensor, logits: Tensor, reference: Tensor, settings: AlgorithmSettings) -> Tensor:
    """What the KL term adds to the gradient of the logits [K], in expectation under the behaviour policy [K]."""
    leaf = logits.clone().requires_grad_()
    logprobs = torch.log_softmax(leaf, dim=0)
    tokens = torch.ones(1, 1, dtype=torch.float64)
    total = torch.zeros((), dtype=torch.float64)
    for token, probability in enumerate(behaviour.exp().tolist()):
        one = slice(token, token + 1)
        sums = sums_of(
            settings, logprobs[None, one], behaviour[None, one], torch.zeros(1), tokens, reference[None, one]
        )
        total = total + probability * sums.loss
    (gradient,) = torch.autograd.grad(total, leaf)
    return gradient


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("distance", [0.0, 0.3, 1.0])
def test_the_expected_gradient_of_the_weighted_kl_is_the_gradient_of_the_kl(seed: int, distance: float) -> None:
    """Every token of a small vocabulary, weighted by how often the behaviour policy samples it."""
    generator = torch.Generator().manual_seed(seed)
    logits, noise, other = (torch.randn(5, generator=generator, dtype=torch.float64) for _ in range(3))
    behaviour, reference = torch.log_softmax(logits + distance * noise, dim=0), torch.log_softmax(other, dim=0)
    leaf = logits.clone().requires_grad_()
    logprobs = torch.log_softmax(leaf, dim=0)
    (exact,) = torch.autograd.grad((logprobs.exp() * (logprobs - reference)).sum(), leaf)

    weighted = AlgorithmSettings(beta=1.0, importance_sampling_cap=None)
    torch.testing.assert_close(expected_kl_gradient(behaviour, logits, reference, weighted), exact)
    # The plain k3 is no such estimator: on policy its gradient is that of KL(ref || pi).
    plain = weighted.model_copy(update={"use_bias_correction_kl": False})
    found = expected_kl_gradient(behaviour, logits, reference, plain)
    assert (found - exact).abs().max() > 0.02
    if distance == 0.0:
        logprobs = torch.log_softmax(leaf, dim=0)
        (reverse,) = torch.autograd.grad((reference.exp() * (reference - logprobs)).sum(), leaf)
        torch.testing.assert_close(found, reverse)


def test_masked_tokens_change_neither_loss_nor_gradient() -> None:
    logprobs = torch.tensor([[-1.0, float("-inf")]], requires_grad=True)
    sums = sums_of(
        AlgorithmSettings(), logprobs, torch.tensor([[-1.0, 0.0]]), torch.tensor([1.0]), torch.tensor([[1.0, 0.0]])
    )
    sums.loss.backward()
    assert sums.loss.item() == pytest.approx(-1.0)
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [[-1.0, 0.0]]


def test_a_weight_beyond_the_range_of_floats_leaves_the_gradient_of_the_kl_finite() -> None:
    logprobs = torch.tensor([[-0.1]], requires_grad=True)
    far, reference = torch.tensor([[-200.0]]), torch.tensor([[-0.3]])
    sums = sums_of(AlgorithmSettings(beta=0.5), logprobs, far, torch.zeros(1), torch.ones(1, 1), reference)
    sums.loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(0.5 * 2.0 * 0.2)


KINDS = [
    AlgorithmSettings(loss_type=kind, ratio=ratio, beta=beta)
    for kind, ratio, beta in itertools.product(("grpo", "dapo", "dr_grpo"), ("behaviour", "proximal"), (0.0, 0.05))
]


def _batch() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    logprobs, behaviour, reference = (-torch.rand(6, 9, generator=generator, dtype=torch.float64) * 2 for _ in range(3))
    advantages = torch.randn(6, generator=generator, dtype=torch.float64)
    mask = (torch.rand(6, 9, generator=generator) < 0.6).double()
    return logprobs, behaviour, advantages, mask, reference


@pytest.mark.parametrize("settings", KINDS, ids=lambda s: f"{s.loss_type}-{s.ratio}-beta{s.beta}")
def test_accumulated_micro_batches_equal_one_batch(settings: AlgorithmSettings) -> None:
    logprobs, behaviour, advantages, mask, reference = _batch()
    totals = BatchTotals(sequences=6, tokens=int(mask.sum()))
    whole = None
    for split in ([6], [1] * 6, [2, 4], [5, 1], [1, 3, 2]):
        leaf = logprobs.clone().requires_grad_()
        total_loss, start = 0.0, 0
        for size in split:
            part = slice(start, start + size)
            sums = sums_of(settings, leaf[part], behaviour[part], advantages[part], mask[part], reference[part])
            sums.loss.backward()
            total_loss += sums.loss.item()
            start += size
        assert leaf.grad is not None
        gradient = leaf.grad / denominator(settings, totals, MAX_LENGTH)
        if whole is None:
            whole = (total_loss, gradient)
        assert total_loss == pytest.approx(whole[0], rel=1e-12)
        torch.testing.assert_close(gradient, whole[1], rtol=1e-12, atol=1e-15)


def _by_hand(settings: AlgorithmSettings, pi: float, mu: float, advantage: float) -> float:
    w = math.exp(pi - mu)
    if settings.ratio == "proximal":
        return -min(w, 2.0) * advantage
    r = min(w, 2.0)
    return -min(r * advantage, min(max(r, 0.8), 1.28) * advantage)


@pytest.mark.parametrize("ratio", ["behaviour", "proximal"])
def test_the_batch_loss_equals_the_formula_written_out(ratio: str) -> None:
    logprobs, behaviour, advantages, mask, _ = _batch()
    for kind in ("grpo", "dapo", "dr_grpo"):
        settings = AlgorithmSettings(loss_type=kind, ratio=ratio)
        found = sums_of(settings, logprobs, behaviour, advantages, mask).loss.item()
        expected = 0.0
        for i in range(6):
            tokens = [t for t in range(9) if mask[i, t] > 0]
            row = sum(
                _by_hand(settings, logprobs[i, t].item(), behaviour[i, t].item(), advantages[i].item()) for t in tokens
            )
            expected += row / len(tokens) if kind == "grpo" else row
        assert found == pytest.approx(expected, rel=1e-6)


def test_the_gradient_agrees_with_finite_differences() -> None:
    logprobs, behaviour, advantages, mask, reference = _batch()
    for settings in KINDS:
        # The proximal form stops gradients on purpose, and so does a truncated weight of the KL term.
        settings = settings.model_copy(update={"use_bias_correction_kl": False})
        if settings.ratio == "behaviour":
            assert torch.autograd.gradcheck(
                lambda leaf, s=settings: sums_of(s, leaf, behaviour, advantages, mask, reference).loss,
                logprobs.clone().requires_grad_(),
            )
    open_ended = AlgorithmSettings(beta=0.05, importance_sampling_cap=None)
    assert torch.autograd.gradcheck(
        lambda leaf: sums_of(open_ended, leaf, behaviour, advantages, mask, reference).loss,
        logprobs.clone().requires_grad_(),
    )
