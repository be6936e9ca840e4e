import math

import pytest
import torch

from streamrl.consumers.training.policy import digests_of
from streamrl.inspection.replay.comparing import compare_updates, tensor_equality


def test_one_changed_bit_differs_by_digest_and_by_value() -> None:
    original = {"a": torch.ones(3), "b": torch.zeros(2, 2)}
    changed = {"a": torch.nextafter(torch.ones(3), torch.tensor(2.0)), "b": torch.zeros(2, 2)}
    for originals, difference in ((original, pytest.approx(1.19e-7, rel=0.01)), (None, None)):
        first, second = tensor_equality(changed, digests_of(original), originals)
        assert (first.name, first.equal, first.max_abs_difference) == ("a", False, difference)
        assert second.equal


def test_negative_zero_is_not_zero_by_digest() -> None:
    (found,) = tensor_equality({"a": torch.tensor([-0.0])}, digests_of({"a": torch.tensor([0.0])}), None)
    assert not found.equal


def test_a_tensor_that_is_missing_differs() -> None:
    (found,) = tensor_equality({}, digests_of({"a": torch.ones(1)}), None)
    assert not found.equal


def test_originals_alone_are_compared_in_their_own_type() -> None:
    weights = torch.tensor([1.001])
    (found,) = tensor_equality({"a": weights}, {}, {"a": weights.bfloat16()})
    assert found.equal
    (found,) = tensor_equality({"a": weights}, {}, {"a": torch.tensor([1.5])})
    assert not found.equal


def test_updates_are_compared_by_layer_and_in_all() -> None:
    one = {"model.layers.0.q.weight": torch.tensor([3.0, 0.0]), "lm_head.weight": torch.tensor([4.0])}
    other = {"model.layers.0.q.weight": torch.tensor([0.0, 3.0]), "lm_head.weight": torch.tensor([4.0])}
    found = compare_updates(one, other)
    assert (found.original, found.what_if, found.cosine) == pytest.approx((5.0, 5.0, 16 / 25))
    assert [(group.group, group.cosine) for group in found.groups] == [("model.layers.0", 0.0), ("lm_head", 1.0)]
    assert found.movers[0].name == "model.layers.0.q.weight"
    assert found.movers[0].difference == pytest.approx(math.sqrt(18))


def test_an_update_of_nothing_has_no_direction() -> None:
    assert math.isnan(compare_updates({"a": torch.zeros(2)}, {"a": torch.ones(2)}).cosine)
