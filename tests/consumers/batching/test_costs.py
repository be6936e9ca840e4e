import numpy as np
import pytest

from streamrl.consumers.batching.micro_batches import CostModel
from streamrl.consumers.batching.settings import BatchingSettings


def test_a_sequence_as_long_as_the_budget_costs_as_much_as_the_budget_has_tokens() -> None:
    model = CostModel.of(BatchingSettings(token_budget=1000, attention_cost_fraction=0.3))
    assert model.of_sequences(np.array([1000])).tolist() == [pytest.approx(1000.0)]


def test_the_square_s_share_of_the_cost_is_the_setting() -> None:
    model = CostModel.of(BatchingSettings(token_budget=1000, attention_cost_fraction=0.3))
    assert model.quadratic * 1000**2 == pytest.approx(0.3 * 1000)
    (short,) = model.of_sequences(np.array([100]))
    assert short == pytest.approx(0.7 * 100 + 0.3 * 100**2 / 1000)
