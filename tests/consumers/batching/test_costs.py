import numpy as np
import pytest

from streamrl.consumers.batching.micro_batches import CostModel


def test_a_sequence_as_long_as_the_budget_costs_as_much_as_the_budget_has_tokens() -> None:
    model = CostModel.of(1000)
    assert model.of_sequences(np.array([1000])).tolist() == [pytest.approx(1000.0)]


def test_the_square_s_share_of_the_cost_is_the_constant() -> None:
    model = CostModel.of(1000)
    assert model.quadratic * 1000**2 == pytest.approx(0.2 * 1000)
    (short,) = model.of_sequences(np.array([100]))
    assert short == pytest.approx(0.8 * 100 + 0.2 * 100**2 / 1000)
