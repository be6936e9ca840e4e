import pytest

from streamrl.init import precision


@pytest.mark.parametrize(("float32", "bfloat16", "faster"), [(1.0, 0.6, "bfloat16"), (1.0, 33.0, "float32")])
def test_the_faster_precision_is_taken(
    monkeypatch: pytest.MonkeyPatch, float32: float, bfloat16: float, faster: str
) -> None:
    monkeypatch.setattr(precision, "product_seconds", {"float32": float32, "bfloat16": bfloat16}.__getitem__)
    assert precision.faster_dtype() == faster


def test_both_precisions_are_measured() -> None:
    assert all(0 < precision.product_seconds(dtype) < 5 for dtype in ("float32", "bfloat16"))
