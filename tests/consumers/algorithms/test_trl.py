"""What TRL 1.16 itself computes: ``GRPOTrainer._compute_loss``, run on seeded tensors, its loss and gradient recorded.

``pi``: the policy; ``sampling``: who sampled, TRL's "old" policy where ``ratio`` is "behaviour"; ``old``: the policy at
the step's start, beside which TRL weighs by ``importance_sampling_ratio``. TRL means by cispo's ``epsilon_high`` the
largest weight itself, we what it exceeds 1 by.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from streamrl.consumers.algorithms.losses import BatchTotals, TokenBatch, denominator, token_losses
from streamrl.consumers.algorithms.settings import PRESETS, AlgorithmSettings
from streamrl.consumers.algorithms.shelf import algorithm_of

RECORDED = json.loads((Path(__file__).parent / "recorded" / "trl-1.16.json").read_text())


@pytest.mark.parametrize(
    "row", [row for row in RECORDED["rows"] if row["settings"]["name"] in PRESETS], ids=lambda row: row["name"]
)
def test_loss_and_gradient_are_trls(row: dict[str, Any]) -> None:
    value, gradient = errors(row)
    assert value < 1e-6
    assert gradient < 1e-6


def errors(row: dict[str, Any]) -> tuple[float, float]:
    """The largest difference in value and in gradient."""
    settings = AlgorithmSettings.model_validate(row["settings"])
    given = {name: torch.tensor(value, dtype=torch.float64) for name, value in row["tensors"].items()}
    leaf = given["pi"].requires_grad_()
    proximal = given["old"] if settings.ratio == "proximal" else None
    tokens = TokenBatch(leaf, given["sampling"], given["advantages"], given["mask"], proximal, given["reference"])
    totals = BatchTotals(len(leaf), int(given["mask"].sum()))
    loss = token_losses(settings, tokens, algorithm_of(settings).surrogate).loss / denominator(
        settings, totals, RECORDED["max_completion_length"]
    )
    (gradient,) = torch.autograd.grad(loss, leaf)
    expected = torch.tensor(row["gradient"], dtype=torch.float64)
    return abs(float(loss.detach()) - row["loss"]), float((gradient - expected).abs().max())
