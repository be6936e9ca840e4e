from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from streamrl.consumers.algorithms import losses
from streamrl.consumers.algorithms.losses import CompletionScorer
from streamrl.consumers.training.model import load_model
from streamrl.schemas.errors import ModelError
from tests.consumers.training.factories import VOCABULARY, make_micro_batch, save_tiny_model

CPU = torch.device("cpu")


def full_logprobs(model: Any, ids: Tensor, temperatures: Tensor) -> Tensor:
    """Log-probs of every token but the first, the plain way."""
    logits = model(input_ids=ids).logits[:, :-1] / temperatures[:, None, None]
    found = torch.log_softmax(logits, dim=-1).gather(2, ids[:, 1:, None]).squeeze(2)
    return torch.cat([torch.zeros(len(ids), 1), found], dim=1)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_completion_logprobs_equal_those_of_the_whole_softmax(model_path: Path, temperature: float) -> None:
    model = load_model(model_path, CPU)
    batch = make_micro_batch(5, temperature=temperature)
    ids, mask = torch.tensor(batch.input_ids), torch.tensor(batch.loss_mask)
    temperatures = torch.full((5,), temperature)
    found, entropy = CompletionScorer(model)(ids, mask, temperatures)
    torch.testing.assert_close(found, full_logprobs(model, ids, temperatures) * mask, rtol=1e-5, atol=1e-6)
    assert 0 < entropy.item() / mask.sum().item() <= torch.log(torch.tensor(VOCABULARY)).item()


def test_padding_does_not_change_a_sequence(model_path: Path) -> None:
    model = load_model(model_path, CPU)
    batch = make_micro_batch(4)
    length = int(batch.lengths[0])
    ids, mask = torch.tensor(batch.input_ids[:1]), torch.tensor(batch.loss_mask[:1])
    scorer = CompletionScorer(model)
    padded = scorer(ids, mask, torch.ones(1))[0]
    alone = scorer(ids[:, :length], mask[:, :length], torch.ones(1))[0]
    torch.testing.assert_close(padded[:, :length], alone)


def test_logits_made_in_pieces_give_the_same_gradient(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(model_path, CPU)
    batch = make_micro_batch(5)
    ids, mask = torch.tensor(batch.input_ids), torch.tensor(batch.loss_mask)
    gradients = []
    for limit in (1 << 26, 3 * VOCABULARY):
        monkeypatch.setattr(losses, "MAX_LOGITS", limit)
        model.zero_grad()
        found, _ = CompletionScorer(model)(ids, mask, torch.ones(5))
        found.sum().backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


def test_a_model_that_alters_its_logits_takes_the_general_path(model_path: Path) -> None:
    model = load_model(model_path, CPU)
    plain = model.forward

    def capped(*args: Any, **kwargs: Any) -> Any:
        output = plain(*args, **kwargs)
        output.logits = torch.tanh(output.logits * 3)
        return output

    model.forward = capped
    batch = make_micro_batch(3)
    ids, mask = torch.tensor(batch.input_ids), torch.tensor(batch.loss_mask)
    found, _ = CompletionScorer(model)(ids, mask, torch.ones(3))
    torch.testing.assert_close(found, full_logprobs(model, ids, torch.ones(3)) * mask)


def bfloat16_logprobs(model: Any, ids: Tensor, *, float32_head: bool) -> Tensor:
    """Of all tokens but the first, with a body in bfloat16, as the trainer computes them."""
    mask = torch.ones(ids.shape)
    mask[:, 0] = 0.0
    scorer = CompletionScorer(model, float32_head=float32_head)
    with torch.autocast("cpu", torch.bfloat16):
        return scorer(ids, mask, torch.ones(len(ids)))[0][:, 1:]


@pytest.fixture
def sharp_model(tmp_path: Path) -> Any:
    """Logits of up to 14 or so, as a trained model has: there bfloat16 knows steps of 1/16."""
    model = load_model(save_tiny_model(tmp_path, vocab_size=500, hidden_size=64), CPU)
    torch.manual_seed(1)
    with torch.no_grad():
        model.get_output_embeddings().weight.normal_(0.0, 0.25)
    return model


def test_a_float32_head_leaves_no_rounding_of_the_logits(sharp_model: Any) -> None:
    ids = torch.randint(500, (8, 60), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            states = sharp_model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
        logits = states.double() @ sharp_model.get_output_embeddings().weight.double().T
        exact = torch.log_softmax(logits[:, :-1], dim=-1).gather(2, ids[:, 1:, None]).squeeze(2)
        rounded, kept = (
            (bfloat16_logprobs(sharp_model, ids, float32_head=wanted) - exact).abs().mean() for wanted in (False, True)
        )
    assert 5 < logits.max() < 25
    # 0.009 nats were measured on such logits; what is left is float32's own.
    assert 0.002 < rounded < 0.05
    assert kept < 1e-5


@pytest.mark.parametrize("limit", [1 << 26, 3 * 500], ids=["whole", "in pieces"])
def test_the_gradient_of_a_float32_head_reaches_the_tied_weight(
    sharp_model: Any, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(losses, "MAX_LOGITS", limit)
    tied = sharp_model.get_input_embeddings().weight
    assert tied is sharp_model.get_output_embeddings().weight
    ids = torch.randint(400, (4, 40), generator=torch.Generator().manual_seed(2))
    bfloat16_logprobs(sharp_model, ids, float32_head=True).sum().backward()
    found, tied.grad = tied.grad.clone(), None
    mask = torch.ones(ids.shape)
    mask[:, 0] = 0.0
    CompletionScorer(sharp_model)(ids, mask, torch.ones(4))[0].sum().backward()
    # Rows above 400 are no input: theirs is the output layer's gradient alone.
    assert found[400:].abs().sum() > 0
    for rows in (slice(0, 400), slice(400, 500)):
        close = torch.nn.functional.cosine_similarity(found[rows].flatten(), tied.grad[rows].flatten(), dim=0)
        assert close > 0.999


def test_in_float32_a_float32_head_changes_nothing(model_path: Path) -> None:
    model = load_model(model_path, CPU)
    batch = make_micro_batch(5)
    ids, mask = torch.tensor(batch.input_ids), torch.tensor(batch.loss_mask)
    plain, cast = (CompletionScorer(model, float32_head=wanted)(ids, mask, torch.ones(5)) for wanted in (False, True))
    assert torch.equal(plain[0], cast[0])


def test_a_float32_head_is_refused_where_logits_are_not_the_heads(model_path: Path) -> None:
    model = load_model(model_path, CPU)
    plain = model.forward

    def scaled(*args: Any, **kwargs: Any) -> Any:
        output = plain(*args, **kwargs)
        output.logits = output.logits * 3
        return output

    model.forward = scaled
    with pytest.raises(ModelError, match="cast_lm_head_to_fp32, got Qwen2ForCausalLM"):
        CompletionScorer(model, float32_head=True)
