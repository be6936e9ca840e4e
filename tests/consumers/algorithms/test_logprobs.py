from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from consumers.algorithms import losses
from consumers.algorithms.losses import CompletionScorer
from consumers.training.model import load_model
from tests.consumers.training.factories import VOCABULARY, make_micro_batch

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
