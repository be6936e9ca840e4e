"""The limit of a trainer's speed: FLOPs by the model's weights, and matrix products as measured here."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Qwen2ForCausalLM

from streamrl.consumers.training.compute_limit import ComputeLimit, flops_per_token, matmul_flops_per_s
from tests.consumers.training.factories import SMALL, VOCABULARY, tiny_config

HIDDEN, INNER = SMALL["hidden_size"], SMALL["intermediate_size"]
# Queries and output are whole, keys and values half as wide, since two heads share one of them.
LAYER = 3 * HIDDEN * INNER + 3 * HIDDEN * HIDDEN
LAYERS, HEAD = SMALL["num_hidden_layers"] * LAYER, VOCABULARY * HIDDEN


@pytest.mark.parametrize("tied", [True, False])
def test_every_weight_of_a_matrix_product_counts_once(tied: bool) -> None:
    model = Qwen2ForCausalLM(tiny_config(tie_word_embeddings=tied))
    assert flops_per_token(model) == 6 * (LAYERS + HEAD)


def test_a_frozen_weight_has_no_gradient_of_its_own() -> None:
    model = Qwen2ForCausalLM(tiny_config(tie_word_embeddings=False))
    for weight in model.model.parameters():
        weight.requires_grad_(False)
    assert flops_per_token(model) == 4 * LAYERS + 6 * HEAD


def test_a_model_of_experts_has_no_known_limit() -> None:
    config = SimpleNamespace(num_local_experts=8)
    model: Any = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: config))
    assert flops_per_token(model) is None


def test_the_limit_is_measured_without_drawing_a_random_number() -> None:
    before = torch.get_rng_state()
    assert 1e7 < matmul_flops_per_s(torch.device("cpu"), torch.float32) < 1e15
    assert torch.equal(before, torch.get_rng_state())


def test_utilisation_is_the_share_of_the_limit_that_a_step_reached() -> None:
    limit = ComputeLimit(flops_per_s=1e12, flops_per_token=1e9)
    found = limit.metrics(tokens=500, seconds=2.0)
    assert found == {"perf/limit_tok/s": 1000.0, "perf/matmul_tflops": 1.0, "perf/mfu": 0.25}
    assert "perf/mfu" not in limit.metrics(tokens=500, seconds=0.0)
