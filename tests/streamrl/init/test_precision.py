import pytest

from streamrl.init import precision


@pytest.mark.parametrize(("float32", "bfloat16", "faster"), [(1.0, 0.6, "bfloat16"), (1.0, 33.0, "float32")])
def test_the_faster_precision_is_taken(
    monkeypatch: pytest.MonkeyPatch, float32: float, bfloat16: float, faster: str
) -> None:
    monkeypatch.setattr(precision, "product_seconds", {"float32": float32, "bfloat16": bfloat16}.__getitem__)
    assert precision.faster_dtype() == faster


def test_a_much_slower_precision_is_told_with_both_times(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"float32": 0.0011, "bfloat16": 0.0123}
    monkeypatch.setattr(precision, "product_seconds", seconds.__getitem__)
    assert precision.slow_bfloat16() == (
        "this processor takes 12.3 ms for a matrix product in bfloat16, 1.1 ms in float32 (11 times as long)"
    )
    seconds["bfloat16"] = 0.0021
    assert precision.slow_bfloat16() is None


def test_both_precisions_are_measured() -> None:
    assert all(0 < precision.product_seconds(dtype) < 5 for dtype in ("float32", "bfloat16"))
